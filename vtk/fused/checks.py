"""Checks the assumptions of folding: a part that computes something may be refused, but never be lost."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn

from vtk.fused.norms import refusal
from vtk.models.transforms.context_broadcast import ContextBroadcast

_SILENT = (nn.Identity, nn.Dropout, nn.Dropout1d, DropPath, PatchDropout)
_PROBE = torch.linspace(-8, 8, 256, dtype=torch.float64)


def is_identity(module: Any) -> bool:
    """Return whether a module gives its input back: `torch.nn.Identity` itself, not a subclass that computes."""
    return type(module) is nn.Identity


def is_exactly(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether ``module`` is of a known class, or of that class with Context Broadcasting attached."""
    kinds = type(module)
    attached = kinds.__module__ == ContextBroadcast.__module__ and kind in kinds.__bases__
    return kinds is kind or attached


def check_silent(module: Any, where: str, *names: str) -> None:
    """Refuse what stands in the place of a dropout and is none, such as an adapter.

    Args:
        module: whose parts.
        where: its name in the model, empty for the model.
        names: of the parts, each of which must do nothing in eval mode.

    Raises:
        UsageError: one of them may compute something.
    """
    for name in names:
        part = getattr(module, name)
        if type(part) not in _SILENT:
            reason = "only a dropout is known in this place, which does nothing in eval mode"
            raise refusal(f"{where}.{name}".removeprefix("."), part, reason)


def check_order(module: nn.Module, where: str, names: Sequence[str]) -> None:
    """Refuse a branch that is not a plain Sequential of exactly the parts ``names``."""
    found = [name for name, _ in module.named_children()]
    if type(module) is not nn.Sequential or found != list(names):
        raise refusal(where, module, f"a Sequential of {', '.join(names)} is expected, found {', '.join(found)}")


def check_scale(module: Any, where: str) -> None:
    """Refuse a softmax scale of its own; timm reads it only where `fused_attn` is off, and takes 1/√D elsewhere."""
    if not module.fused_attn and module.scale != head_dim(module) ** -0.5:
        raise refusal(where, module, f"its `scale` is {module.scale}, and only 1/√{head_dim(module)} is known")


def head_dim(attn: Any) -> int:
    """Return the channels of a head, which BEiT's attention does not keep."""
    own: int | None = getattr(attn, "head_dim", None)
    return int(attn.qkv.out_features // 3 // attn.num_heads) if own is None else own


def shared_activation(acts: Sequence[Any], wheres: Sequence[str]) -> nn.Module:
    """Return a copy of the activation that all branches have, to be applied to their hidden layers side by side.

    Raises:
        UsageError: the branches' activations differ, or one looks at more than one element at a time (softmax, GLU).
    """
    if len(acts) > 1:
        first = _respond(acts[0], _PROBE)
        for act, where in zip(acts, wheres, strict=True):
            alone = _respond(act, _PROBE)
            if type(act) is not type(acts[0]) or alone is None or first is None or not torch.equal(alone, first):
                raise refusal(f"{where}.act", act, "the branches of a block have different activations")
            both = _respond(act, torch.cat((_PROBE, _PROBE.flip(0))))
            if both is None or not torch.equal(both, torch.cat((first, first.flip(0)))):
                raise refusal(f"{where}.act", act, "branches can be merged only if it acts on each element by itself")
    return copied(acts[0])


def copied(module: nn.Module) -> Any:
    """Return a copy in eval mode without gradients: the model that is fused keeps its own."""
    return copy.deepcopy(module).eval().requires_grad_(False)


def _respond(act: nn.Module, x: Tensor) -> Tensor | None:
    """Return the activation of x (n), in fp64 on the CPU, or None where it takes no such input."""
    try:
        with torch.no_grad():
            y: Tensor = copied(act).to("cpu", torch.float64)(x.clone()[None, None])
    except (RuntimeError, ValueError):
        return None
    return y[0, 0]

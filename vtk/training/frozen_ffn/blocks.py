"""The training forward pass of a block whose norms and FFN are frozen, and the switch that gives it to a model.

A block gets a subclass of its class, so that parameters, their names and ``isinstance`` stay. Outside of training, and
wherever something is asked that the engine does not do (a mask, a norm that is trained after all), the block's own
forward pass runs.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.training.finetune_config import MODES, MemoryMode
from vtk.training.frozen_ffn import parts, rules
from vtk.training.frozen_ffn.fold import forget
from vtk.training.frozen_ffn.handover import link, unlink
from vtk.training.frozen_ffn.parts import Positions
from vtk.training.frozen_ffn.stages import both_stages
from vtk.training.options.policy import current_mode


@dataclass(frozen=True)
class MemoryPlan:
    """What `apply_memory_mode` did.

    Attributes:
        mode: that was asked for.
        changed: blocks that train by the engine.
        blocks: blocks of a class it knows.
        reasons: why other blocks, or parts of blocks, keep what torch's autograd keeps.
        idle: whether nothing would be kept for any block, whatever the mode.
    """

    mode: MemoryMode
    changed: int
    blocks: int
    reasons: tuple[str, ...]
    idle: bool = False

    @property
    def note(self) -> str | None:
        """One line on what of the mode is not done; None when all of it is."""
        if not self.reasons:
            return None
        what = "is done in part" if self.effective else "changes nothing"
        rest = "" if self.idle else "; what is left keeps what torch's autograd keeps"
        if rest and not self.effective:
            rest += " (--grad-checkpointing keeps less, for any block)"
        return f"--memory {self.mode} {what}: {'; '.join(self.reasons)}{rest}"

    @property
    def effective(self) -> bool:
        """Whether any block trains by the engine."""
        return self.changed > 0


def apply_memory_mode(model: nn.Module, mode: MemoryMode) -> MemoryPlan:
    """Choose what the blocks of ``model`` keep for backward while they train, in place; `remove_memory_mode` undoes it.

    Args:
        model: a timm model; which parameters are trained must be settled.
        mode: ``plain`` keeps what torch's autograd needs, less what only a weight gradient of frozen layers would need;
            ``act8`` (once ``gelu8``) keeps the slopes of the FFN's activation in 8 bits in place of its first layer's
            result; ``recompute`` computes that layer again; ``minimal`` queries, keys and values, too. All but ``act8``
            give exact gradients.

    Returns:
        How many blocks follow the mode, and why others do not.
    """
    remove_memory_mode(model)
    mode = current_mode(mode)
    blocks = [m for m in model.modules() if parts.is_block(m)]
    reasons: Counter[str] = Counter()
    changed = 0
    for block in blocks:
        modes, notes = rules.choose(block, mode)
        reasons.update(notes)
        if modes is not None:
            kind: Any = type(block)
            block.__class__ = _subclass(kind)
            block.memory_modes = modes  # type: ignore[assignment]
            block.memory_parts = rules.fingerprint(block)  # type: ignore[assignment]
            changed += modes.ffn != "plain" or modes.qkv_again or mode == "plain"
    link(model)
    if not blocks:
        first = next(iter(getattr(model, "blocks", ())), None)
        which = "" if first is None else f" (`blocks.0` is {type(first).__module__}.{type(first).__name__})"
        reasons[f"{type(model).__name__} has no block the engine knows{which}"] += 1
    elif not _differentiated(model):
        remove_memory_mode(model)
        why = "no weight at or before the blocks is trained, so nothing is kept for them"
        return MemoryPlan(mode, 0, len(blocks), (why,), idle=True)
    return MemoryPlan(mode, changed, len(blocks), tuple(reasons))


def obstacles(model: nn.Module) -> tuple[str, ...]:
    """Return why blocks of ``model`` would not follow every mode in full; empty where all do. Nothing is changed.

    Args:
        model: which parameters are trained must be settled; may be on the meta device.
    """
    blocks = [m for m in model.modules() if parts.is_block(m)]
    if not blocks:
        return (f"{type(model).__name__} has no block the engine knows",)
    return tuple(dict.fromkeys(note for block in blocks for mode in MODES for note in rules.choose(block, mode)[1]))


def remove_memory_mode(model: nn.Module) -> None:
    """Give every block its own forward pass back."""
    for module in model.modules():
        if "memory_modes" in module.__dict__:
            module.__class__ = type(module).__bases__[0]
            del module.__dict__["memory_modes"], module.__dict__["memory_parts"]
            unlink(module)
            forget(module)


def _differentiated(model: nn.Module) -> bool:
    """Tell whether gradients flow through any block: something in it, or before it, is trained."""
    behind = tuple(f"{name}." for name in ("norm", "fc_norm", "head", "head_dist", "attn_pool"))
    return any(p.requires_grad for n, p in model.named_parameters() if not n.startswith(behind))


@functools.cache
def _subclass(kind: Any) -> type[nn.Module]:
    """Return a subclass of a block class whose forward pass, while training, is the engine's."""

    names = parts.ARGUMENTS[kind]

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        masked = given.pop("attn_mask", None) is not None or given.pop("is_causal", False)
        if masked or not self.training or not torch.is_grad_enabled() or _forward_mode() or not _unchanged(self):
            y: Tensor = kind.forward(self, x, *args, **kwargs)
            return y
        return both_stages(self, x, Positions(given.pop("rope", None), next(iter(given.values()), None)))

    def reduce(self: Any, protocol: Any) -> Any:
        # the class has no name in this module by which copy and pickle could find it
        return _blank, (kind,), self.__getstate__()

    methods = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__}
    return type(f"FrozenFfn{kind.__name__}", (kind,), methods)


def _blank(kind: Any) -> nn.Module:
    cls = _subclass(kind)
    made: nn.Module = cls.__new__(cls)
    return made


def _unchanged(block: Any) -> bool:
    # a compiler guards on the modules it saw
    if not torch.compiler.is_compiling() and not rules.is_as_chosen(block, block.memory_parts):
        return False
    engine = block.memory_modes.ffn != "plain"
    return all(rules.still_frozen(b, False) for b in parts.attention_branches(block)) and all(
        rules.still_frozen(b, engine) for b in parts.ffn_branches(block)
    )


def _forward_mode() -> bool:
    """Tell whether tangents are asked for: the engine's operators would drop them without a word."""
    if torch.compiler.is_compiling():
        return False
    layer = torch._C._functorch.peek_interpreter_stack()
    dual = torch.autograd.forward_ad._current_level >= 0
    return dual or (layer is not None and layer.key() == torch._C._functorch.TransformType.Jvp)


def can_join(blocks: Sequence[nn.Module]) -> bool:
    """Tell whether `attention_stage` and `ffn_stage` may run blocks of several tasks now, with the FFN of the first."""
    first = blocks[0].__dict__.get("memory_modes")
    same = all(block.training and block.__dict__.get("memory_modes") == first for block in blocks)
    return (
        first is not None and same and torch.is_grad_enabled() and not _forward_mode() and all(map(_unchanged, blocks))
    )

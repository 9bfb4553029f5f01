"""The transform ``add_context_broadcast``: adds Context Broadcasting (Hyeon-Woo et al. 2023) to layers of a model."""

from collections.abc import Sequence

import timm.models.vision_transformer as vit
from timm.layers import Mlp
from timm.models.mlp_mixer import MixerBlock
from torch import nn

from vtk.errors import UsageError
from vtk.models.transforms.blocks import branch_modules, choose_layers, find_blocks
from vtk.models.transforms.context_broadcast import ContextBroadcast, Placement, Where, attach, attach_to_sum
from vtk.models.transforms.registry import register

PLACEMENTS = ("front", "mid", "end")
TARGETS = ("mlp", "msa", "both")

_WHAT = "Context Broadcasting"


@register("add_context_broadcast")
def add_context_broadcast(
    model: nn.Module,
    *,
    scale: bool = False,
    placement: str = "end",
    on: str = "mlp",
    layers: str | Sequence[int] = "all",
) -> dict[str, str | None]:
    """Add Context Broadcasting to layers of a model, in place; tensors keep their names.

    Args:
        model: a timm Vision Transformer, also of parallel branches, a PiT or an MLP-Mixer (its channel FFN).
        scale: CB_S, with a trained Λ per layer initialised to 0, instead of CB.
        placement: ``end`` (after ``fc2`` and its dropout, before LayerScale), ``mid`` (before ``fc2``; with CB the same
            function as ``end``, at four times the cost) or ``front`` (before ``fc1``); of attention, ``front`` and
            ``end``. In a parallel block ``end`` acts on the sum of the branches, ``front`` and ``mid`` on each branch.
        on: ``mlp`` (the paper's choice), ``msa`` or ``both``.
        layers: ``all``, ``upper`` (the upper half, blocks i ≥ depth // 2; the paper does not define it), or block
            numbers from 0. A PiT's blocks are numbered across its stages.

    Returns:
        The map from the model's keys to themselves, None for each Λ.

    Raises:
        UsageError: a model, block or layer that does not support it, or has it already; the model is unchanged.
    """
    for name, value, allowed in (("placement", placement, PLACEMENTS), ("on", on, TARGETS)):
        if value not in allowed:
            raise UsageError(f"`{name}` is {value!r}; allowed is {', '.join(allowed)}")
    if not isinstance(scale, bool):
        raise UsageError(f"`scale` is {scale!r}; give true for CB_S or false for CB")
    if any(isinstance(m, ContextBroadcast) for m in model.modules()):
        raise UsageError(f"{type(model).__name__} already has Context Broadcasting; it is added once")
    blocks = find_blocks(model, _WHAT)
    chosen = choose_layers(layers, len(blocks))
    before = set(model.state_dict())
    wheres: tuple[Where, ...] = ("mlp", "msa") if on == "both" else (on,)  # type: ignore[assignment]
    # all modules are found and checked before any is changed
    places = [(where, p) for i in chosen for where in wheres for p in _places(*blocks[i], where, placement)]
    for where, (module, width) in places:
        like = next(module.parameters())
        context = ContextBroadcast(width if scale else None, device=like.device, dtype=like.dtype)
        if isinstance(module, vit.ParallelThingsBlock):
            attach_to_sum(module, context, where)
        else:
            kind: Placement = placement  # type: ignore[assignment]
            attach(module, context, kind)
    return {key: key if key in before else None for key in model.state_dict()}


def _places(name: str, block: nn.Module, where: Where, placement: str) -> list[tuple[nn.Module, int]]:
    """Return the modules of a block to attach to, each with the number of channels of Λ."""
    if where == "msa" and isinstance(block, MixerBlock):
        raise UsageError(f"`on` msa: {name} is a MixerBlock, which has no attention; use on=mlp")
    leaves = branch_modules(name, block, where, _WHAT)
    found = [(module, _width(leaf, module, where, placement)) for leaf, module in leaves]
    if placement == "end" and isinstance(block, vit.ParallelThingsBlock):
        return [(block, found[0][1])]
    return found


def _width(name: str, module: nn.Module, where: Where, placement: str) -> int:
    """Return the number of channels of Λ."""
    if placement == "mid" and not (where == "mlp" and type(module) is Mlp):
        raise UsageError(
            f"`placement` mid: {name} is a {type(module).__name__}, and mid needs timm's Mlp; use end or front"
        )
    last = getattr(module, "fc2" if where == "mlp" else "proj", None)
    if not isinstance(last, nn.Linear):
        raise UsageError(f"{name} is a {type(module).__name__} without the last linear layer that Λ follows")
    return last.in_features if placement == "mid" else last.out_features

"""Residual units of a model: its attention, MLP and convolution branches, one by one.

Park and Kim (2022) measure features after every residual sum: after the attention of a block, after its MLP, after a
block of convolutions. The features in the middle of a block are the input of its second half, so they include
LayerScale, stochastic depth and norms after the branch; the paper's code rebuilds blocks from norm, attention and MLP
without these. Units are observed and removed by hooks; no module or weight is changed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.vision_transformer import ParallelThingsBlock
from torch import Tensor, nn

from vtk.analysis.figures import Unit as Kind
from vtk.analysis.probes.attention_maps import looks_like_attention
from vtk.analysis.probes.depth_points import recognised_blocks
from vtk.errors import UsageError
from vtk.models.transforms.extra_block import SublayerBlock
from vtk.models.transforms.smoothing import SpatialSmoothing

_MIXERS = {"attn": "msa", "mlp_tokens": "other", "linear_tokens": "other"}
_MLPS = ("mlp", "mlp_channels")
# children of a block of two branches, x + a(norm1(x)) and then x + b(norm2(x)), with the norms before or after
_TWO_BRANCHES = frozenset(
    {"norm1", "norm2", "ls1", "ls2", "drop_path", "drop_path1", "drop_path2", "shortcut", *_MIXERS, *_MLPS}
)
_DOWN = ("downsample", "pool")


@dataclass(frozen=True)
class Unit:
    """A unit of a model: the step from one residual sum to the next.

    Attributes:
        name: ``stem``, or of the block, followed by its branch if it has two: ``blocks.3.attn``.
        kind: ``msa``, ``mlp``, ``conv``; ``subsampling`` halves the map, on its own (Swin, PiT, ConvNeXt) or as the
            first convolution block of a ResNet's stage; ``other`` is the rest: the stem, token mixing, attention and
            MLP that share a sum.
        outlets: modules whose output is the unit's part of the sum, up to a factor; if they give 0 the unit is removed.
            Empty if there is no such part, as for a stem or a subsampling layer.
        seen: modules; the first of them that runs in `host` gives the features after the unit.
        side: whether the features are its input or its output.
        host: the block.
        passes: what takes the place of the outlets' outputs when the unit is removed: their inputs, not 0.
    """

    name: str
    kind: Kind
    outlets: tuple[nn.Module, ...]
    seen: tuple[nn.Module, ...]
    side: Literal["input", "output"]
    host: nn.Module
    passes: bool = False


def residual_units(model: nn.Module) -> list[Unit]:
    """Return the units of a timm model in the order in which they run, the stem first.

    ``stem`` is what the first block gets: patches with class token and positions, or the map after a ResNet's pooling.
    Blocks of two branches have two units: ViT, DeiT, DINOv2, EVA, Swin, PiT, CaiT, MLP-Mixer, norms before or after
    the branch. Blocks of P parallel branches have two as well, each all P of a kind, as their residual sums are two.
    Every other block is one unit.

    Raises:
        UsageError: the model has no recognised blocks.
    """
    blocks = recognised_blocks(model)
    names = list(blocks)
    first = blocks[names[0]]
    units = [Unit("stem", "other", (), (first,), "input", first)]
    between = False  # the stem's pooling belongs to the stem, and the one after the last block to the head
    for name, module in model.named_modules():
        if name in blocks:
            units += _of_block(name, module)
            between = name != names[-1]
        elif between and name.rpartition(".")[2] in _DOWN and _outside(name, module, blocks):
            units.append(Unit(name, "subsampling", (), (module,), "output", module))
        elif isinstance(module, SpatialSmoothing):
            units.append(Unit(name, "other", (), (module,), "output", module))
    return units


def _of_block(name: str, block: Any) -> list[Unit]:
    children = {child for child, module in block.named_children() if not isinstance(module, nn.Identity)}
    if isinstance(block, ParallelThingsBlock):
        msa = tuple(branch.attn for branch in block.attns)
        mlp = tuple(branch.mlp for branch in block.ffns)
        return [
            Unit(f"{name}.attns", "msa", msa, (block.ffns[0],), "input", block),
            Unit(f"{name}.ffns", "mlp", mlp, (block,), "output", block),
        ]
    mixer, mlp_name = (next((n for n in names if n in children), None) for names in (_MIXERS, _MLPS))
    if mixer and mlp_name and children <= _TWO_BRANCHES:
        own = dict(block.named_children())
        # a norm after its branch has the last word, one before it none: that both give 0 is right for either
        outlets = [tuple(own[n] for n in pair if n in own) for pair in ((mixer, "norm1"), (mlp_name, "norm2"))]
        # the sum goes to the norm before the second branch, or, if that norm is after it, to the branch itself
        middle = tuple(own[n] for n in ("norm2", mlp_name) if n in own)
        kind: Any = _MIXERS[mixer]
        return [
            Unit(f"{name}.{mixer}", kind, outlets[0], middle, "input", block),
            Unit(f"{name}.{mlp_name}", "mlp", outlets[1], (block,), "output", block),
        ]
    return [Unit(name, _kind(block), _outlet(block), (block,), "output", block)]


def _kind(block: nn.Module) -> Kind:
    if isinstance(block, SublayerBlock):
        return "msa" if block.leaf == "attn" else "mlp"
    attends = any(looks_like_attention(module) for module in block.modules())
    sides = [_pair(m.kernel_size) for m in block.modules() if isinstance(m, nn.Conv2d)]
    if attends:
        mixed = any(max(side) > 1 for side in sides) or any(name in block._modules for name in _MLPS)
        return "other" if mixed else "msa"
    if any(max(_pair(getattr(m, "stride", 1))) > 1 for m in block.modules()):
        return "subsampling"
    return "conv" if any(max(side) > 1 for side in sides) else "other"


def _outlet(block: nn.Module) -> tuple[nn.Module, ...]:
    """Return the last module of a block's only branch, whose output is added to the skip."""
    drop = getattr(block, "drop_path", None)
    if isinstance(drop, nn.Module):
        return (drop,)
    if isinstance(block, (BasicBlock, Bottleneck)):
        last: nn.Module = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        return (last if block.se is None else block.se,)
    return ()


def _outside(name: str, module: nn.Module, blocks: dict[str, nn.Module]) -> bool:
    return not (isinstance(module, nn.Identity) or any(name.startswith(f"{block}.") for block in blocks))


def _pair(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (int(value),) if isinstance(value, int) else (1,)


@contextlib.contextmanager
def watch_units(units: Sequence[Unit], see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Within the context, pass the features after every unit to ``see`` as soon as they are computed.

    They are tokens (B, N, C) or a map (B, C, H, W) or (B, H, W, C), as the model holds them; PiT's subsampling gives
    the map without its class token.

    Args:
        units: of `residual_units`.
        see: called with the unit's index in ``units`` and the features. It must not keep them: a later layer may
            overwrite them.
    """
    due: set[int] = set()
    handles = []

    def begin(number: int) -> Callable[..., None]:
        return lambda *_: due.add(number)

    def show(number: int, value: Any) -> None:
        if number not in due:
            return
        due.discard(number)
        features = value[0] if isinstance(value, (tuple, list)) else value
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            raise UsageError(f"`{units[number].name}` has no tokens (B, N, C) and no map (B, C, H, W) after it")
        see(number, features)

    try:
        for number, unit in enumerate(units):
            handles.append(unit.host.register_forward_pre_hook(begin(number)))
            for module in unit.seen:
                if unit.side == "input":
                    hook: Any = lambda _, args, number=number: show(number, args)  # noqa: E731
                    handles.append(module.register_forward_pre_hook(hook))
                else:
                    hook = lambda _, args, output, number=number: show(number, output)  # noqa: E731
                    handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def without_unit(unit: Unit) -> Iterator[None]:
    """Within the context, the unit is removed: its branch gives 0, and only the skip connection remains.

    Of a ResNet that is the whole branch of a block; in its subsampling blocks the shortcut's convolution stays. Park
    and Kim (2022) remove the 3×3 convolution of a bottleneck and do not say what takes its place. Of
    `vtk.analysis.probes.convolutions` its input does, at the positions that its stride keeps.

    Raises:
        UsageError: the unit has no branch of its own; or it did not run within the context, so nothing was removed.
    """
    if not unit.outlets:
        raise UsageError(f"`{unit.name}` has no branch beside a skip connection, so it cannot be removed")
    handles = []
    ran = False

    def silence(module: nn.Module, args: Any, output: Any) -> Tensor:
        nonlocal ran
        ran = True
        if not isinstance(output, Tensor):
            raise UsageError(f"`{unit.name}` gives {type(output).__name__}, not a tensor; it cannot be removed")
        if not unit.passes:
            return torch.zeros_like(output)
        step: Any = module.stride
        return args[0][..., :: step[0], :: step[1]].clone()  # an activation behind it may work in place

    try:
        for module in unit.outlets:
            handles.append(module.register_forward_hook(silence))
        yield
        if not ran:
            raise UsageError(f"`{unit.name}` did not run, so it was not removed")
    finally:
        for handle in handles:
            handle.remove()

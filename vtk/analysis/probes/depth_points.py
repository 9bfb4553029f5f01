"""Points along a model's depth whose features are measured: stem, position embedding, blocks."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vtk.errors import UsageError

_BLOCK = re.compile(r"(Block\w*|Bottleneck|BasicBlock|PreActBasic)$")
_STEMS = ("patch_embed", "stem", "conv1")


@dataclass(frozen=True)
class Point:
    """A place in a model.

    Attributes:
        name: ``stem``, ``pos_embed``, or the name of a block.
        module: whose output is looked at.
        channels_last: of an output of four dimensions: (B, H, W, C) rather than (B, C, H, W).
    """

    name: str
    module: nn.Module
    channels_last: bool

    def tokens(self, output: Any) -> Tensor:
        """Return an output of the module as tokens (B, N, C).

        Raises:
            UsageError: it is no such tensor.
        """
        if isinstance(output, Tensor) and output.ndim == 3:
            return output
        if isinstance(output, Tensor) and output.ndim == 4:
            return output.flatten(1, 2) if self.channels_last else output.flatten(2).transpose(1, 2)
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(f"`{self.name}` gives {shape}; tokens (B, N, C) or a map (B, C, H, W) can be looked at")


def depth_points(model: nn.Module) -> list[Point]:
    """Return the points of a timm model in order: its stem, its tokens after the position table, and its blocks.

    A ViT of twelve blocks has the fourteen points of Wang et al.'s Figure 1.

    Raises:
        UsageError: no blocks are known in the model.
    """
    last = getattr(model, "output_fmt", None) == "NHWC"
    points = []
    for name in _STEMS:
        stem = getattr(model, name, None)
        if isinstance(stem, nn.Module):
            style = str(getattr(stem, "output_fmt", ""))
            points.append(Point("stem", stem, last or style.endswith("NHWC")))
            break
    positions = getattr(model, "pos_drop", None)  # timm's ViTs end what concerns positions with it
    if isinstance(positions, nn.Module) and getattr(model, "pos_embed", None) is not None:
        points.append(Point("pos_embed", positions, last))
    blocks = block_modules(model)
    if not blocks:
        raise UsageError(f"{type(model).__name__} has no blocks that are known, such as a timm ViT, Swin or ResNet has")
    return points + [Point(name, module, last) for name, module in blocks.items()]


def block_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the residual blocks of a timm model by name, in order; outermost ones where blocks hold blocks."""
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if _BLOCK.search(type(module).__name__) and not inside:
            blocks[name] = module
    return blocks


@contextlib.contextmanager
def watch_points(points: list[Point], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Inside of the context, hand every point's tokens (B, N, C) to ``see`` as soon as they are computed."""
    handles = []

    def hook(point: Point) -> Callable[..., None]:
        return lambda module, inputs, output: see(point.name, point.tokens(output))

    try:
        for point in points:
            handles.append(point.module.register_forward_hook(hook(point)))
        yield
    finally:
        for handle in handles:
            handle.remove()

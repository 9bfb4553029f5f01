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
    """A point in a model whose features are measured.

    Attributes:
        name: ``stem``, ``pos_embed``, or the name of a block.
        module: whose output is measured.
        channels_last: whether an output with four dimensions is (B, H, W, C) rather than (B, C, H, W).
    """

    name: str
    module: nn.Module
    channels_last: bool

    def tokens(self, output: Any) -> Tensor:
        """Return an output of the module as tokens (B, N, C).

        Raises:
            UsageError: the output is neither tokens nor a map.
        """
        if isinstance(output, Tensor) and output.ndim == 3:
            return output
        if isinstance(output, Tensor) and output.ndim == 4:
            return output.flatten(1, 2) if self.channels_last else output.flatten(2).transpose(1, 2)
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(f"`{self.name}` gives {shape}; tokens (B, N, C) or a map (B, C, H, W) are needed")


def depth_points(model: nn.Module) -> list[Point]:
    """Return the points of a timm model in order: its stem, its tokens after the position embedding, its blocks.

    A ViT of twelve blocks has the fourteen points of Wang et al.'s Figure 1.

    Raises:
        UsageError: the model has no recognised blocks.
    """
    last = getattr(model, "output_fmt", None) == "NHWC"
    points = []
    for name in _STEMS:
        stem = getattr(model, name, None)
        if isinstance(stem, nn.Module):
            style = str(getattr(stem, "output_fmt", ""))
            points.append(Point("stem", stem, last or style.endswith("NHWC")))
            break
    positions = getattr(model, "pos_drop", None)  # the last step of the position embedding in timm's ViTs
    if isinstance(positions, nn.Module) and getattr(model, "pos_embed", None) is not None:
        points.append(Point("pos_embed", positions, last))
    return points + [Point(name, module, last) for name, module in recognised_blocks(model).items()]


def block_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the residual blocks of a timm model by name, in order; only the outermost of nested blocks."""
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if _BLOCK.search(type(module).__name__) and not inside:
            blocks[name] = module
    return blocks


def recognised_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return `block_modules`, of which there is at least one.

    Raises:
        UsageError: the model has no recognised blocks.
    """
    blocks = block_modules(model)
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no recognised blocks; use a timm ViT, Swin, Mixer, ResNet or the like"
        )
    return blocks


@contextlib.contextmanager
def watch_points(points: list[Point], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the context, pass every point's tokens (B, N, C) to ``see`` as soon as they are computed."""
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

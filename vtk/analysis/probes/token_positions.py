"""Positions of the tokens of an attention layer: prefix tokens, and the grid of a map or of its windows."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.analysis.probes.attention_maps import watch_attention

Size = tuple[int, int]
_PIT_STAGE = re.compile(r"transformers\.(\d+)\.")


@dataclass(frozen=True)
class Places:
    """Positions of the keys of an attention layer. Sizes are height and width in tokens.

    Attributes:
        prefix: number of prefix tokens (class and register tokens), which have no position.
        grid: of the other keys, row by row: the whole map, or one window.
        map: of the whole map.
        shift: by which the map was moved up and left before it was divided into windows (Swin).
    """

    prefix: int
    grid: Size
    map: Size
    shift: Size = (0, 0)

    @property
    def windows(self) -> Size:
        """Rows and columns of windows; one each for global attention."""
        return (-(-self.map[0] // self.grid[0]), -(-self.map[1] // self.grid[1]))

    def coordinates(self, device: torch.device | None = None) -> Tensor:
        """Return row and column of each key that has a position, (n, 2) in fp32, in units of image height and width."""
        sides = [torch.arange(cells, device=device) / side for cells, side in zip(self.grid, self.map, strict=True)]
        return torch.cartesian_prod(*sides).reshape(-1, 2)

    def assemble(self, values: Tensor) -> Tensor:
        """Return values of the keys that have a position (B·windows, …, n) as maps (B, …, height, width).

        Padding of windows is removed, and a shift undone.
        """
        (rows, columns), (height, width) = self.windows, self.grid
        middle = values.shape[1:-1]
        tiles = values.reshape(-1, rows, columns, *middle, height, width)
        tiles = tiles.permute(0, *range(3, 3 + len(middle)), 1, -2, 2, -1)
        whole = tiles.reshape(len(tiles), *middle, rows * height, columns * width)
        cut = whole[..., : self.map[0], : self.map[1]]
        return cut.roll(self.shift, dims=(-2, -1))


SeePlaces = Callable[[str, Tensor, Places | None], None]


@contextlib.contextmanager
def watch_places(model: nn.Module, see: SeePlaces) -> Iterator[None]:
    """Within the context, pass every layer's attention to ``see``, as `watch_attention`, with the keys' positions.

    Supported are models whose tokens are a grid of patches, with or without prefix tokens (ViT, DeiT, DINOv2, BEiT,
    EVA, CaiT and others), PiT, whose grid is halved, and windows of maps (Swin, AlterNet). For other layers it is None.
    """
    maps: dict[str, tuple[int, int, int]] = {}
    handles = []
    last = getattr(model, "output_fmt", None) == "NHWC"
    modules = dict(model.named_modules())
    windowed = {name for name, module in modules.items() if name and _window(module) is not None}
    parents = {name.rpartition(".")[0] for name in windowed}

    def note(name: str, channels_last: bool) -> Any:
        def hook(_: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor) and args[0].ndim == 4:
                shape = args[0].shape
                sides = shape[1:3] if channels_last else shape[2:4]
                maps[name] = (shape[0], int(sides[0]), int(sides[1]))

        return hook

    def placed(name: str, attention: Tensor) -> None:
        see(name, attention, _places(model, modules[name], name, attention, maps))

    try:
        for name in {"", *windowed, *parents}:
            handles.append(modules[name].register_forward_pre_hook(note(name, last and bool(name))))
        with watch_attention(model, placed):
            yield
    finally:
        for handle in handles:
            handle.remove()


def prefix_tokens(model: nn.Module) -> int:
    """Return the number of a model's class, distillation and register tokens."""
    declared = getattr(model, "num_prefix_tokens", None)
    if isinstance(declared, int):
        return declared
    token = getattr(model, "cls_token", None)  # PiT does not declare it
    return int(token.shape[1]) if isinstance(token, Tensor) and token.ndim == 3 else 0


def has_class_token(model: nn.Module) -> bool:
    """Return whether a model has a class token, which is the first of its prefix tokens."""
    return isinstance(getattr(model, "cls_token", None), Tensor)


def _window(module: nn.Module) -> Size | None:
    """Return the window of an attention module that has one."""
    size = getattr(module, "window_size", None)
    if isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return (size[0], size[1])
    return None


def _places(
    model: nn.Module, module: nn.Module, name: str, attention: Tensor, maps: dict[str, tuple[int, int, int]]
) -> Places | None:
    batch, height, width = maps.get("", (0, 0, 0))
    keys, window = attention.shape[-1], _window(module)
    if window is not None and window[0] * window[1] == keys:
        parent = name.rpartition(".")[0]
        _, *side = maps.get(name) or maps.get(parent) or (0, 0, 0)
        shift = getattr(model.get_submodule(parent), "shift_size", (0, 0))
        places = Places(0, window, (side[0], side[1]), (int(shift[0]), int(shift[1])))
        count = places.windows[0] * places.windows[1]
        return places if batch and count and attention.shape[0] == batch * count else None
    grid = _patches(model, (height, width))
    if grid is None or attention.shape[0] != batch:
        return None
    stage = _PIT_STAGE.match(name)
    for _ in range(int(stage[1]) if stage else 0):
        grid = (-(-grid[0] // 2), -(-grid[1] // 2))
    for front in (prefix_tokens(model), 0):  # in CaiT the class token is added at the end
        if grid[0] * grid[1] + front == keys:
            return Places(front, grid, grid)
    return None


def _patches(model: nn.Module, size: Size) -> Size | None:
    embed = getattr(model, "patch_embed", None)
    if embed is None:
        return None
    dynamic = getattr(embed, "dynamic_feat_size", None)
    grid = dynamic(size) if callable(dynamic) else getattr(embed, "grid_size", None)
    return None if grid is None else (int(grid[0]), int(grid[1]))

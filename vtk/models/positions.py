"""Resamples position tables to another size, by the layout of each model family."""

import math
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from torch import Tensor, nn
from torch.nn import functional as F

from vtk.errors import DataError, UsageError
from vtk.models.task_parameters import grid_of

Size = tuple[int, int]

RELATIVE = "relative_position_bias_table"
"""Name of the learned tables of relative positions that can be resampled: BEiT, Swin, MaxViT, GC ViT."""


def fit_position(
    key: str, table: Tensor, model: nn.Module, *, grid: Size | None = None, size: Size | None = None,
    name: str = "the model",
) -> Tensor:  # fmt: skip
    """Resample an absolute position table to the size of ``model``'s; unchanged if the size is the same.

    Args:
        key: state-dict name, such as ``pos_embed`` or ``levels.0.pos_embed``.
        table: as stored: (1, N, C) with prefix tokens first, (1, C, H, W), (1, H, W, C) or, for Nested Transformers,
            (1, blocks, N, C).
        model: the target model.
        grid: height and width in patches of a stored table of tokens.
        size: image size of the stored model in pixels, height first; gives the shape of the grid if ``grid`` is None;
            without both it is square.
        name: for messages.

    Returns:
        A table of the model's shape: bicubic with antialias, as timm does for its Vision Transformers.

    Raises:
        DataError: the stored table is not square and its grid is unknown.
        UsageError: an unsupported layout.
    """
    own = model.get_parameter(key)
    if own.ndim == 3 and table.ndim == 3:
        return _fit_tokens(key, table, own, model, grid, size, name)
    if own.shape == table.shape:
        return table
    if own.ndim == table.ndim == 4 and own.shape[0] == table.shape[0] == 1:
        if hasattr(model, "levels") and own.shape[3] == table.shape[3]:  # (1, blocks, N, C)
            return _from_map(_bicubic(_to_map(table), _side(own)), own)
        if own.shape[1] == table.shape[1]:  # (1, C, H, W)
            return _bicubic(table, (own.shape[2], own.shape[3]))
        if own.shape[3] == table.shape[3]:  # (1, H, W, C)
            return _bicubic(table.permute(0, 3, 1, 2), (own.shape[1], own.shape[2])).permute(0, 2, 3, 1).contiguous()
    raise UsageError(f"`{key}` of `{name}` is a position table that cannot be resampled; use the size of its weights")


def fit_relative(key: str, table: Tensor, model: nn.Module, grid: Size | None = None) -> Tensor:
    """Resample a table of relative positions to ``model``'s window under ``key``, by timm's rules.

    Args:
        key: state-dict name that ends in `RELATIVE`.
        table: (offsets, heads), or (heads, 2H - 1, 2W - 1) as in TensorFlow's MaxViT.
        model: the target model.
        grid: of the stored model's tokens; the window of a model without windows (BEiT).
    """
    owner = model.get_submodule(key.rpartition(".")[0])
    own = owner.get_parameter(RELATIVE)
    window = tuple(owner.window_size)  # type: ignore[arg-type]
    before = grid if window == grid_of(model) else None
    if own.shape == table.shape and before in (None, window):
        return table
    return resize_rel_pos_bias_table(table, window, tuple(own.shape), before)  # type: ignore[no-any-return]


def describe_resampling(
    key: str, old: Tensor, new: Tensor, model: nn.Module, grid: Size | None = None, size: Size | None = None
) -> str:
    """Return one line on a table that `fit_position` resampled from ``old`` to ``new``; other arguments as there."""
    what = "position table" if key == "pos_embed" else f"position table `{key}`"
    if old.ndim != 3:
        return f"{what} resampled from {tuple(old.shape[1:])} to {tuple(new.shape[1:])}"
    if old.shape[1] != new.shape[1]:
        return f"{what} resampled from {old.shape[1]} to {new.shape[1]} tokens"
    after = table_grid(key, model)  # another grid of as many tokens
    assert after is not None
    before = stored_grid(math.prod(after), grid, size)
    return f"{what} resampled from {before[0]}×{before[1]} to {after[0]}×{after[1]} patches"


def stored_grid(patches: int, grid: Size | None, size: Size | None) -> Size:
    """Return height and width of a stored grid of ``patches``.

    Raises:
        DataError: it is not square, and neither ``grid`` nor the shape of the images (``size``) fits.
    """
    if grid is not None and grid[0] * grid[1] == patches:
        return grid
    height = round(math.sqrt(patches * size[0] / size[1])) if size else math.isqrt(patches)
    if height < 1 or patches % height or (size is None and height * height != patches):
        raise DataError(
            f"the stored position table has {patches} patches, which is not a square, and no card has its grid"
        )
    return height, patches // height


def table_grid(key: str, model: nn.Module) -> Size | None:
    """Return height and width in patches of the table of tokens under ``key``; None if unknown."""
    leaf = key.rpartition(".")[2]
    embed = getattr(model, "patch_embed", None)
    if leaf.rpartition("_")[2].isdecimal() and isinstance(embed, nn.ModuleList):  # CrossViT: one stem per branch
        stem: Any = embed[int(leaf.rpartition("_")[2])]
        return stem.img_size[0] // stem.patch_size[0], stem.img_size[1] // stem.patch_size[1]
    if shape := getattr(model, "tokens_spatial_shape", None):  # Hiera
        return int(shape[0]), int(shape[1])
    return grid_of(model)


def _fit_tokens(
    key: str, table: Tensor, own: Tensor, model: nn.Module, grid: Size | None, size: Size | None, name: str
) -> Tensor:
    new = table_grid(key, model)
    prefix = own.shape[1] - math.prod(new) if new else -1
    if new is None or prefix < 0:
        raise UsageError(
            f"`{key}` of `{name}` is a position table that cannot be resampled; use the size of its weights"
        )
    old = stored_grid(table.shape[1] - prefix, grid, size)
    if old == new:
        return table
    # the grid may differ with an equal number of tokens: 28×7 and 14×14
    return resample_abs_pos_embed(table, list(new), list(old), num_prefix_tokens=prefix)


def _bicubic(image: Tensor, size: Size) -> Tensor:
    return F.interpolate(image.float(), size=size, mode="bicubic", antialias=True).to(image.dtype)


def _side(blocks: Tensor) -> Size:
    side = math.isqrt(blocks.shape[1]) * math.isqrt(blocks.shape[2])
    return side, side


def _to_map(blocks: Tensor) -> Tensor:
    """Return the square blocks of a Nested Transformer, (1, T, N, C), as an image (1, C, S, S)."""
    t, n = math.isqrt(blocks.shape[1]), math.isqrt(blocks.shape[2])
    image = blocks.reshape(1, t, t, n, n, -1).permute(0, 5, 1, 3, 2, 4)
    return image.reshape(1, blocks.shape[3], t * n, t * n)


def _from_map(image: Tensor, like: Tensor) -> Tensor:
    t, n = math.isqrt(like.shape[1]), math.isqrt(like.shape[2])
    blocks = image.reshape(1, -1, t, n, t, n).permute(0, 2, 4, 3, 5, 1)
    return torch.reshape(blocks, like.shape).contiguous()

"""Cuts images into patches, and finds the patch grid of a backbone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.task_parameters import grid_of


def patchify(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return (B, N, h·w·C): the pixels of the patches of images (B, C, H, W), row by row, channels last."""
    b, c, height, width = images.shape
    rows, columns = grid
    cut = images.reshape(b, c, rows, height // rows, columns, width // columns)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(b, rows * columns, -1)


def unpatchify(patches: Tensor, grid: tuple[int, int], size: Sequence[int]) -> Tensor:
    """Return images (B, C, H, W) of ``size`` (C, H, W) from their patches (B, N, h·w·C)."""
    (rows, columns), (c, height, width) = grid, size
    cut = patches.reshape(-1, rows, columns, height // rows, width // columns, c)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(-1, c, height, width)


def normalized(patches: Tensor) -> Tensor:
    """Return patches (…, h·w·C) normalised by mean and standard deviation (He et al. 2021, sec. 4; variance + 1e-6)."""
    mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
    return (patches - mean) / (var + 1e-6).sqrt()


def blank_out(images: Tensor, mask: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return images (B, C, H, W) with zeros (the mean colour) in the patches that ``mask`` (B, N) hides."""
    b, _, height, width = images.shape
    rows, columns = grid
    hidden = mask.reshape(b, 1, rows, 1, columns, 1).expand(b, 1, rows, height // rows, columns, width // columns)
    return images.masked_fill(hidden.reshape(b, 1, height, width), 0.0)


def positions_of(mask: Tensor, count: int) -> Tensor:
    """Return (B, count) int64: the positions of the ``count`` True values in each row of ``mask`` (B, N), ascending."""
    return mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]


def pick(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return (B, M, C): the tokens (B, N, C) at ``positions`` (B, M)."""
    return tokens.gather(1, positions.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def patch_grid(model: nn.Module) -> tuple[int, int]:
    """Return the patches of a model's images, height and width.

    Raises:
        UsageError: the model does not cut images into patches.
    """
    grid = grid_of(model)
    if getattr(model, "patch_embed", None) is None or grid is None:
        raise UsageError(
            f"{type(model).__name__} has no `patch_embed` with a grid of patches to hide; give a Vision Transformer"
        )
    return grid


@torch.no_grad()
def independent(model: nn.Module, image: Sequence[int]) -> bool:
    """Tell whether a patch's token depends on that patch alone, by changing one patch of an image.

    Args:
        model: with ``patch_embed``, in eval mode: a BatchNorm that trains joins all patches through its statistics.
        image: size (C, H, W).
    """
    stem: Any = model.patch_embed  # type: ignore[union-attr]
    rows, columns = grid = patch_grid(model)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, *image, generator=generator).to(next(model.parameters()))
    middle = rows // 2 * columns + columns // 2
    mask = torch.zeros(1, rows * columns, dtype=torch.bool)
    mask[0, middle] = True
    change = (stem(images) - stem(blank_out(images, mask, grid))).abs()
    per_patch = change.reshape(rows * columns, -1).amax(1)  # (1, N, C) or (1, rows, columns, C)
    others = per_patch[torch.arange(rows * columns) != middle]
    return bool((others <= 1e-6 * per_patch[middle]).all())

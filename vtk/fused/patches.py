"""Patch embedding as one matrix product, where timm's stem is no more than that; and the size of its images.

With W the convolution's weight as a matrix and its columns in the order of `patchify`, the tokens of an image are
x = table + patchify(images) · Wᵀ. The table holds what does not depend on the image: the prefix tokens with their
positions, then each patch's position with the convolution's bias.
"""

from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.layers.format import Format
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.checks import is_identity
from vtk.fused.sizes import Grid
from vtk.models.stems.replace import Stem

_ALIGN = 16
"""Columns of the matrix are a multiple of this: its rows then start where a tensor core's loads want them."""


def takes_patches(stem: Any) -> bool:
    """Return whether a stem is timm's PatchEmbed and computes a product of whole patches, and no more."""
    if type(stem) is not PatchEmbed or type(stem.proj) is not nn.Conv2d or not is_identity(stem.norm):
        return False
    conv = stem.proj
    plain = (conv.padding, conv.dilation, conv.groups) == ((0, 0), (1, 1), 1)
    sized = stem.img_size is not None and not stem.dynamic_img_pad
    fixed = stem.output_fmt == Format.NCHW and stem.flatten and stem.strict_img_size
    rows = fixed or stem.output_fmt == Format.NHWC  # as dynamic models want it
    if not (plain and sized and rows and conv.kernel_size == conv.stride):
        return False
    return all(side % patch == 0 for side, patch in zip(stem.img_size, conv.kernel_size, strict=True))


def token_table(stem: Any, prefix: Tensor | None, positions: Tensor | None, grid: Grid) -> Tensor:
    """Return what every image's tokens have in common, in the type of the stem; summed in fp32, or fp64 for fp64.

    Args:
        stem: for which `takes_patches` holds.
        prefix: (1, prefix, C), class and register tokens with their positions.
        positions: (1, N, C), of the patches.
        grid: height and width in patches.

    Returns:
        (1, prefix + N, C).
    """
    weight, bias = stem.proj.weight.detach(), stem.proj.bias
    wide = torch.promote_types(weight.dtype, torch.float32)
    table = weight.new_zeros((1, grid[0] * grid[1], len(weight)), dtype=wide)
    for part in (positions, bias):
        if part is not None:
            table += part.detach()
    return (table if prefix is None else torch.cat((prefix.detach().to(table.dtype), table), 1)).to(weight.dtype)


def padded_matrix(stem: Any) -> Tensor | None:
    """Return the convolution's weight (C, chans, ph, pw) as a matrix with zero columns, None if it needs none."""
    matrix = stem.proj.weight.detach().flatten(1)
    spare = -matrix.shape[1] % _ALIGN
    return nn.functional.pad(matrix, (0, spare)) if spare else None


def check_images(stem: Any, images: Tensor) -> None:
    """Refuse images of a size that timm's PatchEmbed, or a stem in its place, does not take.

    Raises:
        UsageError: of a model of one size, another; of any size, no multiple of the patch.
    """
    if type(stem) not in (PatchEmbed, Stem) or stem.img_size is None:
        return
    first = next((m for m in stem.proj.modules() if isinstance(m, nn.Conv2d)), None)
    chans = images.shape[1:2] if first is None else (first.in_channels,)
    if stem.strict_img_size:
        size = (*chans, *stem.img_size)
        if images.shape[1:] != size:
            raise UsageError(
                f"`images` are {tuple(images.shape)}; this model takes (B, {', '.join(map(str, size))}): resize them, "
                "or fuse a model of their size"
            )
        return
    if images.ndim != 4 or images.shape[1:2] != tuple(chans):
        raise UsageError(
            f"`images` are {tuple(images.shape)}; this model takes (B, {', '.join(map(str, chans))}, height, width)"
        )
    if not stem.dynamic_img_pad and any(n % p for n, p in zip(images.shape[-2:], stem.patch_size, strict=True)):
        height, width = stem.patch_size
        raise UsageError(
            f"`images` are {tuple(images.shape)}; height and width must be multiples of the patch, {height} × {width}: "
            "resize or pad them"
        )

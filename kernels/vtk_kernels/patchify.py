"""Images cut into patches, one row each: a patch embedding's convolution becomes one matrix product (im2col).

    rows[b, prefix + gy · GW + gx, (c · ph + py) · pw + px] = images[b, c, gy · ph + py, gx · pw + px]

The order (chan, ph, pw) is that of a flattened Conv2d weight. The first ``prefix`` rows of an image, places for class
and register tokens, and the columns past chans · ph · pw are zero. One program moves a tile of neighbouring pixels of
one channel: it reads pieces of image rows and writes runs of pw elements; a last program of an image writes the zeros.
Elements moved per image: reads chans · H · W, writes (prefix + N) · width. The gradient is the adjoint, by torch.
"""

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._device import chained, follow
from vtk_kernels._dispatch import LAUNCHES, on_device, route, runs_kernel
from vtk_kernels._triton import tl, triton

LAUNCHES["patchify"] = 1

_TILE = 1024
"""Pixels of a program: a batch of one fills a large card with them, and four warps load 16 bytes a thread."""


def patchify_ref(images: Tensor, patch: Sequence[int], prefix: int, width: int) -> Tensor:
    """Compute `patchify` by torch. Same arguments and result."""
    batch, chans, height, wide = images.shape
    ph, pw = patch
    grid = images.reshape(batch, chans, height // ph, ph, wide // pw, pw).permute(0, 2, 4, 1, 3, 5)
    rows = grid.reshape(batch, (height // ph) * (wide // pw), chans * ph * pw)
    return F.pad(rows, (0, width - rows.shape[2], prefix, 0)).contiguous()


def patchify_backward_ref(g: Tensor, shape: Sequence[int], patch: Sequence[int], prefix: int) -> Tensor:
    """Compute the gradient of `patchify` by torch: every pixel gets that of the one element it went to.

    Args:
        g: (B, prefix + N, width), gradient of the rows.
        shape: (B, chans, H, W) of the images.
        patch: height and width of a patch.
        prefix: rows of zeros before the patches.

    Returns:
        (B, chans, H, W), contiguous, the type of ``g``.
    """
    batch, chans, height, wide = shape
    ph, pw = patch
    rows = g[:, prefix:, : chans * ph * pw]
    grid = rows.reshape(batch, height // ph, wide // pw, chans, ph, pw).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(batch, chans, height, wide).contiguous()


@triton.jit
@no_type_check
def _patchify_kernel(
    rows_ptr,  # out (B, prefix + N, width)
    counters_ptr,  # out (counters,), int32: zeros; or None
    images_ptr,  # (B, chans, H, W)
    stride_ib,  # from an image to the next
    stride_ic,  # from a channel to the next
    stride_iy,  # from a row of pixels to the next
    stride_ix,  # from a pixel to the next
    H,
    W,
    prefix,
    width,
    size,  # chans · PH · PW, the columns that are not zero
    tiles,  # programs of an image that move pixels
    programs,  # all programs of an image: one more where there are zeros to write
    counters,
    PH: tl.constexpr,
    PW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    image = (tl.program_id(0) // programs).to(tl.int64)
    tile = tl.program_id(0) % programs
    patches = (H // PH) * (W // PW)
    rows_ptr += image * (prefix + patches) * width
    if tile < tiles:
        across = tl.cdiv(W, BLOCK_W)
        down = tl.cdiv(H, BLOCK_H)
        chan = tile // (across * down)
        y = (tile // across % down) * BLOCK_H + tl.arange(0, BLOCK_H)
        x = (tile % across) * BLOCK_W + tl.arange(0, BLOCK_W)
        mask = (y < H)[:, None] & (x < W)[None, :]
        images_ptr += image * stride_ib + chan.to(tl.int64) * stride_ic
        pixels = images_ptr + y.to(tl.int64)[:, None] * stride_iy + x.to(tl.int64)[None, :] * stride_ix
        # of the element's place one part depends on y alone and the other on x alone
        at_y = (prefix + y // PH * (W // PW)) * width + (chan * PH + y % PH) * PW
        at_x = x // PW * width + x % PW
        tl.store(rows_ptr + (at_y[:, None] + at_x[None, :]), tl.load(pixels, mask=mask), mask=mask)
    else:
        step = tl.arange(0, BLOCK_H * BLOCK_W)
        zeros = tl.zeros((BLOCK_H * BLOCK_W,), rows_ptr.dtype.element_ty)
        for start in range(0, prefix * width, BLOCK_H * BLOCK_W):
            tl.store(rows_ptr + start + step, zeros, mask=start + step < prefix * width)
        spare = width - size
        for start in range(0, patches * spare, BLOCK_H * BLOCK_W):
            i = start + step
            at = (prefix + i // spare) * width + size + i % spare
            tl.store(rows_ptr + at, zeros, mask=i < patches * spare)
        if counters_ptr is not None:
            none = tl.zeros((BLOCK_H * BLOCK_W,), tl.int32)
            for start in range(0, counters, BLOCK_H * BLOCK_W):
                tl.store(counters_ptr + start + step, none, mask=(start + step < counters) & (image == 0))


def launch(images: Tensor, patch: Sequence[int], prefix: int, width: int, counters: Tensor | None = None) -> Tensor:
    """Start the kernel; arguments and result as of `patchify`, and ``counters`` (n,), int32, become 0."""
    batch, chans, height, wide = images.shape
    ph, pw = patch
    size = chans * ph * pw
    rows = torch.empty((batch, prefix + (height // ph) * (wide // pw), width), dtype=images.dtype, device=images.device)
    block_w = min(triton.next_power_of_2(wide), 256)
    block_h = min(triton.next_power_of_2(height), _TILE // block_w)
    tiles = chans * triton.cdiv(height, block_h) * triton.cdiv(wide, block_w)
    programs = tiles + (prefix > 0 or width > size or counters is not None)
    if batch:
        with on_device(images):
            _patchify_kernel[(batch * programs,)](
                rows,
                counters,
                images,
                *images.stride(),
                height,
                wide,
                prefix,
                width,
                size,
                tiles,
                programs,
                0 if counters is None else len(counters),
                PH=ph,
                PW=pw,
                BLOCK_H=block_h,
                BLOCK_W=block_w,
                num_warps=max(1, block_h * block_w // 256),
                **chained(images, batch * programs),
            )
    return rows


@torch.library.custom_op("vtk_kernels::patchify", mutates_args=())
def _op(images: Tensor, patch: Sequence[int], prefix: int, width: int) -> Tensor:
    check(images, patch, prefix, width)
    return (launch if runs_kernel(images) else patchify_ref)(images, patch, prefix, width)


@_op.register_fake
def _(images: Tensor, patch: Sequence[int], prefix: int, width: int) -> Tensor:
    batch, _, height, wide = images.shape
    return images.new_empty((batch, prefix + (height // patch[0]) * (wide // patch[1]), width))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, ctx.patch, ctx.prefix, _ = inputs
    ctx.shape = images.shape


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
    return patchify_backward_ref(g, ctx.shape, ctx.patch, ctx.prefix), None, None, None


_op.register_autograd(_backward, setup_context=_setup)


def patchify(
    images: Tensor,
    patch: tuple[int, int],
    prefix: int = 0,
    width: int | None = None,
    *,
    use_triton: bool | None = None,
) -> Tensor:
    """Cut ``images`` into patches, one row each, in the order of a flattened Conv2d weight.

    Args:
        images: (B, chans, H, W), floating point; any strides.
        patch: height and width of a patch, which divide H and W.
        prefix: rows of zeros before an image's patches, for class and register tokens.
        width: columns of the result, those past chans · ph · pw zero; by default there are none of these.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        (B, prefix + N, width), contiguous, the type of ``images``; N = (H / ph) · (W / pw).

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    if width is None:
        width = images.shape[1] * patch[0] * patch[1] if images.ndim == 4 else 0
    check(images, patch, prefix, width)
    way = route(images, use_triton)
    if way == "reference":
        return patchify_ref(images, patch, prefix, width)
    run = torch.ops.vtk_kernels.patchify if way == "operator" else launch
    return run(images, patch, prefix, width)


def check(images: Tensor, patch: Sequence[int], prefix: int, width: int) -> None:
    """Refuse arguments that `patchify` does not take.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    if not images.is_floating_point():
        raise ValueError(f"`images` must be floating point, not {images.dtype}")
    if images.ndim != 4 or images.shape[1] == 0:
        raise ValueError(f"`images` is {tuple(images.shape)}; it must be (B, chans, H, W) with at least one channel")
    if len(patch) != 2 or min(patch) < 1:
        raise ValueError(f"`patch` is {tuple(patch)}; it must be a height and a width, each at least 1")
    _, chans, height, wide = images.shape
    if height < 1 or wide < 1 or height % patch[0] or wide % patch[1]:
        raise ValueError(
            f"`images` is {tuple(images.shape)}; height and width must be multiples of the patch, "
            f"{patch[0]} × {patch[1]}: resize or pad it"
        )
    if prefix < 0:
        raise ValueError(f"`prefix` ({prefix}) must be at least 0")
    if width < chans * patch[0] * patch[1]:
        raise ValueError(f"`width` ({width}) must be at least the elements of a patch, {chans * patch[0] * patch[1]}")

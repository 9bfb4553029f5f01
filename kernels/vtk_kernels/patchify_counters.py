"""`patchify` that also zeroes counters, for later kernels of a forward pass that count (inference).

A product whose slices finish themselves (`linear_residual`) needs an int32 that is 0 for each tile, and leaves it at 0.
The first kernel of a pass writes them, in a program that writes zeros anyway: every pass has counters of its own, from
the caching allocator like any other result. So passes on several streams share none, a CUDA graph zeroes its own at
each replay, nothing outlives a pass, and no kernel is started for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, inference, route, runs_kernel
from vtk_kernels.patchify import check, launch, patchify_ref

LAUNCHES["patchify_counters"] = 1


def patchify_counters_ref(
    images: Tensor, patch: Sequence[int], prefix: int, width: int, counters: int
) -> tuple[Tensor, Tensor]:
    """Compute `patchify_counters` by torch. Same arguments and results."""
    return patchify_ref(images, patch, prefix, width), images.new_zeros(counters, dtype=torch.int32)


def _patchify_counters_launch(
    images: Tensor, patch: Sequence[int], prefix: int, width: int, counters: int
) -> tuple[Tensor, Tensor]:
    if not len(images):
        return patchify_counters_ref(images, patch, prefix, width, counters)
    zeros = torch.empty(counters, dtype=torch.int32, device=images.device)
    return launch(images, patch, prefix, width, zeros), zeros


@torch.library.custom_op("vtk_kernels::patchify_counters", mutates_args=())
def _op(images: Tensor, patch: Sequence[int], prefix: int, width: int, counters: int) -> tuple[Tensor, Tensor]:
    _check(images, patch, prefix, width, counters)
    run = _patchify_counters_launch if runs_kernel(images) else patchify_counters_ref
    return run(images, patch, prefix, width, counters)


@_op.register_fake
def _(images: Tensor, patch: Sequence[int], prefix: int, width: int, counters: int) -> tuple[Tensor, Tensor]:
    batch, _, height, wide = images.shape
    rows = images.new_empty((batch, prefix + (height // patch[0]) * (wide // patch[1]), width))
    return rows, images.new_empty(counters, dtype=torch.int32)


def patchify_counters(
    images: Tensor,
    patch: tuple[int, int],
    prefix: int,
    width: int,
    counters: int,
    *,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Cut ``images`` into patches as `patchify` does, and zero counters.

    The kernel has no gradient: where one is wanted torch computes.

    Args:
        images: (B, chans, H, W), floating point; any strides.
        patch: height and width of a patch, which divide H and W.
        prefix: rows of zeros before an image's patches.
        width: columns of the result, those past chans · ph · pw zero.
        counters: how many, at least 1.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        rows: (B, prefix + N, width), contiguous, the type of ``images``.
        counters: (counters,), int32, all 0.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(images, patch, prefix, width, counters)
    way = inference(route(images, use_triton), images)
    if way == "reference":
        return patchify_counters_ref(images, patch, prefix, width, counters)
    run = torch.ops.vtk_kernels.patchify_counters if way == "operator" else _patchify_counters_launch
    return run(images, patch, prefix, width, counters)


def _check(images: Tensor, patch: Sequence[int], prefix: int, width: int, counters: int) -> None:
    check(images, patch, prefix, width)
    if counters < 1:
        raise ValueError(f"`counters` ({counters}) must be at least 1")

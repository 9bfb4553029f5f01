"""Context Broadcasting inside the residual addition (Hyeon-Woo et al. 2023, eq. 3 and its dimension-scaled form).

    y = x + ½ (m + mean m)            CB:   m is the MLP's output, the mean runs over the tokens of an image
    y = x + m + scale ⊙ mean m        CB_S: scale per channel
    gx = g,    gm = the same without x, of g,    gscale = Σ over images of mean m ⊙ Σ over tokens of g

The matrix ½ (I + 11ᵀ/N) is symmetric, so the gradient is the forward kernel without x. Kept for it: scale and the means
(one row per image), never m. One program holds all tokens of an image, BLOCK_C channels wide, in steps of BLOCK_N
tokens: it sums m, then reads m again (from the cache) with x. Elements moved per token: reads 2 C, writes C.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from vtk_kernels._broadcast_kernels import launch
from vtk_kernels._dispatch import LAUNCHES, accumulator, inference, route, runs_kernel
from vtk_kernels._rows import check_channels
from vtk_kernels._segments import check_segments
from vtk_kernels.row_stats import pieces_of, row_stats_ref

LAUNCHES["context_broadcast"] = 1
LAUNCHES["context_broadcast_stats"] = 1
LAUNCHES["context_broadcast_backward"] = 1


def context_broadcast_ref(
    x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `context_broadcast` by torch.

    Returns:
        y as from `context_broadcast`, and the means of ``m`` over each segment in fp32 (fp64 for fp64): (B, C), or with
        ``cu_seqlens`` (S + 1, C), the last one of the rows after the last bound.
    """
    wide = accumulator(x.dtype)
    spread, mean = _spread_ref(m.to(wide), scale, cu_seqlens)
    return (x.to(wide) + spread).to(x.dtype), mean


def context_broadcast_backward_ref(
    g: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of ``m`` by torch: ½ (g + mean g), or g + scale ⊙ mean g.

    Returns:
        The gradient, like ``g``, and the means of ``g``, as in `context_broadcast_ref`.
    """
    gm, mean = _spread_ref(g.to(accumulator(g.dtype)), scale, cu_seqlens)
    return gm.to(g.dtype), mean


def context_broadcast_stats_ref(
    x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the form of `context_broadcast` with ``stats=True`` by torch."""
    y = context_broadcast_ref(x, m, scale, cu_seqlens)[0]
    return y, row_stats_ref(y)


def _spread_ref(m: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    if cu_seqlens is None:
        broad = m.mean(1, keepdim=True)
        mean = broad[:, 0]
    else:
        segment = torch.bucketize(torch.arange(len(m), device=m.device), cu_seqlens[1:], right=True)
        total = m.new_zeros(cu_seqlens.numel(), m.shape[1]).index_add(0, segment, m)
        mean = total / _segment_sizes(m, cu_seqlens).clamp(min=1)[:, None]
        broad = mean[segment]
    return (0.5 * (m + broad) if scale is None else m + scale.to(m.dtype) * broad), mean


def _segment_sizes(m: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the rows of each segment and of what follows the last bound: (S + 1,), without asking the device."""
    return torch.cat([cu_seqlens, cu_seqlens.new_full((1,), m.shape[0])]).diff()


@torch.library.custom_op("vtk_kernels::context_broadcast", mutates_args=())
def _op(x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check(x, m, scale, cu_seqlens)
    y, mean = (launch if runs_kernel(m) else context_broadcast_ref)(x, m, scale, cu_seqlens)
    return y.contiguous(), mean.contiguous()


@torch.library.custom_op("vtk_kernels::context_broadcast_backward", mutates_args=())
def _backward_op(g: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if runs_kernel(g):
        gm, mean = launch(None, g, scale, cu_seqlens)
    else:
        gm, mean = context_broadcast_backward_ref(g, scale, cu_seqlens)
    return gm.contiguous(), mean.contiguous()


@torch.library.custom_op("vtk_kernels::context_broadcast_stats", mutates_args=())
def _stats_op(
    x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check(x, m, scale, cu_seqlens)
    y, stats = (_stats_launch if runs_kernel(m) else context_broadcast_stats_ref)(x, m, scale, cu_seqlens)
    return y.contiguous(), stats.contiguous()


def _stats_launch(x: Tensor, m: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    y, _, stats = launch(x, m, scale, cu_seqlens, stats=True)
    return y, stats


def _fake(m: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    segments = m.shape[0] if cu_seqlens is None else cu_seqlens.shape[0]
    return m.new_empty(m.shape), m.new_empty((segments, m.shape[-1]), dtype=accumulator(m.dtype))


@_op.register_fake
def _(x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _fake(m, cu_seqlens)


@_backward_op.register_fake
def _(g: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _fake(g, cu_seqlens)


@_stats_op.register_fake
def _(x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    stats = m.new_empty((*m.shape[:-1], pieces_of(m.shape[-1]), 2), dtype=accumulator(m.dtype))
    return m.new_empty(m.shape), stats


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scale, cu_seqlens = inputs[2:]
    ctx.save_for_backward(scale, None if scale is None else output[1], cu_seqlens)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    scale, mean, cu_seqlens = ctx.saved_tensors
    if g is None or not any(ctx.needs_input_grad[1:3]):
        return g, None, None, None
    gm, g_mean = torch.ops.vtk_kernels.context_broadcast_backward(g, scale, cu_seqlens)
    gscale = None
    if scale is not None and ctx.needs_input_grad[2]:
        sizes = g.shape[1] if cu_seqlens is None else _segment_sizes(g, cu_seqlens)[:, None]
        gscale = (mean * g_mean * sizes).sum(0).to(scale.dtype)
    return g, gm, gscale, None


_op.register_autograd(_backward, setup_context=_setup)


@overload
def context_broadcast(
    x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None, *,
    stats: Literal[False] = False, use_triton: bool | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def context_broadcast(
    x: Tensor, m: Tensor, scale: Tensor | None = None, cu_seqlens: Tensor | None = None, *,
    stats: Literal[True], use_triton: bool | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def context_broadcast(
    x: Tensor,
    m: Tensor,
    scale: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    stats: bool = False,
    use_triton: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Add ``m`` and its mean over tokens to ``x``: y = x + ½ (m + mean m), or x + m + scale ⊙ mean m.

    Args:
        x: (B, N, C), or (T, C) with ``cu_seqlens``; floating point; may be strided.
        m: like ``x``: output of the MLP or of the attention.
        scale: (C,), Λ of CB_S (Hyeon-Woo et al. 2023), any floating type; None for CB.
        cu_seqlens: (S + 1,) int32 on the device of ``x``: 0 and the end row of each segment, ascending; segments may be
            empty. Rows after the last end count as one more segment. Values are not checked: that would wait for the
            device.
        stats: also return the statistics of the rows of y, from which the product that reads y takes LayerNorm's
            1/σ. The kernel of this form has no gradient: where one is wanted torch computes.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        y: like ``x``, contiguous. With ``stats`` also:
        row_stats: (B, N, S, 2) or (T, S, 2), S = ceil(C / 64), fp32 (fp64 for fp64): see `vtk_kernels.row_stats`.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, m, scale, cu_seqlens)
    way = route(x, use_triton, m, scale)
    if stats:
        way = inference(way, x, m, scale)
        if way == "reference":
            return context_broadcast_stats_ref(x, m, scale, cu_seqlens)
        find = torch.ops.vtk_kernels.context_broadcast_stats if way == "operator" else _stats_launch
        return find(x, m, scale, cu_seqlens)
    if way == "reference":
        return context_broadcast_ref(x, m, scale, cu_seqlens)[0]
    run = torch.ops.vtk_kernels.context_broadcast if way == "operator" else launch
    return run(x, m, scale, cu_seqlens)[0]


def _check(x: Tensor, m: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None) -> None:
    check_channels(x)
    shape = "(B, N, C)" if cu_seqlens is None else "(T, C) with `cu_seqlens`"
    if x.ndim != (3 if cu_seqlens is None else 2):
        raise ValueError(f"`x` is {tuple(x.shape)}; it must be {shape}")
    if m.shape != x.shape or m.dtype != x.dtype:
        raise ValueError(f"`m` is {tuple(m.shape)} {m.dtype}; it must be like `x`, {tuple(x.shape)} {x.dtype}")
    if scale is not None and scale.shape != x.shape[-1:]:
        raise ValueError(f"`scale` is {tuple(scale.shape)}; it must be ({x.shape[-1]},), one value per channel")
    check_segments(cu_seqlens, x, "x")

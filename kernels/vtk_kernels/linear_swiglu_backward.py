"""Backward through the second layer of a SwiGLU MLP and its gate in one matrix product, from factors in 8 bits.

    gy = g · w2, or gy = g,    gu = (gy ⊙ c | gy ⊙ a)

g is the gradient of the MLP's output, w2 the weight of fc2; c and a are the factors that `linear_swiglu` kept of gate
and value (see `_glu_codes`); gu is the gradient of fc1's output, gate first. One program owns one tile of gy and scales
its fp32 sums twice: gy never reaches memory. Where a sub-norm stands between the gate and fc2, its gradient is g, and
there is no w2.
Elements moved: reads g and w2 once per column and row of tiles (cached), 2 T · F bytes of q and 2 S a row of scales;
writes 2 T · F.
"""

import torch
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator, route, runs_kernel
from vtk_kernels._glu_codes import decode_ref
from vtk_kernels._rows import check_channels
from vtk_kernels._swiglu_backward_kernel import launch
from vtk_kernels.row_stats import pieces_of

LAUNCHES["linear_swiglu_backward"] = 1


def linear_swiglu_backward_ref(g: Tensor, w2: Tensor | None, q: Tensor, scales: Tensor) -> Tensor:
    """Compute `linear_swiglu_backward` by torch. Same arguments and result."""
    gy = (g if w2 is None else g @ w2).to(accumulator(g.dtype))
    halves = zip(q.chunk(2, -1), scales.unbind(-1), strict=True)
    return torch.cat([(gy * decode_ref(codes, scale)).to(g.dtype) for codes, scale in halves], -1)


@torch.library.custom_op("vtk_kernels::linear_swiglu_backward", mutates_args=())
def _op(g: Tensor, w2: Tensor | None, q: Tensor, scales: Tensor) -> Tensor:
    _check(g, w2, q, scales)
    return (launch if runs_kernel(g) else linear_swiglu_backward_ref)(g, w2, q, scales).contiguous()


@_op.register_fake
def _(g: Tensor, w2: Tensor | None, q: Tensor, scales: Tensor) -> Tensor:
    return g.new_empty(q.shape)


def linear_swiglu_backward(
    g: Tensor, w2: Tensor | None, q: Tensor, scales: Tensor, *, use_triton: bool | None = None
) -> Tensor:
    """Compute the gradient of fc1's output, gate and value, from the gradient of fc2's output.

    Args:
        g: (..., C), floating point; may be strided. Without ``w2`` (..., F), the gradient of y.
        w2: (C, F), the type of ``g``: the weight of fc2; or None.
        q: (..., 2 F), uint8, from `linear_swiglu` with ``save_grad``.
        scales: (..., ceil(F / 64), 2), fp32 (fp64 for fp64), likewise.
        use_triton: None: the kernel on CUDA in fp16 and bf16; False: torch; True: the kernel.

    Returns:
        (..., 2 F), contiguous, the type of ``g``: its product with w (2 F, K) of fc1 is the gradient of x.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(g, w2, q, scales)
    way = route(g, use_triton, w2)
    if way == "reference":
        return linear_swiglu_backward_ref(g, w2, q, scales)
    run = torch.ops.vtk_kernels.linear_swiglu_backward if way == "operator" else launch
    return run(g, w2, q, scales)


def _check(g: Tensor, w2: Tensor | None, q: Tensor, scales: Tensor) -> None:
    check_channels(g, "g")
    if w2 is not None and (w2.ndim != 2 or w2.shape[0] != g.shape[-1] or w2.dtype != g.dtype):
        raise ValueError(
            f"`w2` is {tuple(w2.shape)} {w2.dtype}; it must be ({g.shape[-1]}, F) {g.dtype}, the weight of fc2"
        )
    features = g.shape[-1] if w2 is None else w2.shape[1]
    for name, t, shape, dtype in (
        ("q", q, (*g.shape[:-1], 2 * features), torch.uint8),
        ("scales", scales, (*g.shape[:-1], pieces_of(features), 2), accumulator(g.dtype)),
    ):
        if t.shape != shape or t.dtype != dtype:
            raise ValueError(
                f"`{name}` is {tuple(t.shape)} {t.dtype}; it must be {shape} {dtype}, as `linear_swiglu` gives it"
            )

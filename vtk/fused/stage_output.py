"""The end of a stage: the products added to the residual stream, and what the next stage reads of it."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.fused.norms import NormSpec, normalize
from vtk.fused.onednn_prepack import observed, wide_linear
from vtk.fused.stage_input import Pair, RawTokens, Reading, close_with_stats, normalized
from vtk.fused.stages import Plan, Stage
from vtk_kernels.add_norm import add_norm
from vtk_kernels.choices import choose
from vtk_kernels.context_broadcast import context_broadcast
from vtk_kernels.linear_residual import linear_residual
from vtk_kernels.norm import norm as kernel_norm
from vtk_kernels.splitk_linear import default_splits, splitk_linear


def close(stage: Stage, x: Tensor, pairs: Iterable[Pair], norm: NormSpec | None, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return x + the stage's output and its form normalised for what follows."""
    if stage.end:
        x = context_broadcast(x, accumulate(None, stage.bias, pairs), stage.end_scale)
    elif not plan.kernels:
        x = accumulate(x, stage.bias, pairs)
    else:
        last = list(pairs)
        if plan.ln_folded and (norm is None or isinstance(last[-1][0], RawTokens)):
            x = _close_in_product(stage, x, last, plan)[0]
        elif norm is None:
            x = x + accumulate(None, stage.bias, last)
        else:
            return close_with_norm(x, stage.bias, last, norm.eps, plan, rms=norm.kind == "rms")
    return x, (x if norm is None else normalize(x, norm, plan.kernels))


def close_raw(stage: Stage, x: Tensor, pairs: Iterable[Pair], norm: NormSpec, plan: Plan) -> tuple[Tensor, RawTokens]:
    """Return x + the stage's output, and the same with its rows' statistics for a stage that reads raw tokens."""
    if stage.end:
        m = accumulate(None, stage.bias, pairs)
        x, row_stats = context_broadcast(x, m, stage.end_scale, stats=True)
    else:
        x, row_stats = _close_in_product(stage, x, list(pairs), plan)
    return x, RawTokens(x, row_stats, norm)


def _close_in_product(stage: Stage, x: Tensor, pairs: list[Pair], plan: Plan) -> tuple[Tensor, Tensor]:
    """Return x + the stage's output and the statistics of its rows, the last sum in its product's epilogue."""
    splits = _slices(*pairs[-1], plan)
    return close_with_stats(x, stage.bias, pairs, splits, plan.counters if splits > 1 else None)


def close_with_norm(
    x: Tensor, bias: Tensor, pairs: Sequence[Pair], eps: float, plan: Plan, *, rms: bool = False
) -> tuple[Tensor, Tensor]:
    """Return y = x + bias + Σ activation · matrixᵀ and its LayerNorm, or RMSNorm.

    A single product too small to fill the card is cut along its length where a choice says so: `add_norm` sums the
    slices, or the product itself does and `norm` follows. Each is two kernels, like cuBLAS and `add_norm`.
    """
    if len(pairs) == 1:
        activation, matrix = normalized(pairs[0][0]), pairs[0][1]
        rows, (features, length) = activation.shape[0] * activation.shape[1], matrix.shape
        choice = choose("splitk_linear", rows, features, length, x.dtype, plan.device_name)
        splits = default_splits(rows, features, length)
        if choice == "finish" and splits > 1 and plan.counters is not None:
            y, _ = linear_residual(activation, matrix, bias, x, splits, plan.counters)
            return y, kernel_norm(y, eps, rms=rms)[0]
        if choice != "aten":
            slices = splitk_linear(activation, matrix, splits)
            return add_norm(x, None, eps, partials=slices, bias=bias, rms=rms)[:2]
    return add_norm(x, accumulate(None, bias, pairs), eps, rms=rms)[:2]


def _slices(activation: Reading, matrix: Tensor, plan: Plan) -> int:
    """Return into how many slices `linear_residual` cuts a product, 1 for none."""
    if plan.counters is None:
        return 1
    tokens = activation if isinstance(activation, Tensor) else activation.x
    rows, (features, length) = tokens.shape[0] * tokens.shape[1], matrix.shape
    splits = default_splits(rows, features, length)
    if splits > 1 and choose("linear_residual", rows, features, length, matrix.dtype, plan.device_name) != "finish":
        return 1
    return splits


def accumulate(start: Tensor | None, bias: Tensor, pairs: Iterable[Pair]) -> Tensor:
    """Return start + bias + Σ activation · matrixᵀ, each term added inside its product.

    Args:
        start: residual stream (B, N, C), or None for 0.
        bias: (C).
        pairs: of activations (B, N, K) and matrices (C, K); K may differ.
    """
    plain = ((normalized(activation), matrix) for activation, matrix in pairs)
    if torch.compiler.is_exporting() and start is not None:
        # exporters write a product of matrices of two axes with reshapes around it
        return sum((F.linear(a, w) for a, w in plain), start + bias)
    total = None
    for activation, matrix in plain:
        if total is None and (start is None or activation.device.type == "cpu"):
            total = wide_linear(activation, matrix, bias)
            if start is not None:  # the product is this function's own, so that without autograd it need not be copied
                total = total + start if torch.is_grad_enabled() or observed() else total.add_(start)
        else:
            total = start + bias if total is None and start is not None else total
            assert total is not None
            sums, product = total.flatten(0, 1), (activation.flatten(0, 1), matrix.t())
            kept = torch.is_grad_enabled() or observed()
            flat = torch.addmm(sums, *product) if kept else sums.addmm_(*product)
            total = flat.view(total.shape)
    assert total is not None
    return total

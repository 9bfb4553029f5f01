"""RMSNorm beside LayerNorm: alone, behind a residual, folded into products; and folded sub-norms in front of fc2."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels._cases import (
    ALL,
    DEVICE,
    HALF,
    assert_close,
    assert_no_worse,
    assert_stats,
    fake_leaves,
    has_torchs_gradient,
    nan_filled,
    needs_kernel,
)
from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.add_norm import add_norm, add_norm_backward_ref, add_norm_ref
from vtk_kernels.linear import linear, linear_ref
from vtk_kernels.linear_gelu import linear_gelu
from vtk_kernels.linear_residual import linear_residual
from vtk_kernels.norm import norm, norm_backward_launch, norm_backward_ref, norm_ref
from vtk_kernels.row_stats import MANY, PIECE, row_stats_ref, rstd_ref

EPS = 1e-6
OPS = torch.ops.vtk_kernels
LONG = PIECE * (MANY + 1) + 36
"""Channels whose statistics a product reads before its sums; the last piece is not whole."""


def formula(x: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    rstd = 1 / ((x.double() ** 2).sum(-1) / x.shape[-1] + eps).sqrt()
    return x.double() * rstd[..., None], rstd


def normalised(x: Tensor, rms: bool) -> Tensor:
    wide = x.double()
    return formula(x)[0] if rms else wide / (wide.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape) * scale + mean).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", [(1, 2, 192), (3, 1, 1), (0, 5, 48)], ids=str)
def test_references_are_the_formula(shape: tuple[int, ...]) -> None:
    x, r, gy, gh = (torch.randn(shape, dtype=torch.float64) + 1 for _ in range(4))
    leaf = (x + r).requires_grad_()
    x_hat, rstd = formula(leaf)
    expected = x + r, x_hat, rstd
    for actual, wanted in zip(add_norm_ref(x, r, EPS, rms=True), expected, strict=True):
        assert_close(actual, wanted)
    bias = torch.randn(shape[-1], dtype=torch.float64)
    for actual, wanted in zip(norm_ref(x, EPS, bias, True), formula(x + bias), strict=True):
        assert_close(actual, wanted)
    (gx,) = torch.autograd.grad(x_hat, leaf, gh)
    assert_close(norm_backward_ref(gh, x_hat, rstd, True), gx, 2e-10)  # of one channel nearly nothing remains
    assert_close(add_norm_backward_ref(gy, gh, x_hat, rstd, True), gx + gy)


@needs_kernel
@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 5, 100), (1000,)], ids=str)
def test_kernels_are_the_formula(shape: tuple[int, ...]) -> None:
    x, r, gy, gh = (draw(*shape, scale=3.0, mean=1.0) for _ in range(4))
    bias = draw(shape[-1])
    with nan_filled():
        x_hat, rstd = norm(x, EPS, bias, True, use_triton=True)
        y, both, _ = add_norm(x, r, EPS, rms=True, use_triton=True)
        gx = norm_backward_launch(gh, x_hat, rstd, rms=True)
        g = norm_backward_launch(gh, x_hat, rstd, gy, True)
    leaf = (x + bias).double().requires_grad_()
    assert_close(x_hat, formula(leaf)[0])
    assert_close(rstd, formula(leaf)[1])
    assert_close(both, formula(x.double() + r)[0])
    assert_close(y, x.double() + r)
    (wanted,) = torch.autograd.grad(formula(leaf)[0], leaf, gh.double())
    assert_close(gx, wanted, 2e-6)
    assert_close(g, wanted + gy, 2e-6)


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernels_in_half_precision_are_as_good_as_torch(dtype: torch.dtype) -> None:
    x, r = draw(6, 384, dtype=dtype, mean=1.0), draw(6, 384, dtype=dtype)
    w, b = draw(96, 384, dtype=dtype, scale=0.05), draw(96, dtype=dtype)
    assert_no_worse(norm(x, EPS, None, True, use_triton=True)[0], formula(x)[0], F.rms_norm(x, (384,), eps=EPS))
    total = x.double() + r.double()
    assert_no_worse(
        add_norm(x, r, EPS, rms=True, use_triton=True)[1], formula(total)[0], F.rms_norm(x + r, (384,), eps=EPS)
    )
    plain = F.linear(F.rms_norm(x, (384,), eps=EPS), w, b)
    stats = row_stats_ref(x)
    assert_no_worse(
        linear(x, w, b, stats, EPS, True, use_triton=True), F.linear(formula(x)[0], w.double(), b.double()), plain
    )


@pytest.mark.parametrize("channels", [1, 64, 100, 1000])
def test_statistics_give_the_mean_square(channels: int) -> None:
    x = torch.randn(2, 3, channels, dtype=torch.float64) + 100  # where it is mostly the mean's square
    assert_close(rstd_ref(row_stats_ref(x), channels, EPS, True), formula(x)[1])


@needs_kernel
@pytest.mark.parametrize("rows,k,f,rms", [(17, 100, 66, False), (2, 40, 24, True), (5, LONG, 20, False)], ids=str)
def test_products_behind_a_norm_are_the_formula(rows: int, k: int, f: int, rms: bool) -> None:
    x, w, b = draw(rows, k, mean=2.0), draw(f, k, scale=k**-0.5), draw(f)
    known, u = (row_stats_ref(x), EPS, rms), F.linear(normalised(x, rms), w.double(), b.double())
    with nan_filled():
        y, z = linear(x, w, b, *known, use_triton=True), linear_gelu(x, w, b, False, *known, use_triton=True)
    assert_close(linear_ref(x.double(), w.double(), b.double(), row_stats_ref(x.double()), EPS, rms), u)
    assert_close(y, u, 2e-6)
    assert_close(z, F.gelu(u), 2e-6)
    table = draw(rows, f)
    for splits in (1, 2):
        counters = torch.zeros(counters_needed(rows, f), dtype=torch.int32, device=DEVICE)
        with nan_filled():
            y, stats = linear_residual(x, w, b, table, splits, counters, *known, use_triton=True)
        assert_close(y, u + table, 2e-6)
        assert_stats(stats, y)
        assert not counters.any()


@needs_kernel
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_sub_norm_in_half_precision_is_as_good_as_torch(dtype: torch.dtype, splits: int) -> None:
    h, w, b, x = (
        draw(17, 384, dtype=dtype),
        draw(72, 384, dtype=dtype, scale=0.05),
        draw(72, dtype=dtype),
        draw(17, 72, dtype=dtype),
    )
    h[1], h[2, :64] = 0, 60  # σ = 0.001, and a row that one piece decides
    w = (w - w.mean(1, keepdim=True)).to(dtype)
    counters = torch.zeros(counters_needed(17, 72), dtype=torch.int32, device=DEVICE)
    y, stats = linear_residual(h, w, b, x, splits, counters, row_stats_ref(h), EPS, use_triton=True)
    expected = x.double() + F.linear(normalised(h, False), w.double(), b.double())
    assert_no_worse(y, expected, x + F.linear(F.layer_norm(h, (384,), eps=EPS), w, b))
    assert_stats(stats, y)


def test_gradients_are_those_of_the_formula() -> None:
    x, r = (torch.randn(3, 5, dtype=torch.float64).requires_grad_() for _ in range(2))
    partials, bias = (
        torch.randn(2, 3, 5, dtype=torch.float64).requires_grad_(),
        torch.randn(5, dtype=torch.float64).requires_grad_(),
    )
    assert torch.autograd.gradcheck(lambda x, b: OPS.norm(x, EPS, b, True)[0], (x, bias))
    assert torch.autograd.gradcheck(lambda x, r: OPS.add_norm(x, r, EPS, None, None, True)[:2], (x, r))
    assert torch.autograd.gradcheck(lambda *t: OPS.add_norm(t[0], None, EPS, t[1], t[2], True)[:2], (x, partials, bias))
    h, w = (torch.randn(4, 70, dtype=torch.float64).requires_grad_() for _ in range(2))
    y, _ = linear_residual(h, w, None, x[:, :4].T[:, :1].expand(4, 4), row_stats=row_stats_ref(h), eps=EPS, rms=True)
    found = torch.autograd.grad((y**2).sum(), (h, w, x))
    y = x[:, :4].T[:, :1] + formula(h)[0] @ w.T
    for one, other in zip(found, torch.autograd.grad((y**2).sum(), (h, w, x)), strict=True):
        assert_close(one, other, 1e-11)
    with fake_leaves(h, w) as faked:
        table = torch.empty(4, 4, dtype=torch.float16, device="cuda")
        y, _ = linear_residual(*faked, None, table, row_stats=row_stats_ref(faked[0]), eps=EPS)
        assert has_torchs_gradient(y, *faked)
        with torch.no_grad():
            linear_residual(*faked, None, table, row_stats=row_stats_ref(faked[0]), eps=EPS)


def test_operators_keep_torchs_contract() -> None:
    x, w = torch.randn(4, 70), torch.randn(6, 70)
    stats = row_stats_ref(x)
    torch.library.opcheck(OPS.norm.default, (x.clone().requires_grad_(), EPS, None, True), test_utils=ALL)
    only: dict[str, Any] = {"test_utils": "test_faketensor"}
    torch.library.opcheck(OPS.add_norm.default, (x, x, EPS, None, None, True), **only)
    torch.library.opcheck(OPS.linear.default, (x, w, None, stats, EPS, True), **only)
    torch.library.opcheck(OPS.linear_gelu_stats.default, (x, w, None, stats, EPS, True), **only)
    torch.library.opcheck(OPS.linear_residual.default, (x, w, None, x[:, :6], 1, None, stats, EPS, True), **only)
    assert_close(OPS.linear(x, w, None, stats, EPS, True), formula(x)[0] @ w.double().T)
    assert_close(OPS.linear_gelu_stats(x, w, None, stats, EPS, True), F.gelu(formula(x)[0] @ w.double().T))
    y, _ = OPS.linear_residual(x, w, None, x[:, :6], 1, None, stats, EPS, True)
    assert_close(y, x[:, :6] + formula(x)[0] @ w.double().T)


ONES = torch.ones


def test_a_norm_without_statistics_is_refused() -> None:
    x, w = ONES(2, 8), ONES(3, 8)
    for run in (lambda: linear(x, w, None, rms=True), lambda: linear_gelu(x, w, None, rms=True),
                lambda: linear_residual(x, w, None, ONES(2, 3), rms=True)):  # fmt: skip
        with pytest.raises(ValueError, match="`rms` says which norm `row_stats` are for; give"):
            run()
    for options in ({"row_stats": ONES(2, 1, 2)}, {"eps": EPS}):
        with pytest.raises(ValueError, match="`row_stats` and `eps` together"):
            linear_residual(x, w, None, ONES(2, 3), **options)
    with pytest.raises(ValueError, match=r"`row_stats` is \(2, 2, 2\) .* must be \(2, 1, 2\)"):
        OPS.linear_residual(x, w, None, ONES(2, 3), 1, None, ONES(2, 2, 2), EPS)

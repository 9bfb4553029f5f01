"""`linear` behind a folded norm, and the statistics it reads."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels._cases import (
    ALL,
    DEVICE,
    HALF,
    assert_close,
    assert_no_worse,
    assert_stats,
    count_launches,
    error,
    fake_leaves,
    has_torchs_gradient,
    nan_filled,
    needs_kernel,
    strided,
)
from vtk_kernels import _linear_kernel
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels.linear import linear, linear_ref
from vtk_kernels.row_stats import pieces_of, row_stats_ref, rstd_ref

OPS = torch.ops.vtk_kernels
EPS = 1e-6
SHAPES = [(1, 64, 40), (2, 192, 64), (17, 384, 66), (197, 100, 30), (33, 1000, 20)]
"""Rows, K, F: each on its own tiles of `tile_config`, the last piece of a row whole or not."""


def formula(x: Tensor, w: Tensor, b: Tensor | None = None, eps: float | None = EPS) -> Tensor:
    """In fp64: x · wᵀ + b, of rows divided by their standard deviation if there is an eps."""
    y = torch.einsum("...k,fk->...f", x.double(), w.double())
    if eps is not None:
        y = y / (x.double().var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    return y if b is None else y + b.double()


def draw(rows: int, k: int, f: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = torch.randn(rows, k) * (torch.rand(rows, 1) + 0.5), torch.randn(f, k) * k**-0.5, torch.randn(f)
    return x.to(DEVICE, dtype), w.to(DEVICE, dtype), b.to(DEVICE, dtype)


@pytest.mark.parametrize("channels", [1, 63, 64, 65, 192, 384, 1000])
def test_statistics_are_those_of_each_piece_and_unite_to_those_of_the_row(channels: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16):
        x = (torch.randn(2, 3, channels) + 3).to(dtype)
        stats = row_stats_ref(x)
        assert stats.shape == (2, 3, pieces_of(channels), 2)
        assert_stats(stats, x)
        deviation = (x.double().var(-1, unbiased=False) + EPS).sqrt()
        assert_close(rstd_ref(stats, channels, EPS).double() * deviation, torch.ones_like(deviation), 1e-5)


@pytest.mark.parametrize("use_triton", [False, pytest.param(True, marks=needs_kernel)])
def test_statistics_survive_a_large_mean_and_a_constant_row(use_triton: bool) -> None:
    x = 1000 + 0.1 * torch.randn(5, 384, device=DEVICE)
    x[1] = 1000
    x[2, :64] += 1000  # one piece apart: what is between the pieces decides
    w = torch.eye(384, device=DEVICE)
    y = linear(x, w, None, row_stats_ref(x), EPS, use_triton=use_triton)
    rstd = (x.double().var(-1, unbiased=False) + EPS).rsqrt()
    assert (rstd[1] - EPS**-0.5).abs() < 1e-6
    # a mean of 1000 is rounded by 3e-5, which the distances between pieces feel; sums of squares would leave no digit
    assert_close(y.double() / (x.double() * rstd[:, None]), torch.ones(5, 384), 1e-4)


def test_centred_weights_make_it_a_layer_norm() -> None:
    x, w = torch.randn(7, 200, dtype=torch.float64) + 2, torch.randn(9, 200, dtype=torch.float64)
    y = linear(x, w - w.mean(1, keepdim=True), None, row_stats_ref(x), EPS)
    assert_close(y, F.layer_norm(x, (200,), eps=EPS) @ w.T)


@needs_kernel
@pytest.mark.parametrize("rows,k,f", SHAPES, ids=str)
def test_kernel_and_reference_are_the_formula(rows: int, k: int, f: int) -> None:
    x, w, b = draw(rows, k, f)
    wide = x.double(), w.double(), b.double()
    assert_close(linear_ref(*wide), formula(x, w, b, None))
    assert_close(linear_ref(*wide, row_stats_ref(wide[0]), EPS), formula(x, w, b))
    with nan_filled():
        plain = linear(x, w, b, use_triton=True)
        folded = linear(x, w, None, row_stats_ref(x), EPS, use_triton=True)
    assert_close(plain, formula(x, w, b, None))
    assert_close(folded, formula(x, w))


@needs_kernel
@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype, rows: int) -> None:
    x, w, b = draw(rows, 192, 96, dtype)
    y = linear(x, w, b, use_triton=True)
    assert y.dtype == dtype
    assert_no_worse(y, formula(x, w, b, None), F.linear(x, w, b))
    folded = linear(x, w, b, row_stats_ref(x), EPS, use_triton=True)
    assert_no_worse(folded, formula(x, w, b), F.linear(x / x.std(-1, keepdim=True, correction=0), w, b))


@needs_kernel
def test_strided_operands_and_further_dimensions() -> None:
    x, w, b = draw(30, 100, 24)
    stats = row_stats_ref(x)
    for view in (x.T.contiguous().T, strided(x), torch.cat([x, x], 1)[:, :100]):
        y = linear(view.view(2, 15, 100) if view.stride(0) == 200 else view, strided(w), strided(b), use_triton=True)
        assert_close(y.flatten(0, -2), formula(x, w, b, None))
        assert_close(linear(view, w, b, strided(stats), EPS, use_triton=True), formula(x, w, b))
    tokens = torch.stack([x, torch.full_like(x, torch.nan)], 1)
    both = torch.stack([stats, torch.full_like(stats, torch.nan)], 1)
    first = linear(tokens[:, :1], w, b, both[:, :1], EPS, use_triton=True)  # as of a pooled token
    assert_close(first[:, 0], formula(x, w, b))
    assert linear(x[:0].view(0, 3, 100), w, b, stats[:0].view(0, 3, 2, 2), EPS, use_triton=True).shape == (0, 3, 24)


@needs_kernel
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 70), st.integers(1, 140), st.integers(1, 70), st.sampled_from([torch.float32, torch.float16]))
def test_any_shape(rows: int, k: int, f: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * 14000 + k * 100 + f)
    x, w, b = draw(rows, k, f, dtype)
    with nan_filled():
        y = linear(x, w, b, row_stats_ref(x), EPS, use_triton=True)
    assert error(y, formula(x, w, b)) <= (2e-6 if dtype == torch.float32 else 1e-3)


@needs_kernel
def test_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _linear_kernel)
    x, w, b = draw(3, 70, 5)
    linear(x, w, b, use_triton=True)
    linear(x, w, b, row_stats_ref(x), EPS, use_triton=True)
    assert started == ["_linear_kernel"] * 2 * LAUNCHES["linear"]


def test_where_a_gradient_is_wanted_torch_computes() -> None:
    x, w, b = (t.double().cpu().requires_grad_() for t in draw(4, 70, 3))
    g = torch.randn(4, 3, dtype=torch.float64)
    found = torch.autograd.grad(linear(x, w, b, row_stats_ref(x), EPS), (x, w, b), g)
    for one, other in zip(found, torch.autograd.grad(formula(x, w, b), (x, w, b), g), strict=True):
        assert_close(one, other)
    with fake_leaves(x, w, b) as leaves:
        stats = row_stats_ref(leaves[0])
        assert has_torchs_gradient(linear(*leaves, stats, EPS), *leaves)
        with torch.no_grad():
            assert linear(*leaves, stats, EPS).shape == (4, 3)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        OPS.linear(x, w, b).sum().backward()


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operator_keeps_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x, w, b = (t.cpu() for t in draw(6, 70, 5, dtype))
    torch.library.opcheck(OPS.linear.default, (x, w, b, row_stats_ref(x), EPS), test_utils=checks)
    torch.library.opcheck(OPS.linear.default, (strided(x).view(2, 3, 70), strided(w), None), test_utils=checks)


def test_compiles_without_a_break() -> None:
    x, w, b = (t.cpu() for t in draw(6, 70, 5))

    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return OPS.linear(x, w, b, row_stats_ref(x), EPS) + linear(x, w, b)

    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, b)
    assert_close(y, formula(x, w, b) + formula(x, w, b, None))


ONES = torch.ones


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((ONES(2, 8), ONES(3, 7), None), r"`w` is \(3, 7\) torch.float32; it must be \(F, 8\) torch.float32"),
        ((ONES(2, 8), ONES(3, 8), ONES(8)), r"`b` is \(8,\) torch.float32; it must be \(3,\)"),
        ((ONES(2, 8).int(), ONES(3, 8).int(), None), "`x` must be floating point"),
        ((ONES(2, 65), ONES(3, 65), None, ONES(2, 1, 2), EPS), r"`row_stats` is \(2, 1, 2\) .* must be \(2, 2, 2\)"),
        ((ONES(2, 8).half(), ONES(3, 8).half(), None, ONES(2, 1, 2).half(), EPS), r"must be \(2, 1, 2\) torch.float32"),
        ((ONES(2, 8), ONES(3, 8), None, ONES(2, 1, 2)), "give `row_stats` and `eps` together; `eps` is None"),
        ((ONES(2, 8), ONES(3, 8), None, None, EPS), "give `row_stats` and `eps` together; `row_stats` is None"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    for run in (linear, OPS.linear):
        with pytest.raises(ValueError, match=said):
            run(*arguments)

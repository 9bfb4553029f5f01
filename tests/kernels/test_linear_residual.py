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
from vtk_kernels import _linear_kernel, _matmul
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels.linear import linear
from vtk_kernels.linear_residual import linear_residual, linear_residual_ref
from vtk_kernels.row_stats import row_stats_ref, rstd_ref

OPS = torch.ops.vtk_kernels
EPS = 1e-6
SHAPES = [(1, 40, 64), (2, 100, 192), (17, 64, 384), (197, 33, 100), (33, 1000, 20), (66, 16, 65)]
"""Rows, K, C: the last piece of a row whole or not, K with and without a masked end."""


def formula(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> Tensor:
    y = x.double() + torch.einsum("...k,ck->...c", a.double(), w.double())
    return y if b is None else y + b.double()


def draw(rows: int, k: int, c: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, w, b, x = torch.randn(rows, k), torch.randn(c, k) * k**-0.5, torch.randn(c), torch.randn(rows, c) + 0.5
    return a.to(DEVICE, dtype), w.to(DEVICE, dtype), b.to(DEVICE, dtype), x.to(DEVICE, dtype)


@needs_kernel
@pytest.mark.parametrize("rows,k,c", SHAPES, ids=str)
def test_kernel_and_reference_are_the_formula(rows: int, k: int, c: int) -> None:
    a, w, b, x = draw(rows, k, c)
    bias = b if rows % 2 else None
    y, stats = linear_residual_ref(a.double(), w.double(), None if bias is None else bias.double(), x.double())
    assert_close(y, formula(a, w, bias, x))
    assert_stats(stats, y)
    with nan_filled():
        y, stats = linear_residual(a, w, bias, x, use_triton=True)
    assert y.is_contiguous() and stats.is_contiguous()
    assert_close(y, formula(a, w, bias, x))
    assert_stats(stats, y)


@needs_kernel
@pytest.mark.parametrize("rows,c", [(1, 192), (17, 384), (66, 768), (197, 100), (577, 64)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype, rows: int, c: int) -> None:
    a, w, b, x = draw(rows, 96, c, dtype)
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, use_triton=True)
    assert (y.dtype, stats.dtype) == (dtype, torch.float32)
    assert_no_worse(y, formula(a, w, b, x), x + F.linear(a, w, b))
    assert_stats(stats, y)  # of what is stored, which the next product reads


@needs_kernel
@pytest.mark.parametrize("enough,tile", [(1, 128), (1000, 32), (20, 64)])
def test_many_tiles_are_all_written(enough: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # in groups of eight rows of tiles, the last group short; of 144 columns the right half of a tile lies outside
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    a, w, b, x = draw(300, 32, 144, torch.float16)
    assert _matmul.residual_tile_config(False, 300, 144, a, w)[0] == tile
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, use_triton=True)
    assert error(y, formula(a, w, b, x)) <= 1e-3
    assert_stats(stats, y)


def test_tiles_hold_whole_pieces_and_are_small_where_there_are_few() -> None:
    a, w = torch.empty(1, 64, dtype=torch.float16), torch.empty(1, 64, dtype=torch.float16)
    for mapped in (False, True):
        for rows in (1, 17, 50, 197, 577, 1576, 12608):
            for c in (64, 192, 384, 768, 1000, 1024):
                tile = _matmul.residual_tile_config(mapped, rows, c, a, w)
                assert tile[1] in (64, 128), (rows, c)
        assert _matmul.residual_tile_config(mapped, 197, 384, a, w)[:2] == (32, 64)
        assert _matmul.residual_tile_config(mapped, 197, 1024, a, w)[:2] == (32, 64)
        assert _matmul.residual_tile_config(mapped, 1576, 384, a, w)[:2] == (64, 64)
        assert _matmul.residual_tile_config(mapped, 12608, 768, a, w)[:2] == (128, 128)
    odd = torch.empty(1, 65, dtype=torch.float16)[:, :64]
    assert _matmul.residual_tile_config(False, 197, 384, odd.T, w)[:3] == (64, 64, 32)


@needs_kernel
@pytest.mark.parametrize("use_triton", [False, True])
def test_statistics_survive_a_large_mean_and_a_constant_row(use_triton: bool) -> None:
    a, w, _, x = draw(5, 32, 100)
    x = 1000 + 0.1 * x
    x[1], a[1] = 1000, 0
    y, stats = linear_residual(a * 0.1, w, None, x, use_triton=use_triton)
    assert_stats(stats, y)
    deviation = (y.double().var(-1, unbiased=False) + EPS).sqrt()
    # a mean of 1000 is rounded by 3e-5, which the distance between pieces feels; sums of squares would leave no digit
    assert_close(rstd_ref(stats, 100, EPS).double() * deviation, torch.ones_like(deviation), 1e-4)
    assert not stats[1, :, 1].any()


@needs_kernel
def test_two_products_are_a_residual_and_a_layer_norm() -> None:
    a, w, b, x = draw(17, 64, 192)
    following = torch.randn(40, 192, device=DEVICE) * 192**-0.5
    y, stats = linear_residual(a, w, b, x + 3, use_triton=True)
    z = linear(y, following - following.mean(1, keepdim=True), None, stats, EPS, use_triton=True)
    total = formula(a, w, b, x + 3)
    assert_close(z, F.layer_norm(total, (192,), eps=EPS) @ following.double().T, 5e-6)


@needs_kernel
def test_strided_operands_and_further_dimensions() -> None:
    a, w, b, x = draw(30, 40, 72)
    expected = formula(a, w, b, x)
    for one in (a.T.contiguous().T, strided(a), torch.cat([a, a], 1)[:, :40]):
        for other in (x.T.contiguous().T, strided(x), torch.cat([x, x], 1)[:, :72]):
            y, stats = linear_residual(one, strided(w), strided(b), other, use_triton=True)
            assert_close(y, expected)
            assert_stats(stats, y)
    y, stats = linear_residual(a.view(2, 15, 40), w, b, x.view(2, 15, 72), use_triton=True)
    assert y.shape == (2, 15, 72) and stats.shape == (2, 15, 2, 2)
    assert_close(y.flatten(0, 1), expected)
    pooled = torch.stack([x, torch.full_like(x, torch.nan)], 1)[:, 0]
    assert torch.equal(linear_residual(a, w, b, pooled, use_triton=True)[0], y.flatten(0, 1))
    empty = linear_residual(a[:0].view(0, 3, 40), w, b, x[:0].view(0, 3, 72), use_triton=True)
    assert [t.shape for t in empty] == [(0, 3, 72), (0, 3, 2, 2)]


@needs_kernel
def test_the_same_bits_every_time() -> None:
    a, w, b, x = draw(70, 100, 130, torch.float16)
    first, second = (linear_residual(a, w, b, x, use_triton=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@needs_kernel
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 200), st.sampled_from([torch.float32, torch.float16]))
def test_any_shape(rows: int, k: int, c: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * 18000 + k * 200 + c)
    a, w, b, x = draw(rows, k, c, dtype)
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, use_triton=True)
    assert error(y, formula(a, w, b, x)) <= (1e-6 if dtype == torch.float32 else 1e-3)
    assert_stats(stats, y)


@needs_kernel
def test_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _linear_kernel)
    linear_residual(*draw(3, 8, 70), use_triton=True)
    assert started == ["_linear_kernel"] * LAUNCHES["linear_residual"]


def test_where_a_gradient_is_wanted_torch_computes() -> None:
    leaves = [t.double().cpu().requires_grad_() for t in draw(4, 7, 70)]
    y, stats = linear_residual(*leaves)
    found = torch.autograd.grad((y * rstd_ref(stats, 70, EPS)[:, None] ** 2).sum(), leaves)
    wanted = formula(*leaves)
    wanted = wanted / (wanted.var(-1, keepdim=True, unbiased=False) + EPS)
    for one, other in zip(found, torch.autograd.grad(wanted.sum(), leaves), strict=True):
        assert_close(one, other, 1e-10)
    with fake_leaves(*leaves) as faked:
        assert all(has_torchs_gradient(y, *faked) for y in linear_residual(*faked))
        with torch.no_grad():
            assert [t.shape for t in linear_residual(*faked)] == [(4, 70), (4, 2, 2)]
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        OPS.linear_residual(*leaves)[0].sum().backward()


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operator_keeps_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    a, w, b, x = (t.cpu() for t in draw(6, 8, 70, dtype))
    torch.library.opcheck(OPS.linear_residual.default, (a, w, b, x), test_utils=checks)
    views = (strided(a).view(2, 3, 8), strided(w), None, strided(x).view(2, 3, 70))
    torch.library.opcheck(OPS.linear_residual.default, views, test_utils=checks)


def test_compiles_without_a_break() -> None:
    a, w, b, x = (t.cpu() for t in draw(6, 8, 70))

    def step(a: Tensor, w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        y, stats = OPS.linear_residual(a, w, b, x)
        z, others = linear_residual(a, w, b, y)
        return z + (stats + others).sum()

    z = torch.compile(step, fullgraph=True, backend="aot_eager")(a, w, b, x)
    first = formula(a, w, b, x)
    second = formula(a, w, b, first)
    assert_close(z, second + (row_stats_ref(first) + row_stats_ref(second)).sum(), 5e-6)


ONES = torch.ones


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((ONES(2, 8), ONES(3, 7), None, ONES(2, 3)), r"`w` is \(3, 7\) torch.float32; it must be \(F, 8\)"),
        ((ONES(2, 8), ONES(3, 8), ONES(8), ONES(2, 3)), r"`b` is \(8,\) torch.float32; it must be \(3,\)"),
        ((ONES(2, 8), ONES(3, 8), None, ONES(2, 8)), r"`x` is \(2, 8\) torch.float32; it must be \(2, 3\)"),
        ((ONES(2, 8), ONES(3, 8), None, ONES(1, 3)), r"`x` is \(1, 3\) torch.float32; it must be \(2, 3\)"),
        ((ONES(2, 8), ONES(3, 8), None, ONES(2, 3).half()), r"`x` is \(2, 3\) torch.float16; .* torch.float32"),
        ((ONES(2, 8).int(), ONES(3, 8).int(), None, ONES(2, 3).int()), "`a` must be floating point"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Tensor, ...], said: str) -> None:
    for run in (linear_residual, OPS.linear_residual):
        with pytest.raises(ValueError, match=said):
            run(*arguments)

"""`linear_residual` in slices whose last program finishes its tile: the formula, whoever comes last; counters."""

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels._cases import (
    DEVICE,
    HALF,
    assert_close,
    assert_no_worse,
    assert_stats,
    count_launches,
    error,
    nan_filled,
    needs_kernel,
    strided,
)
from vtk_kernels import _linear_kernel, _residual_kernel
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels._triton import tl, triton
from vtk_kernels.linear_residual import linear_residual, linear_residual_ref

OPS = torch.ops.vtk_kernels
SHAPES = [(1, 300, 64, 3), (17, 256, 192, 2), (40, 1000, 33, 4), (65, 500, 70, 5), (66, 16, 65, 2)]
"""Rows, K, C, slices: whole and cut pieces, tiles and steps; of 16 columns in two slices the second is empty."""


def draw(rows: int, k: int, c: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, w, b, x = torch.randn(rows, k), torch.randn(c, k) * k**-0.5, torch.randn(c), torch.randn(rows, c) + 0.5
    return a.to(DEVICE, dtype), w.to(DEVICE, dtype), b.to(DEVICE, dtype), x.to(DEVICE, dtype)


def zeros(rows: int, c: int) -> Tensor:
    return torch.zeros(counters_needed(rows, c), dtype=torch.int32, device=DEVICE)


def formula(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> Tensor:
    y = x.double() + torch.einsum("...k,ck->...c", a.double(), w.double())
    return y if b is None else y + b.double()


@needs_kernel
@pytest.mark.parametrize("rows,k,c,splits", SHAPES, ids=str)
def test_slices_are_the_formula_and_leave_no_count(rows: int, k: int, c: int, splits: int) -> None:
    a, w, b, x = draw(rows, k, c)
    bias, counters = b if rows % 2 else None, zeros(rows, c)
    for _ in range(2):
        with nan_filled():
            y, stats = linear_residual(a, w, bias, x, splits, counters, use_triton=True)
        assert y.is_contiguous() and stats.is_contiguous()
        assert_close(y, formula(a, w, bias, x))
        assert_stats(stats, y)
        assert not counters.any()


@needs_kernel
@pytest.mark.parametrize("rows,c", [(1, 192), (17, 384), (66, 136)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_slices_in_half_precision_are_as_good_as_torch(dtype: torch.dtype, rows: int, c: int) -> None:
    a, w, b, x = draw(rows, 384, c, dtype)
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, 3, zeros(rows, c), use_triton=True)
    assert (y.dtype, stats.dtype) == (dtype, torch.float32)
    assert_no_worse(y, formula(a, w, b, x), x + F.linear(a, w, b))
    assert_stats(stats, y)


@triton.jit
def _backwards(pid, programs, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (programs - 1 - pid) // SPLITS, (programs - 1 - pid) % SPLITS


@triton.jit
def _slices_outside(pid, programs, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return pid % (programs // SPLITS), pid // (programs // SPLITS)


@triton.jit
def _turned(pid, programs, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return pid // SPLITS, (pid + pid // SPLITS) % SPLITS


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_who_comes_last_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, w, b, x = draw(34, 384, 66, dtype)
    found = []
    own = _residual_kernel.slice_of
    for order in (own, own, _backwards, _slices_outside, _turned):
        monkeypatch.setattr(_residual_kernel, "slice_of", order)
        found.append(linear_residual(a, w, b, x, 3, zeros(34, 66), use_triton=True))
    for y, stats in found[1:]:
        assert torch.equal(y, found[0][0]) and torch.equal(stats, found[0][1])
    # sums in another order have other bits, so that the comparison could fail
    parts = [a[:, i : i + 128].float() @ w[:, i : i + 128].T.float() for i in (0, 128, 256)]
    assert not torch.equal(sum(parts), sum(parts[::-1]))


@needs_kernel
def test_products_of_a_pass_share_counters() -> None:
    counters = zeros(70, 192)
    for rows, k, c, splits in ((70, 256, 192, 2), (5, 384, 64, 3), (33, 130, 100, 2)):
        a, w, b, x = draw(rows, k, c)
        assert_close(linear_residual(a, w, b, x, splits, counters, use_triton=True)[0], formula(a, w, b, x))
    assert not counters.any()


@needs_kernel
def test_strided_operands_and_further_dimensions() -> None:
    a, w, b, x = draw(30, 300, 72)
    expected = formula(a, w, b, x)
    for one in (a.T.contiguous().T, strided(a), torch.cat([a, a], 1)[:, :300]):
        y, stats = linear_residual(one, strided(w), strided(b), strided(x), 3, zeros(30, 72), use_triton=True)
        assert_close(y, expected)
        assert_stats(stats, y)
    y, stats = linear_residual(a.view(2, 15, 300), w, b, x.view(2, 15, 72), 3, zeros(30, 72), use_triton=True)
    assert y.shape == (2, 15, 72) and stats.shape == (2, 15, 2, 2)
    assert_close(y.flatten(0, 1), expected)
    none = linear_residual(a[:0], w, b, x[:0], 3, zeros(0, 72), use_triton=True)
    assert [t.shape for t in none] == [(0, 72), (0, 2, 2)]


@needs_kernel
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 70), st.integers(1, 400), st.integers(1, 140), st.integers(2, 6))
def test_any_shape(rows: int, k: int, c: int, splits: int) -> None:
    torch.manual_seed(rows * 18000 + k * 200 + c)
    a, w, b, x = draw(rows, k, c)
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, splits, zeros(rows, c), use_triton=True)
    assert error(y, formula(a, w, b, x)) <= 1e-6
    assert_stats(stats, y)


@needs_kernel
def test_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _residual_kernel, _linear_kernel)
    linear_residual(*draw(3, 300, 70), 3, zeros(3, 70), use_triton=True)
    assert started == ["_residual_kernel"] * LAUNCHES["linear_residual"]


@pytest.mark.parametrize(
    "dtype,checks",
    [(torch.float64, ("test_schema", "test_faketensor")), (torch.bfloat16, "test_faketensor")], ids=str,
)  # fmt: skip
def test_the_operator_takes_slices(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    a, w, b, x = (t.cpu().to(dtype) for t in draw(6, 300, 70))
    counters = zeros(6, 70).cpu()
    torch.library.opcheck(OPS.linear_residual.default, (a, w, b, x, 3, counters), test_utils=checks)
    found, plain = OPS.linear_residual(a, w, b, x, 3, counters), linear_residual_ref(a, w, b, x)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    if dtype == torch.float64:
        assert_close(found[0], formula(a, w, b, x))


def bad() -> Iterator[tuple[int, Tensor | None, str]]:
    yield 0, None, r"`splits` \(0\) must be at least 1"
    yield 2, None, r"`splits` \(2\) needs `counters`: \(4,\) torch.int32, all 0, on cpu"
    for counters in (torch.zeros(3).int(), torch.zeros(4), torch.zeros(2, 2).int(), torch.zeros(8).int()[::2]):
        yield 2, counters, r"it must be at least \(4,\) torch.int32 on cpu, all 0"
    yield 2, torch.zeros(4, dtype=torch.int32, device="meta"), r"torch.int32 on meta; it must be at least \(4,\)"


@pytest.mark.parametrize("splits,counters,said", list(bad()))
def test_what_does_not_fit_is_refused(splits: int, counters: Tensor | None, said: str) -> None:
    operands = torch.ones(40, 256), torch.ones(65, 256), None, torch.ones(40, 65)
    with pytest.raises(ValueError, match=said):
        linear_residual(*operands, splits, counters)
    if counters is None or counters.device.type == "cpu":
        with pytest.raises(ValueError, match=said):
            OPS.linear_residual(*operands, splits, counters)


@pytest.mark.gpu
def test_a_thousand_replays_on_two_streams_have_the_same_bits() -> None:
    """Programs really race there: the last of a tile is another one from replay to replay."""
    a, w, b, x = draw(197, 3072, 384, torch.bfloat16)
    first = linear_residual(a, w, b, x, 4, zeros(197, 384), use_triton=True)
    assert_no_worse(first[0], formula(a, w, b, x), x + F.linear(a, w, b))
    graphs = []
    for _ in range(2):
        counters, graph = zeros(197, 384), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y, stats = linear_residual(a, w, b, x, 4, counters, use_triton=True)
            z, more = linear_residual(a, w, b, y, 4, counters, use_triton=True)
        graphs.append((torch.cuda.Stream(), graph, (y, stats, z, more), counters))
    wanted = None
    for _ in range(1000):
        for stream, graph, _, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, _, found, counters in graphs:
            wanted = wanted or [t.clone() for t in found]
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
            assert not counters.any()
    assert wanted is not None and torch.equal(wanted[0], first[0]) and torch.equal(wanted[1], first[1])


@needs_kernel
def test_on_blackwell_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for it the kernel of slices spills."""
    started = count_launches(monkeypatch, _linear_kernel, _residual_kernel)
    a, w, b, x = draw(17, 256, 64)
    for generation in (9, 10):
        monkeypatch.setattr(sys.modules["vtk_kernels.linear_residual"], "capability", lambda _, g=generation: g)
        y, _ = linear_residual(a, w, b, x, 2, zeros(17, 64), use_triton=True)
        assert_close(y, formula(a, w, b, x))
    assert started == ["_residual_kernel", "_linear_kernel"]

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels._cases import (
    ALL,
    DEVICE,
    HALF,
    assert_close,
    assert_no_worse,
    count_launches,
    error,
    nan_filled,
    needs_kernel,
    strided,
)
from vtk_kernels import _low_rank_kernels, _low_rank_linear_kernel
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels.grouped_low_rank import UNIT, grouped_low_rank, grouped_low_rank_ref, make_tile_map
from vtk_kernels.low_rank_linear import low_rank_linear, low_rank_linear_ref

OPS = torch.ops.vtk_kernels


class Operands(NamedTuple):
    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    spans: Tensor
    tile_map: Tensor
    rank: int
    bias: Tensor | None
    scale: Tensor | None = None
    x_scale: Tensor | None = None
    y_scale: Tensor | None = None

    def wide(self) -> "Operands":
        return Operands(*(t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in self))


def draw(
    counts: Sequence[int], ranks: Sequence[int], k: int, f: int, dtype: torch.dtype = torch.float32, *,
    codes: bool = False, first: int = 0, spare: int = 0, block: int = 64, gap: int = 3,
) -> Operands:  # fmt: skip
    """Factors in reverse order of groups, with rows of nobody between them, all of NaN where they are no codes."""
    begins, end = [0] * len(ranks), 0
    for group in reversed(range(len(ranks))):
        begins[group], end = end + gap, end + gap + ranks[group]
    size = end + gap
    spans = torch.tensor([*zip(begins, ranks, strict=True)], dtype=torch.int32).reshape(-1, 2)
    rows = first + sum(counts) + spare
    a, b = torch.randn(size, k) * k**-0.5, torch.randn(size, f)
    if codes:
        a, b = ((t * 50).clamp(-127, 127).to(torch.int8).to(DEVICE) for t in (a, b))
    else:
        nobodys = torch.ones(size, dtype=torch.bool)
        for begin, rank in zip(begins, ranks, strict=True):
            nobodys[begin : begin + rank] = False
        a[nobodys], b[nobodys] = torch.nan, torch.nan
        a, b = (t.to(DEVICE, dtype) for t in (a, b))
    offsets = torch.tensor([first, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    floats = torch.randn(rows, f), torch.randn(rows, k), torch.randn(len(ranks), f)
    y, x, bias = (t.to(DEVICE, dtype) for t in floats)
    wide = torch.promote_types(dtype, torch.float32)
    scales = tuple((torch.rand(n) + 0.5).to(DEVICE, wide) for n in (size, k, f)) if codes else (None, None, None)
    tiles = make_tile_map(offsets, block, rows // block + len(counts) + 2)
    return Operands(y, x, a, b, spans.to(DEVICE), tiles, max(ranks, default=0), bias, *scales)


def formula(o: Operands, counts: Sequence[int], first: int = 0) -> Tensor:
    """Row by row in fp64: the change is a matrix, as `load_task` merges it."""
    w, y = o.wide(), o.y.double().clone()
    codes = 1.0 if o.a.dtype == o.x.dtype else 1.0 / 128
    owner = [g for g, count in enumerate(counts) for _ in range(count)]
    for row, group in enumerate(owner, first):
        begin, rank = o.spans[group].tolist()
        a, b = w.a[begin : begin + rank].double() * codes, w.b[begin : begin + rank].double() * codes
        a = a if w.scale is None else a * w.scale[begin : begin + rank, None]
        a = a if w.x_scale is None else a * w.x_scale
        b = b if w.y_scale is None else b * w.y_scale
        y[row] += (b.T @ a) @ w.x[row] + (0 if w.bias is None else w.bias[group])
    return y


def computed(o: Operands, **kwargs: Any) -> Tensor:
    y = o.y.clone()
    grouped_low_rank(y, *o[1:], **kwargs)
    return y


@pytest.mark.parametrize("codes", [False, True])
def test_reference_is_the_formula(codes: bool) -> None:
    counts = (9, 0, 1, 20)
    o = draw(counts, (3, 8, 0, 5), 10, 6, torch.float64, codes=codes, first=3, spare=4, block=8)
    assert_close(computed(o), formula(o, counts, 3))
    plain = o._replace(bias=None, scale=None, x_scale=None, y_scale=None)
    assert_close(computed(plain), formula(plain, counts, 3))
    assert torch.equal(computed(o)[:3], o.y[:3]) and torch.equal(computed(o)[-4:], o.y[-4:])


@needs_kernel
@pytest.mark.parametrize(
    "counts,ranks,k,f,block",
    [
        ((70, 0, 7), (5, 16, 0), 100, 150, 64),
        ((3, 1), (0, 40), 64, 66, 16),
        ((150, 30), (70, 1), 32, 64, 128),  # tiles longer than a program's, ranks longer than a step
        ((20, 20), (0, 0), 16, 8, 16),  # no rank at all: biases alone
    ],
    ids=str,
)
@pytest.mark.parametrize("codes", [False, True])
def test_kernels_are_the_formula(
    counts: tuple[int, ...], ranks: tuple[int, ...], k: int, f: int, block: int, codes: bool
) -> None:
    o = draw(counts, ranks, k, f, codes=codes, first=2, spare=5, block=block)
    with nan_filled():  # of the thin product, only columns of a group's rank are written or read
        y = computed(o, use_triton=True)
        without = computed(o._replace(bias=None), use_triton=True)
    assert_close(y, formula(o, counts, 2), 2e-6)
    assert_close(without, formula(o._replace(bias=None), counts, 2), 2e-6)
    assert torch.equal(y[:2], o.y[:2]) and torch.equal(y[-5:], o.y[-5:])


@needs_kernel
@pytest.mark.parametrize("block,rows", [(16, 16), (64, 64)])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernels_in_half_precision_are_as_good_as_torch(dtype: torch.dtype, codes: bool, block: int, rows: int) -> None:
    counts = (block, block - 1, 0, 2 * block)
    o = draw(counts, (16, 3, 4, 33), 64, 48, dtype, codes=codes, block=block)
    o = o._replace(tile_map=o.tile_map[:, :-3])
    assert _low_rank_kernels._tile(len(o.x), o.tile_map.shape[1], o.x, wide=True)[1] == rows
    y = computed(o, use_triton=True)
    assert y.dtype == dtype
    assert_no_worse(y, formula(o, counts), computed(o, use_triton=False))


def whole(o: Operands, w: Tensor, **kwargs: Any) -> Tensor:
    return low_rank_linear(o.x, w, *o[2:], **kwargs)


def whole_formula(o: Operands, w: Tensor, counts: Sequence[int], first: int) -> Tensor:
    y = formula(o._replace(y=o.x.double() @ w.double().T), counts, first)
    y[:first], y[first + sum(counts) :] = 0, 0
    return y


@needs_kernel
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(
    "counts,ranks,k,f,block", [((70, 0, 7), (5, 40, 0), 100, 150, 64), ((3, 1), (0, 17), 64, 66, 16)], ids=str
)
def test_one_product_of_shared_weights_and_changes_is_the_formula(
    counts: tuple[int, ...], ranks: tuple[int, ...], k: int, f: int, block: int, codes: bool
) -> None:
    o, w = draw(counts, ranks, k, f, codes=codes, first=2, spare=5, block=block), torch.randn(f, k, device=DEVICE)
    expected = whole_formula(o, w, counts, 2)
    with nan_filled():
        assert_close(whole(o, w, use_triton=True), expected, 2e-6)
        empty = whole(o._replace(tile_map=o.tile_map[:, :0]), w, use_triton=True)
    assert_close(whole(o, w), expected, 2e-6)
    assert not empty.any()
    half = Operands(*(t.half() if isinstance(t, Tensor) and t.dtype == torch.float32 else t for t in o[:8]), *o[8:])
    exact = whole_formula(half, w.half(), counts, 2)
    found = low_rank_linear(half.x, w.half(), *half[2:], use_triton=True)
    assert_no_worse(found, exact, low_rank_linear_ref(half.x, w.half(), *half[2:]))


def test_one_product_refuses_weights_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"`w` is \(5, 7\) torch.float32; it must be \(F, 8\) torch.float32"):
        whole(GOOD, ONES(5, 7))
    with pytest.raises(ValueError, match=r"`b` is \(3, 5\) torch.float32; it must be \(3, 4\)"):
        whole(GOOD, ONES(4, 8))
    operands = (GOOD.x, ONES(5, 8), *GOOD[2:])
    torch.library.opcheck(OPS.low_rank_linear.default, operands, test_utils=("test_schema", "test_faketensor"))


def test_rounding_the_thin_product_costs_less_than_rounding_the_output() -> None:
    """Why z is half precision: in fp32 it would not make y better where the change is a tenth of the whole."""
    torch.manual_seed(1)
    for dtype in (torch.float16, torch.bfloat16):
        o = draw((300,), (16,), 384, 256, dtype)
        o = o._replace(y=(o.y * 10).to(dtype), bias=None)
        exact = formula(o, (300,))
        rounded = error(exact.to(dtype), exact)
        assert error(computed(o, use_triton=False), exact) <= 1.2 * rounded


@needs_kernel
def test_a_tasks_own_factors_alone_decide_its_rows() -> None:
    """Others' factors may be replaced or NaN, and a freed span taken again, while a graph keeps all addresses."""
    o = draw((20, 30, 9), (4, 7, 2), 32, 32, gap=0, block=16)
    before = computed(o, use_triton=True)
    spans = o.spans.clone()
    begin, rank = spans[1].tolist()
    for t in (o.a, o.b):
        t[begin : begin + rank] = torch.nan
    spans[1] = 0  # rank 0
    after = computed(o._replace(spans=spans), use_triton=True)
    assert torch.equal(after[:20], before[:20]) and torch.equal(after[50:], before[50:])
    assert o.bias is not None
    assert_close(after[20:50], (o.y[20:50] + o.bias[1]).double())


@needs_kernel
def test_strided_operands() -> None:
    o = draw((4, 6), (2, 3), 12, 7, codes=True)
    wide = torch.full((10, 9), torch.nan, device=DEVICE)
    wide[:, 1:8] = o.y
    spread = [None if t is None else strided(t) for t in (o.bias, o.scale, o.x_scale, o.y_scale)]
    doubled = [torch.stack([t, t], -1)[..., 0] for t in (o.spans, o.tile_map)]
    a, b = (t.T.contiguous().T for t in (o.a, o.b))
    grouped_low_rank(wide[:, 1:8], strided(o.x), a, b, *doubled, o.rank, *spread, use_triton=True)
    assert_close(wide[:, 1:8], formula(o, (4, 6)), 2e-6)
    assert wide[:, 0].isnan().all() and wide[:, 8].isnan().all()


@needs_kernel
def test_nothing_to_do() -> None:
    o = draw((0, 0), (2, 3), 4, 5, spare=3)
    assert torch.equal(computed(o, use_triton=True), o.y)
    assert torch.equal(computed(o._replace(tile_map=o.tile_map[:, :0]), use_triton=True), o.y)
    assert computed(o._replace(y=o.y[:0], x=o.x[:0]), use_triton=True).shape == (0, 5)


@needs_kernel
@settings(max_examples=4, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([8, 16, 64]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_any_groups_of_any_ranks(
    groups: list[tuple[int, int]], k: int, f: int, block: int, codes: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(len(groups) * 1600 + k * 40 + f)
    counts, ranks = zip(*groups, strict=True)
    o = draw(counts, ranks, k, f, dtype, codes=codes, block=block, spare=1)
    with nan_filled():
        y = computed(o, use_triton=True)
    assert error(y, formula(o, counts)) <= (2e-6 if dtype == torch.float32 else 3e-3)


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _low_rank_kernels, _low_rank_linear_kernel)
    o = draw((1, 2), (3, 1), 4, 5)
    computed(o, use_triton=True)
    assert len(started) == LAUNCHES["grouped_low_rank"]
    whole(o, torch.ones(5, 4, device=DEVICE), use_triton=True)
    assert len(started) == LAUNCHES["grouped_low_rank"] + LAUNCHES["low_rank_linear"]


@pytest.mark.parametrize(
    "dtype,checks", [(torch.bfloat16, ("test_schema", "test_faketensor")), (torch.float32, ALL)], ids=["bf16", "fp32"]
)
def test_operator_keeps_torchs_contract(dtype: torch.dtype, checks: tuple[str, ...]) -> None:
    o = Operands(*(t.cpu() if isinstance(t, Tensor) else t for t in draw((2, 3), (2, 0), 8, 5, dtype, codes=True)))
    torch.library.opcheck(OPS.grouped_low_rank.default, tuple(o), test_utils=checks)


def test_gradients_are_torchs() -> None:
    o = Operands(*(t.cpu() if isinstance(t, Tensor) else t for t in draw((2, 3), (2, 1), 8, 5, torch.float64, gap=0)))
    leaves = tuple(t.clone().requires_grad_() for t in (o.y, o.x, o.a, o.b, o.bias) if t is not None)

    def run(y: Tensor, x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return computed(o._replace(y=y, x=x, a=a, b=b, bias=bias))

    assert torch.autograd.gradcheck(run, leaves)
    with FakeTensorMode():  # on a card too: the kernels have none
        half = [torch.empty(t.shape, dtype=torch.float16, device="cuda") if isinstance(t, Tensor) else t for t in o]
        for i in (4, 5):
            half[i] = torch.empty(half[i].shape, dtype=torch.int32, device="cuda")
        half[1].requires_grad_()
        with pytest.raises(Exception, match="_local_scalar_dense"):  # the reference reads the spans
            grouped_low_rank(*half)


def test_compiles_without_a_break() -> None:
    o = Operands(*(t.cpu() if isinstance(t, Tensor) else t for t in draw((3, 0, 4), (2, 1, 3), 4, 5, spare=1)))

    def step(y: Tensor, x: Tensor) -> Tensor:
        y = y * 2
        grouped_low_rank(y, x, *o[2:])
        return y + 1

    with torch.no_grad():
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(o.y, o.x)
    assert_close(found, formula(o._replace(y=2 * o.y), (3, 0, 4)) + 1)


def test_it_does_not_wait_for_the_device() -> None:
    o = draw((3, 0, 4), (2, 1, 3), 4, 5)
    with FakeTensorMode(), torch.no_grad():
        fake = [torch.empty(t.shape, dtype=t.dtype, device="cuda") if isinstance(t, Tensor) else t for t in o]
        half = [t.half() if isinstance(t, Tensor) and t.is_floating_point() else t for t in fake]
        grouped_low_rank(*half)


ONES, MAP = torch.ones, torch.tensor([[0], [0], [2]], dtype=torch.int32)
SPANS = torch.tensor([[0, 3]], dtype=torch.int32)
GOOD = Operands(ONES(2, 5), ONES(2, 8), ONES(3, 8), ONES(3, 5), SPANS, MAP, 3, ONES(1, 5))


@pytest.mark.parametrize(
    "change,said",
    [
        ({"x": ONES(1, 2, 8)}, r"`x` is \(1, 2, 8\); it must be \(T, K\)"),
        ({"x": ONES(2, 8).int()}, "`x` must be floating point"),
        ({"y": ONES(3, 5)}, r"`y` is \(3, 5\) torch.float32.*; it must be \(2, F\) torch.float32"),
        ({"y": ONES(5, 2).T}, r"`y` is \(2, 5\) .*strides \(1, 2\); .*neighbouring columns side by side"),
        ({"a": ONES(3, 8).half()}, r"`a` is \(3, 8\) torch.float16; it must be \(N, 8\) torch.float32 or torch.int8"),
        ({"a": ONES(3, 7)}, r"`a` is \(3, 7\)"),
        ({"b": ONES(3, 4)}, r"`b` is \(3, 4\) torch.float32; it must be \(3, 5\) torch.float32"),
        ({"b": ONES(3, 5).to(torch.int8)}, r"`b` is \(3, 5\) torch.int8; it must be \(3, 5\) torch.float32"),
        ({"spans": SPANS.long()}, r"`spans` is \(1, 2\) torch.int64 on cpu; it must be \(G, 2\) torch.int32"),
        ({"spans": SPANS[:, :1]}, r"`spans` is \(1, 1\)"),
        ({"tile_map": MAP.to("meta")}, r"`tile_map` is \(3, 1\) torch.int32 on meta; .* on the device of `x`, cpu"),
        ({"rank": -1}, r"`rank` \(-1\) must not be negative"),
        ({"bias": ONES(2, 5)}, r"`bias` is \(2, 5\) torch.float32; it must be \(1, 5\) torch.float32, or None"),
        ({"scale": ONES(2)}, r"`scale` is \(2,\) torch.float32; it must be \(3,\) torch.float32, or None"),
        ({"x_scale": ONES(8).double()}, r"`x_scale` is \(8,\) torch.float64; it must be \(8,\) torch.float32"),
        ({"y_scale": ONES(8)}, r"`y_scale` is \(8,\)"),
        ({"rank": 2}, r"`spans` has 3 rows from row 0 on for group 0; .* 3 rows of `a` and have at most `rank` \(2\)"),
        ({"spans": SPANS + 1}, "`spans` has 4 rows from row 1 on for group 0"),
        ({"tile_map": MAP + 1}, r"tile \(group 1, rows 1 to 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    for run in (grouped_low_rank, OPS.grouped_low_rank):
        if run is grouped_low_rank or "meta" not in said:
            with pytest.raises(ValueError, match=said):
                run(*GOOD._replace(**change))
    grouped_low_rank_ref(*GOOD._replace(y=ONES(2, 5)))
    assert UNIT == 128

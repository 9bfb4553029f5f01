"""The forms of the matrix products for Hopper, whose tiles the copy engine moves, run by the interpreter."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels._cases import DEVICE, assert_close, assert_stats, error, nan_filled, needs_kernel
from vtk_kernels import (
    _grouped_kernels,
    _linear_kernel,
    _low_rank_linear_kernel,
    _matmul,
    _residual_kernel,
    _swiglu_backward_kernel,
    _swiglu_kernel,
)
from vtk_kernels import linear_gelu_backward as backward_module
from vtk_kernels import splitk_linear as splitk_module
from vtk_kernels.grouped_linear import grouped_linear, grouped_linear_ref, make_tile_map
from vtk_kernels.linear import linear, linear_ref
from vtk_kernels.linear_gelu import linear_gelu, linear_gelu_ref
from vtk_kernels.linear_gelu_backward import linear_gelu_backward, linear_gelu_backward_ref
from vtk_kernels.linear_residual import linear_residual, linear_residual_ref
from vtk_kernels.linear_swiglu import linear_swiglu, linear_swiglu_backward, linear_swiglu_ref
from vtk_kernels.linear_swiglu_backward import linear_swiglu_backward_ref
from vtk_kernels.low_rank_linear import low_rank_linear, low_rank_linear_ref
from vtk_kernels.row_stats import MANY, PIECE, row_stats_ref
from vtk_kernels.splitk_linear import default_splits, splitk_linear, splitk_linear_ref

pytestmark = needs_kernel


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Take the form for Hopper, and note the tiles of every tensor map."""
    seen: list[tuple[int, ...]] = []
    made = _matmul.tensor_map

    def noted(matrix: Tensor, rows: int, columns: int) -> object:
        seen.append((rows, columns))
        return made(matrix, rows, columns)

    modules: tuple[ModuleType, ...] = (
        _grouped_kernels,
        _linear_kernel,
        _low_rank_linear_kernel,
        _residual_kernel,
        _swiglu_backward_kernel,
        _swiglu_kernel,
        backward_module,
        splitk_module,
    )
    for module in modules:
        monkeypatch.setattr(module, "is_hopper", lambda x: True)
        if hasattr(module, "tensor_map"):  # the others ask `_matmul.in_tiles`
            monkeypatch.setattr(module, "tensor_map", noted)
    monkeypatch.setattr(_matmul, "tensor_map", noted)
    return seen


def half(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, torch.float16)


REAL = 128
"""Tiles that are enough for every multiprocessor of a card; with fewer, small products take the tiles of large ones."""


@pytest.mark.parametrize(
    "rows,k,f,enough,tile",
    [(1, 64, 72, REAL, (16, 64)), (30, 104, 64, REAL, (32, 64)), (70, 192, 200, REAL, (64, 64)),
     (130, 64, 128, 4, (64, 64)), (130, 64, 200, 4, (64, 128)), (200, 72, 328, 4, (128, 128)),
     pytest.param(197, 64, 3072, REAL, (64, 64), marks=pytest.mark.slow),
     pytest.param(394, 64, 3072, REAL, (64, 128), marks=pytest.mark.slow),
     pytest.param(1100, 72, 2048, REAL, (128, 128), marks=pytest.mark.slow)],
)  # fmt: skip
def test_linear_gelu_takes_every_tile_once(
    rows: int, k: int, f: int, enough: int, tile: tuple[int, int], hopper: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    x, w, b = half(rows, k), half(f, k, scale=k**-0.5), half(f)
    with nan_filled():
        y = linear_gelu(x, w, b, use_triton=True)
    assert (hopper[1][0], hopper[2][0]) == tile and len(hopper) == 3  # of y, x and w
    expected = linear_gelu_ref(x.double(), w.double(), b.double())
    assert isinstance(expected, Tensor)
    assert_close(y, expected, 1e-3)


@pytest.mark.parametrize("enough,tile", [(128, (64, 128)), (1, (128, 32))], ids=["small tiles", "large tiles"])
def test_linear_gelu_with_a_byte_and_with_statistics(
    enough: int, tile: tuple[int, int], hopper: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    x, w, b = half(70, 72), half(144 if enough == 1 else 48, 72, scale=0.125), half(144 if enough == 1 else 48)
    with nan_filled():
        y, q = linear_gelu(x, w, b, True, use_triton=True)
    expected, wanted = linear_gelu_ref(x.double(), w.double(), b.double(), True)
    assert hopper[1] == tile and error(y, expected) <= 1e-3  # of x
    assert (q.int() - wanted.int()).abs().max() <= 1
    for run, ref in ((linear, linear_ref), (linear_gelu, linear_gelu_ref)):
        with nan_filled():
            y = run(x, w, b, row_stats=row_stats_ref(x), eps=1e-6, use_triton=True)
        found = ref(x.double(), w.double(), b.double(), row_stats=row_stats_ref(x.double()), eps=1e-6)
        assert isinstance(found, Tensor)
        assert_close(y, found, 1e-3)


@pytest.mark.parametrize(
    "rows,k,c,enough,tile",
    [(1, 128, 64, 128, 16), (30, 104, 72, 128, 32), (197, 192, 384, 128, 32), (70, 64, 1000, 128, 32),
     (130, 64, 72, 8, 64), (130, 64, 200, 7, 64), (300, 72, 200, 1, 128)],
)  # fmt: skip
def test_linear_residual_takes_every_tile_and_piece_once(
    rows: int, k: int, c: int, enough: int, tile: int, hopper: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    a, w, b, x = half(rows, k), half(c, k, scale=k**-0.5), half(c), half(rows, c)
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, use_triton=True)
    assert hopper[1][0] == tile and len(hopper) == 4  # of y, a, w and x
    assert hopper[0] == hopper[3] == (tile, 64)
    assert_close(y, linear_residual_ref(a.double(), w.double(), b.double(), x.double())[0], 1e-3)
    assert_stats(stats, y)


class _Starts:
    """Notes whether the sums of a launch start from the residual."""

    def __init__(self, kernel: Any, found: list[bool]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            self.found.append(named["START"])
            self.kernel[grid](*args, **named)

        return launch


@pytest.mark.parametrize("rows,k,c,enough,cards,starts", [
    (66, 72, 136, 128, 132, True), (66, 72, 136, 128, 1, False), (130, 64, 72, 8, 132, True),
    (300, 72, 200, 1, 132, False),
])  # fmt: skip
def test_sums_start_from_the_residual_where_a_program_has_one_tile(
    rows: int, k: int, c: int, enough: int, cards: int, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a loop over tiles, and not in tiles that are finished in halves: there the epilogue adds it."""
    found: list[bool] = []
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    monkeypatch.setattr("vtk_kernels._resident.multiprocessors", lambda x: cards)
    monkeypatch.setattr(_linear_kernel, "_linear_kernel", _Starts(_linear_kernel._linear_kernel, found))
    a, w, b, x = half(rows, k), half(c, k, scale=k**-0.5), half(c), half(rows, c)
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, use_triton=True)
        linear(a, w, b, use_triton=True)
    assert found == [starts, False]
    assert_close(y, linear_residual_ref(a.double(), w.double(), b.double(), x.double())[0], 1e-3)
    assert_stats(stats, y)


@pytest.mark.parametrize("rows,k,c", [(1, 256, 64), (30, 384, 72), (66, 776, 136)])
def test_slices_of_linear_residual_are_the_formula(rows: int, k: int, c: int, hopper: list[tuple[int, ...]]) -> None:
    a, w, b, x = half(rows, k), half(c, k, scale=k**-0.5), half(c), half(rows, c)
    counters = torch.zeros(_residual_kernel.counters_needed(rows, c), dtype=torch.int32, device=DEVICE)
    with nan_filled():
        y, stats = linear_residual(a, w, b, x, 3, counters, use_triton=True)
    assert hopper == [(16 if rows == 1 else 32 if rows == 30 else 64, 128), (64, 128)]  # of a and w
    assert_close(y, linear_residual_ref(a.double(), w.double(), b.double(), x.double())[0], 1e-3)
    assert_stats(stats, y)
    assert not counters.any()


@pytest.mark.parametrize("why,rows,k,f", [("x and w", 40, 100, 64), ("y", 40, 64, 100)])
def test_rows_that_start_anywhere_are_copied_by_threads(
    why: str, rows: int, k: int, f: int, hopper: list[tuple[int, ...]]
) -> None:
    x, w = half(rows, k), half(f, k, scale=k**-0.5)
    y = linear_gelu(x, w, None, use_triton=True)
    assert not hopper, why
    expected = linear_gelu_ref(x.double(), w.double(), None)
    assert isinstance(expected, Tensor)
    assert_close(y, expected, 1e-3)


@pytest.mark.parametrize("rows,k,f", [(1, 128, 64), (70, 1000, 72), (197, 768, 384), (66, 384, 136)])
def test_splitk_linear_sums_to_the_product(rows: int, k: int, f: int, hopper: list[tuple[int, ...]]) -> None:
    x, w = half(rows, k), half(f, k, scale=k**-0.5)
    for splits in {default_splits(rows, f, k), 3}:
        with nan_filled():
            partials = splitk_linear(x, w, splits, use_triton=True)
        assert_close(partials, splitk_linear_ref(x.double(), w.double(), splits), 1e-5)
    assert len(hopper) == 2 * len({default_splits(rows, f, k), 3})


@pytest.mark.parametrize(
    "rows,c,f,enough,tile",
    [
        (5, 64, 72, 128, (16, 64)),
        (70, 104, 200, 128, (64, 64)),
        (140, 64, 136, 128, (64, 64)),
        (140, 80, 144, 1, (128, 64)),
    ],
)
def test_linear_gelu_backward(
    rows: int,
    c: int,
    f: int,
    enough: int,
    tile: tuple[int, int],
    hopper: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    g, w2 = half(rows, c), half(c, f, scale=c**-0.5)
    q = torch.randint(0, 256, (rows, f), dtype=torch.uint8, device=DEVICE)
    with nan_filled():
        gu = linear_gelu_backward(g, w2, q, use_triton=True)
    assert len(hopper) == 2 and (hopper[0][0], hopper[1][1]) == tile  # of g and w2
    assert_close(gu, linear_gelu_backward_ref(g.double(), w2.double(), q), 1e-3)


@pytest.mark.parametrize(
    "rows,k,f,enough,tile",
    [(1, 64, 72, REAL, (16, 128)), (30, 104, 64, REAL, (32, 128)), (70, 136, 200, REAL, (64, 64)),
     (200, 72, 136, 1, (128, 64)), (70, 72, 102, REAL, (64, 64))],
)  # fmt: skip
def test_linear_swiglu_takes_every_tile_of_gate_and_value_once(
    rows: int, k: int, f: int, enough: int, tile: tuple[int, int], hopper: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # tiles of the gate reach into the value's rows of w, and those of the value past its end; rows of 102 are padded
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    x, w, b = half(rows, k), half(2 * f, k, scale=k**-0.5), half(2 * f)
    with nan_filled():
        y = linear_swiglu(x, w, b, use_triton=True)
    assert hopper == [(tile[0], 64), tile, (64, tile[1])]  # of y, x and w
    expected = linear_swiglu_ref(x.double(), w.double(), b.double())
    assert isinstance(expected, Tensor)
    assert_close(y, expected, 1e-3)


@pytest.mark.parametrize(
    "k,rms",
    [(136, False), (136, True), (PIECE * (MANY // 2 + 1), False), (PIECE * (MANY + 1) + 8, True)],
)  # fmt: skip
def test_statistics_of_short_and_of_long_rows(k: int, rms: bool, hopper: list[tuple[int, ...]]) -> None:
    """They are read behind the sums, or before them where there are many."""
    x, w, b, table = half(18, k), half(72, k, scale=k**-0.5), half(72), half(18, 72)
    known, wide = row_stats_ref(x), (x.double(), w.double(), b.double())
    exact = row_stats_ref(wide[0])
    with nan_filled():
        y, stats = linear_swiglu(x, w, b, row_stats=known, eps=1e-6, rms=rms, stats=True, use_triton=True)
        alone = linear_swiglu(x, w, b, row_stats=known, eps=1e-6, rms=rms, use_triton=True)
        u = linear(x, w, b, known, 1e-6, rms, use_triton=True)
        z, of_z = linear_residual(x, w, b, table, row_stats=known, eps=1e-6, rms=rms, use_triton=True)
    expected = linear_swiglu_ref(*wide, row_stats=exact, eps=1e-6, rms=rms)
    assert isinstance(expected, Tensor) and len(hopper) == 3 + 3 + 3 + 4
    assert_close(y, expected, 1e-3)
    assert_close(alone, expected, 1e-3)
    assert_stats(stats, y)
    assert_close(u, linear_ref(*wide, exact, 1e-6, rms), 1e-3)
    assert_close(z, linear_ref(*wide, exact, 1e-6, rms) + table, 1e-3)
    assert_stats(of_z, z)


@pytest.mark.parametrize("rows,k,f,enough", [(70, 72, 136, REAL), (140, 72, 136, 1), (30, 72, 104, REAL)])
def test_linear_swiglu_with_codes_and_its_backward(
    rows: int, k: int, f: int, enough: int, hopper: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    x, w, b = half(rows, k), half(2 * f, k, scale=k**-0.5), half(2 * f)
    g, w2 = half(rows, 104), half(104, f, scale=0.1)
    with nan_filled():
        y, q, scales = linear_swiglu(x, w, b, save_grad=True, use_triton=True)
        gu = linear_swiglu_backward(g, w2, q, scales, use_triton=True)
    expected, codes, exact = linear_swiglu(x.double(), w.double(), b.double(), save_grad=True)
    assert hopper[1] == ((128, 32) if enough == 1 else (64, 64) if rows > 32 else (32, 128))  # of x
    assert_close(y, expected, 1e-3)
    assert (q.int() - codes.int()).abs().max() <= 1
    assert_close(scales, exact, 1e-5)
    assert len(hopper) == 5 and hopper[4][1] == 64  # of g and w2
    assert_close(gu, linear_swiglu_backward_ref(g.double(), w2.double(), q, scales.double()), 1e-3)


@pytest.mark.parametrize("block", [16, 64, 128])
def test_grouped_linear_keeps_groups_apart(block: int, hopper: list[tuple[int, ...]]) -> None:
    lengths, f, k = (17, 0, 130, 1), 72, 104  # 72 columns: a tile reaches into the next group's weights
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    tiles = make_tile_map(offsets, block, 20)
    x, w, b = half(155, k), half(4, f, k, scale=k**-0.5), half(4, f)
    with nan_filled():
        y = grouped_linear(x, w, b, tiles, use_triton=True)
    assert len(hopper) == 2
    assert_close(y, grouped_linear_ref(x.double(), w.double(), b.double(), tiles), 1e-3)
    assert not y[148:].any()
    grouped_linear(x, w.transpose(1, 2).contiguous().transpose(1, 2), b, tiles, use_triton=True)
    assert len(hopper) == 2  # weights that lie the other way round are read by threads


@pytest.mark.parametrize("block", [16, 128])
def test_low_rank_linear_keeps_groups_apart(block: int, hopper: list[tuple[int, ...]]) -> None:
    lengths, f, k = (17, 0, 130, 1), 72, 104
    tiles = make_tile_map(torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32), block, 20)
    spans = torch.tensor([[3, 20], [0, 3], [23, 1], [30, 0]], dtype=torch.int32, device=DEVICE)
    operands = half(155, k), half(f, k, scale=k**-0.5), half(32, k, scale=k**-0.5), half(32, f)
    bias = half(4, f)
    with nan_filled():
        y = low_rank_linear(*operands, spans, tiles, 20, bias, use_triton=True)
    assert len(hopper) == 2
    wide = low_rank_linear_ref(*(t.double() for t in operands), spans, tiles, 20, bias.double())
    assert_close(y, wide, 1e-3)
    assert not y[148:].any()


def test_default_splits_fill_a_card_and_leave_none_empty() -> None:
    for rows, f, k, wanted in (
        (197, 384, 3072, 4), (197, 384, 768, 3), (197, 384, 384, 3), (197, 768, 6144, 2), (788, 384, 3072, 3),
        (1576, 384, 3072, 1), (12608, 384, 3072, 1), (1, 64, 64, 1), (0, 64, 1000, 8),
    ):  # fmt: skip
        splits = default_splits(rows, f, k)
        assert splits == wanted, (rows, f, k)
        if rows:
            assert all(bool(part.any()) for part in splitk_linear_ref(torch.ones(1, k), torch.ones(1, k), splits))

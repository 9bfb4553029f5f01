import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
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
from vtk_kernels import _grouped_kernels
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels._grouped_kernels import backward_launch
from vtk_kernels.grouped_linear import (
    grouped_linear,
    grouped_linear_backward_ref,
    grouped_linear_ref,
    make_tile_map,
)

OPS = torch.ops.vtk_kernels


def offsets(counts: Sequence[int], first: int = 0) -> Tensor:
    return torch.tensor([first, *counts], device=DEVICE).cumsum(0).to(torch.int32)


def tiles_by_hand(counts: Sequence[int], block: int, first: int = 0) -> list[tuple[int, int, int]]:
    tiles, row = [], first
    for group, count in enumerate(counts):
        tiles += [(group, row + at, row + min(at + block, count)) for at in range(0, count, block)]
        row += count
    return tiles


def formula(
    x: Tensor, w: Tensor, b: Tensor | None, counts: Sequence[int], row_scale: Tensor | None = None, first: int = 0
) -> Tensor:
    """Row by row in fp64; zeros for rows of no group."""
    y = torch.zeros(len(x), w.shape[1], dtype=torch.float64, device=x.device)
    owner = [g for g, count in enumerate(counts) for _ in range(count)]
    for row, group in enumerate(owner, first):
        value = (w[group].double() * x[row].double()).sum(1)
        value = value if row_scale is None else value * row_scale[row].double()
        y[row] = value if b is None else value + b[group].double()
    return y


def draw(
    rows: int, groups: int, k: int, f: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w, b = torch.randn(rows, k), torch.randn(groups, f, k) * k**-0.5, torch.randn(groups, f)
    return (*(t.to(DEVICE, dtype) for t in (x, w, b)), (torch.rand(rows) + 0.5).to(DEVICE))


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("counts", [(100, 0, 37, 64), (0, 0, 5), (3,), (0,), (0, 65, 0)], ids=str)
def test_tile_map_is_the_plain_construction(counts: tuple[int, ...], block: int, first: int) -> None:
    expected = tiles_by_hand(counts, block, first)
    exact = make_tile_map(offsets(counts, first), block)
    assert exact.dtype == torch.int32 and exact.is_contiguous()
    assert [tuple(t) for t in exact.T.tolist()] == expected
    spare = sum(counts) // block + len(counts)
    padded = make_tile_map(offsets(counts, first), block, spare)
    end = first + sum(counts)
    assert [tuple(t) for t in padded.T.tolist()] == expected + [(-1, end, end)] * (spare - len(expected))


def test_tile_map_does_not_wait_for_the_device() -> None:
    with FakeTensorMode():  # whoever asks a fake tensor for a value is refused
        fake = torch.empty(9, dtype=torch.int32, device="cuda")
        made = make_tile_map(fake, 64, 40)
        assert (made.shape, made.dtype, made.device.type) == ((3, 40), torch.int32, "cuda")
    meta = make_tile_map(torch.empty(9, dtype=torch.int32, device="meta"), 64, 40)
    assert meta.shape == (3, 40)
    traced = torch.compile(lambda cu: make_tile_map(cu, 16, 9), fullgraph=True, backend="eager")
    assert torch.equal(traced(offsets((20, 0, 3)).cpu()), make_tile_map(offsets((20, 0, 3)).cpu(), 16, 9))


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("folded", [False, True])
def test_reference_is_the_formula(folded: bool, block: int) -> None:
    counts = (9, 0, 1, 20)
    x, w, b, row_scale = (t.double().cpu() for t in draw(37, 4, 10, 6))
    scale = row_scale if folded else None
    tiles = make_tile_map(offsets(counts, 3).cpu(), block, 12)
    assert_close(grouped_linear_ref(x, w, b, tiles, scale), formula(x, w, b, counts, scale, 3))
    assert_close(grouped_linear_ref(x, w, None, tiles, scale), formula(x, w, None, counts, scale, 3))


@needs_kernel
@pytest.mark.parametrize(
    "counts,first,rows,k,f,block,spare",
    [
        ((70, 0, 7), 0, 80, 100, 30, 64, 4),
        ((0, 3, 1), 0, 4, 64, 66, 16, None),
        ((5,), 0, 9, 1000, 9, 64, 2),
        ((150,), 3, 160, 32, 64, 128, 2),  # a tile longer than the kernel's own
        ((0, 0), 0, 7, 16, 8, 16, 2),  # rows, but of no group
        ((2, 2), 0, 4, 16, 8, 16, 30),
    ],
    ids=str,
)
def test_kernel_is_the_formula(
    counts: tuple[int, ...], first: int, rows: int, k: int, f: int, block: int, spare: int | None
) -> None:
    tiles = make_tile_map(offsets(counts, first), block, spare)
    x, w, b, row_scale = draw(rows, len(counts), k, f)
    g = torch.randn(rows, f, device=DEVICE)
    for scale, bias in ((None, None), (None, b), (row_scale, b)):
        with nan_filled():
            y = grouped_linear(x, w, bias, tiles, scale, use_triton=True)
        assert_close(y, formula(x, w, bias, counts, scale, first))
    with nan_filled():
        gx = grouped_linear(g, w.transpose(1, 2), None, tiles, use_triton=True)
        gw, gb = backward_launch(g, x, tiles, len(counts), row_scale)
    assert_close(gx, formula(g, w.transpose(1, 2), None, counts, None, first), 2e-6)
    wide = (g.double(), x.double(), tiles, len(counts), row_scale.double())
    for found, expected in zip((gw, gb), grouped_linear_backward_ref(*wide), strict=True):
        assert_close(found, expected, 2e-6)


@needs_kernel
@pytest.mark.parametrize("block,rows_per_tile", [(16, 16), (64, 64), (128, 128)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype, block: int, rows_per_tile: int) -> None:
    counts = (block, block - 1, 0, 2 * block)
    x, w, b, row_scale = draw(sum(counts), 4, 64, 48, dtype)
    tiles = make_tile_map(offsets(counts), block)
    assert _grouped_kernels._config(sum(counts), tiles.shape[1], x, w)[0] == rows_per_tile
    assert_no_worse(
        grouped_linear(x, w, b, tiles, use_triton=True),
        formula(x, w, b, counts),
        grouped_linear_ref(x, w, b, tiles),
    )
    y = grouped_linear(x, w, b, tiles, row_scale, use_triton=True)
    plain = grouped_linear_ref(x * row_scale[:, None].to(dtype), w, b, tiles)
    assert y.dtype == dtype
    assert_no_worse(y, formula(x, w, b, counts, row_scale), plain)
    g = torch.randn(len(x), 48, device=DEVICE).to(dtype)
    gw, gb = backward_launch(g, x, tiles, 4)
    plain_gw, plain_gb = grouped_linear_backward_ref(g, x, tiles, 4)
    exact_gw, exact_gb = grouped_linear_backward_ref(g.double(), x.double(), tiles, 4)
    assert_no_worse(gw, exact_gw, plain_gw)
    assert_no_worse(gb, exact_gb, plain_gb)


@needs_kernel
def test_strided_operands() -> None:
    x, w, b, row_scale = draw(10, 2, 12, 7)
    tiles = make_tile_map(offsets((4, 6)), 16)
    expected = formula(x, w, b, (4, 6), row_scale)
    spread = torch.stack([tiles, tiles], -1)[..., 0]
    for view in (strided(x), x.T.contiguous().T, torch.cat([x, x], 1)[:, :12]):
        y = grouped_linear(view, strided(w), strided(b), spread, strided(row_scale), use_triton=True)
        assert_close(y, expected)
    g = torch.randn(10, 7, device=DEVICE)
    for found, wanted in zip(
        backward_launch(strided(g), strided(x), spread, 2, strided(row_scale)),
        grouped_linear_backward_ref(g.double(), x.double(), tiles, 2, row_scale.double()),
        strict=True,
    ):
        assert_close(found, wanted)


@needs_kernel
def test_nothing_to_do() -> None:
    x, w, b, _ = draw(3, 2, 4, 5)
    empty = make_tile_map(offsets((0, 0)), 16)
    assert empty.shape == (3, 0)
    with nan_filled():
        assert not grouped_linear(x, w, b, empty, use_triton=True).any()
        assert grouped_linear(x[:0], w, b, make_tile_map(offsets((0, 0)), 16, 2), use_triton=True).shape == (0, 5)
        gw, gb = backward_launch(torch.ones(3, 5, device=DEVICE), x, empty, 2)
    assert not gw.any() and not gb.any()
    assert not grouped_linear(x, w, b, empty).any()


@needs_kernel
@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([8, 16, 64]),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_any_groups(counts: list[int], k: int, f: int, block: int, spare: int, dtype: torch.dtype) -> None:
    torch.manual_seed(sum(counts) * 1600 + k * 40 + f)
    rows = sum(counts) + spare
    x, w, b, row_scale = draw(rows, len(counts), k, f, dtype)
    tiles = make_tile_map(offsets(counts), block, rows // block + len(counts))
    with nan_filled():
        y = grouped_linear(x, w, b, tiles, row_scale, use_triton=True)
        gw, gb = backward_launch(y, x, tiles, len(counts), row_scale)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    assert error(y, formula(x, w, b, counts, row_scale)) <= tolerance
    wide = (y.double(), x.double(), tiles, len(counts), row_scale.double())
    for found, expected in zip((gw, gb), grouped_linear_backward_ref(*wide), strict=True):
        assert error(found, expected) <= tolerance


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _grouped_kernels)
    x, w, b, _ = draw(3, 2, 4, 5)
    tiles = make_tile_map(offsets((1, 2)), 16)
    y = grouped_linear(x, w, b, tiles, use_triton=True)
    assert len(started) == LAUNCHES["grouped_linear"]
    backward_launch(y, x, tiles, 2)
    assert len(started) == LAUNCHES["grouped_linear"] + LAUNCHES["grouped_linear_backward"]


def leaves(*shape: int) -> tuple[Tensor, ...]:
    return tuple(t.double().cpu().requires_grad_() for t in draw(*shape))


def test_gradients_are_those_of_the_formula() -> None:
    x, w, b, row_scale = leaves(8, 3, 4, 2)
    tiles = make_tile_map(offsets((3, 0, 4)).cpu(), 2, 6)
    assert torch.autograd.gradcheck(lambda *t: OPS.grouped_linear(t[0], t[1], t[2], tiles, t[3]), (x, w, b, row_scale))
    assert torch.autograd.gradcheck(lambda *t: OPS.grouped_linear(t[0], t[1], None, tiles), (x, w))
    g = torch.randn(8, 2, dtype=torch.float64)
    for run in (OPS.grouped_linear, grouped_linear):  # the operator's own gradient, and torch's of the reference
        found = torch.autograd.grad(run(x, w, b, tiles, row_scale), (x, w, b, row_scale), g)
        expected = torch.autograd.grad(formula(x, w, b, (3, 0, 4), row_scale), (x, w, b, row_scale), g)
        for one, wanted in zip(found, expected, strict=True):
            assert_close(one, wanted)


def test_agrees_with_torchs_grouped_product() -> None:
    counts = (16, 0, 8, 24)
    x, w, _, _ = (t.cpu() for t in draw(48, 4, 16, 8))
    cu = offsets(counts).cpu()
    expected = F.grouped_mm(x, w.transpose(1, 2), offs=cu[1:])
    assert error(grouped_linear(x, w, None, make_tile_map(cu, 16)), expected) <= 1e-5


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operators_keep_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x, w, b, row_scale = (t.cpu() for t in draw(6, 2, 8, 5, dtype))
    leaf = [t.clone().requires_grad_() for t in (x, w, b, row_scale)]
    tiles = make_tile_map(offsets((2, 3)).cpu(), 16, 3)
    op = OPS.grouped_linear.default
    torch.library.opcheck(op, (*leaf[:3], tiles, leaf[3]), test_utils=checks)
    torch.library.opcheck(op, (strided(x), strided(w), None, tiles), test_utils="test_faketensor")
    g = strided(torch.randn(6, 5).to(dtype))
    torch.library.opcheck(
        OPS.grouped_linear_backward.default, (g, x, tiles, 2, row_scale), test_utils="test_faketensor"
    )


def test_compiles_without_a_break() -> None:
    x, w, b, row_scale = (t.float().detach().requires_grad_() for t in leaves(8, 3, 4, 5))
    cu = offsets((3, 0, 4)).cpu()

    def step(x: Tensor, w: Tensor, b: Tensor, row_scale: Tensor, cu: Tensor) -> Tensor:
        tiles = make_tile_map(cu, 16, 5)
        y = OPS.grouped_linear(x * 2, w, b, tiles, row_scale)
        return (y**2).sum() + (grouped_linear(x, w, None, tiles) ** 2).sum()  # the map is read inside the operator

    torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, b, row_scale, cu).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, w, b, row_scale)]
    loss = (formula(2 * wide[0], wide[1], wide[2], (3, 0, 4), wide[3]) ** 2).sum()
    loss = loss + (formula(wide[0], wide[1], None, (3, 0, 4)) ** 2).sum()
    for found, expected in zip((x, w, b, row_scale), torch.autograd.grad(loss, wide), strict=True):
        assert found.grad is not None
        assert_close(found.grad, expected, 5e-6)


ONES, MAP = torch.ones, torch.tensor([[0], [0], [2]], dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((ONES(1, 2, 8), ONES(1, 3, 8), None, MAP), r"`x` is \(1, 2, 8\); it must be \(T, K\)"),
        ((ONES(2, 8), ONES(3, 8), None, MAP), r"`w` is \(3, 8\) torch.float32; it must be \(G, F, 8\) torch.float32"),
        ((ONES(2, 8), ONES(1, 3, 8).half(), None, MAP), r"`w` is \(1, 3, 8\) torch.float16"),
        ((ONES(2, 8), ONES(1, 3, 8), ONES(3), MAP), r"`b` is \(3,\) torch.float32; it must be \(1, 3\)"),
        ((ONES(2, 8), ONES(1, 3, 8), None, MAP.long()), r"`tile_map` is \(3, 1\) torch.int64; it must be \(3, tiles\)"),
        ((ONES(2, 8), ONES(1, 3, 8), None, MAP[:2]), r"`tile_map` is \(2, 1\)"),
        ((ONES(2, 8), ONES(1, 3, 8), None, MAP.to("meta")), "`tile_map` is on meta; it must be on the device of `x`"),
        ((ONES(2, 8), ONES(1, 3, 8), None, MAP, ONES(3)), r"`row_scale` is \(3,\) torch.float32; it must be \(2,\)"),
        ((ONES(2, 8).int(), ONES(1, 3, 8).int(), None, MAP), "`x` must be floating point"),
        ((ONES(1, 8), ONES(1, 3, 8), None, MAP), r"tile \(group 0, rows 0 to 2\) after row 0; tiles must ascend"),
        ((ONES(2, 8), ONES(1, 3, 8), None, MAP + 1), r"tile \(group 1, rows 1 to 3\)"),
        ((ONES(4, 8), ONES(1, 3, 8), None, MAP.repeat(1, 2)), r"rows 0 to 2\) after row 2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Tensor, ...], said: str) -> None:
    for run in (grouped_linear, OPS.grouped_linear):
        if run is grouped_linear or "meta" not in said:
            with pytest.raises(ValueError, match=said):
                run(*arguments)


@pytest.mark.parametrize(
    "cu,block,spare,said",
    [
        (torch.tensor([0, 5]), 16, None, r"`cu_seqlens` is \(2,\) torch.int64; it must be \(G \+ 1,\) torch.int32"),
        (torch.tensor([0], dtype=torch.int32), 16, None, r"`cu_seqlens` is \(1,\)"),
        (torch.tensor([0, 5], dtype=torch.int32), 0, None, r"`block` \(0\) must be at least 1"),
        (torch.tensor([0, 40, 41], dtype=torch.int32), 16, 3, r"`max_tiles` \(3\) is too small: .* need 4 tiles of 16"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(cu: Tensor, block: int, spare: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_tile_map(cu, block, spare)


def test_the_documented_number_of_tiles_always_suffices() -> None:
    for counts in itertools.product((0, 1, 15, 16, 17, 33), repeat=3):
        needed = len(tiles_by_hand(counts, 16))
        assert needed <= sum(counts) // 16 + 3

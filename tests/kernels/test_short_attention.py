"""`packed_attention` over few keys: all of an image's at once. The formula and the packed kernel's tests are beside."""

import pytest
import torch
from torch import Tensor

from tests.kernels._cases import (
    DEVICE,
    HALF,
    assert_close,
    assert_no_worse,
    count_launches,
    nan_filled,
    needs_kernel,
    strided,
)
from tests.kernels.test_packed_attention import draw, formula
from vtk_kernels import _attention_kernel
from vtk_kernels import _short_attention as short
from vtk_kernels import packed_attention as packed
from vtk_kernels._short_attention import cut, fits, short_attention
from vtk_kernels.packed_attention import packed_attention_ref

LENGTHS = (1, 15, 16, 17, 64, 65, 196, 197, 201, 256, 257, 261, 288)
"""Around whole blocks and tails, and what people have: images of 224 pixels in patches of 16 and 14, with registers."""

CPU = pytest.mark.skipif(DEVICE == "cuda", reason="a card multiplies half precision only")


@pytest.fixture(params=[True, False], ids=["early", "late"])
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys and values before the first product, as on Hopper, or each before its own."""
    monkeypatch.setattr(short, "is_hopper", lambda _: request.param)


def check_length(n: int, folded: bool) -> None:
    qkv, row_scale, bias = draw((1, n), 1, 16)
    more = (row_scale, bias) if folded else (None, None)
    with nan_filled():
        o = short_attention(qkv, 1, None, 0.25, *more)
    assert o.is_contiguous()
    assert_close(o, formula(qkv, 1, None, 0.25, *more), 1e-6)


@CPU
@needs_kernel
@pytest.mark.parametrize("n", LENGTHS)
def test_kernel_is_the_formula(n: int, loads: None) -> None:
    for folded in (False, True):
        check_length(n, folded)


@CPU
@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, 289, 48))
def test_every_length_is_the_formula(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(start, start + 48):
        monkeypatch.setattr(short, "is_hopper", lambda _, n=n: bool(n % 2))
        check_length(n, n % 3 == 0)


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("n", "heads", "d"), [(17, 3, 40), (197, 1, 64), (261, 1, 32)], ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(
    n: int, heads: int, d: int, dtype: torch.dtype, loads: None
) -> None:
    qkv, row_scale, bias = draw((1, n), heads, d, dtype)
    o = short_attention(qkv, heads, None, d**-0.5)
    assert o.dtype == dtype
    assert_no_worse(o, formula(qkv, heads, None, d**-0.5), packed_attention_ref(qkv, heads, None, None, d**-0.5))
    o = short_attention(qkv, heads, None, d**-0.5, row_scale, bias)
    plain = packed_attention_ref(qkv * row_scale[..., None].to(dtype) + bias, heads, None, None, d**-0.5)
    assert_no_worse(o, formula(qkv, heads, None, d**-0.5, row_scale, bias), plain)


@CPU
@needs_kernel
def test_some_queries_strides_and_each_part_of_the_folded_form(loads: None) -> None:
    qkv, row_scale, bias = draw((2, 19), 3, 24)
    for queries in (1, 18):
        o = short_attention(qkv, 3, queries, 0.2, row_scale, bias)
        assert_close(o, formula(qkv, 3, queries, 0.2, row_scale, bias))
    for view, more in (
        (strided(qkv), (row_scale, None)),
        (torch.cat([qkv, qkv], -1)[..., :216], (None, strided(bias))),
        (qkv.transpose(0, 1).contiguous().transpose(0, 1), (strided(row_scale), bias)),
    ):
        assert_close(short_attention(view, 3, None, 0.2, *more), formula(qkv, 3, None, 0.2, *more))


@CPU
@needs_kernel
def test_a_damaged_neighbour_stays_alone_and_bits_are_the_same_again(loads: None) -> None:
    qkv, row_scale, bias = draw((3, 19), 2, 16)
    alone = short_attention(qkv, 2, None, 0.3, row_scale, bias)
    qkv[0], qkv[2], row_scale[2] = torch.nan, torch.inf, torch.nan
    among = short_attention(qkv, 2, None, 0.3, row_scale, bias)
    assert torch.equal(among[1], alone[1]) and not torch.isfinite(among[0]).any()
    assert torch.equal(short_attention(qkv[1:2], 2, None, 0.3, row_scale[1:2], bias)[0], alone[1])


@CPU
@needs_kernel
def test_logits_beyond_the_range_of_powers(loads: None) -> None:
    qkv = draw((1, 80), 4, 32)[0] * 8  # beyond ±1000: e to their power is inf
    assert_no_worse(short_attention(qkv, 4), formula(qkv, 4), packed_attention_ref(qkv, 4))
    qkv = draw((1, 20), 1, 8)[0]
    qkv[..., 0] = 1.0  # channel 0 of every query
    qkv[:, [3, 18], 8] = -torch.inf  # and of two keys, one of them in the tail: logits of −inf
    o = short_attention(qkv, 1)
    left = [i for i in range(20) if i not in (3, 18)]
    rest = torch.cat([qkv[:, left], qkv[:, [3, 18]].clone().nan_to_num()], 1)
    assert_close(o[:, left], formula_without(rest, 18)[:, :18], 1e-6)
    qkv[:, :, 0] = -1.0  # +inf, and +inf − +inf where it is the largest: as torch says
    assert short_attention(qkv, 1).isnan().all() and packed_attention_ref(qkv, 1).isnan().all()


def formula_without(qkv: Tensor, keys: int) -> Tensor:
    """Attention of one head over the first keys only."""
    q, k, v = qkv.double().chunk(3, -1)
    return torch.softmax(q @ k[:, :keys].mT, -1) @ v[:, :keys]


def test_keys_are_cut_into_whole_blocks_and_the_smallest_tail() -> None:
    for keys in range(1, 289):
        blocks, tail = cut(keys)
        assert tail in (0, 16, 32, 64) and 0 <= blocks * 64 + tail - keys < max(tail, 1)
        assert tail in (0, 16) or tail < 2 * (keys - blocks * 64)
    assert [cut(n) for n in (197, 201, 257, 261)] == [(3, 16), (3, 16), (4, 16), (4, 16)]


@pytest.mark.parametrize(
    ("shape", "heads", "scale", "folded", "taken"),
    [
        ((2, 288, 192), 1, 1.0, True, True), ((2, 289, 192), 1, 1.0, False, False), ((2, 0, 192), 1, 1.0, False, False),
        ((2, 197, 3 * 72), 1, 1.0, False, False), ((2, 197, 3 * 80), 1, 1.0, False, False),
        ((2, 197, 3 * 20), 1, 1.0, False, False), ((2, 197, 3 * 24 * 2), 2, 1.0, False, True),
        ((2, 197, 3 * 24 * 3), 3, 1.0, False, False),  # rows of 216: not aligned
        ((2, 197, 192), 1, 0.0, False, False), ((2, 197, 192), 1, -1.0, False, False),
        ((2, 197, 192), 1, float("nan"), False, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_kernel_takes(shape: tuple[int, ...], heads: int, scale: float, folded: bool, taken: bool) -> None:
    assert fits(torch.empty(shape, dtype=torch.float16), heads, scale, folded) is taken


class OnCard:
    """As much of a tensor as `fits` looks at, on a card of some generation."""

    is_cuda = True

    def __init__(self, keys: int, dtype: torch.dtype = torch.bfloat16, stride: int = 192) -> None:
        self.shape, self.stride_t, self.size = (2, keys, 192), stride, dtype.itemsize

    def element_size(self) -> int:
        return self.size

    def reshape(self, *_: int) -> "OnCard":
        return self

    def stride(self, axis: int | None = None) -> object:
        return (self.stride_t, 1) if axis is None else (self.stride_t, 1)[axis]


@pytest.mark.parametrize(
    ("generation", "plain", "folded"), [(8, 224, 208), (9, 288, 288), (10, 288, 208), (12, 288, 208), (7, 0, 0)]
)
def test_a_card_takes_as_many_keys_as_its_registers_hold(
    generation: int, plain: int, folded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short, "capability", lambda _: generation)
    for keys in range(1, 300):
        qkv = OnCard(keys)
        assert fits(qkv, 1, 1.0, False) is (keys <= plain)  # type: ignore[arg-type]
        assert fits(qkv, 1, 1.0, True) is (keys <= folded)  # type: ignore[arg-type]
    for odd in (OnCard(16, torch.float32), OnCard(16, stride=200), OnCard(16, stride=1 << 27)):
        assert not fits(odd, 1, 1.0, False)  # type: ignore[arg-type]


@needs_kernel
@pytest.mark.parametrize("choice", ["short", "triton"])
@pytest.mark.parametrize(("n", "d", "queries"), [(40, 64, None), (40, 64, 2), (289, 16, None), (40, 80, None)], ids=str)
def test_a_choice_of_it_holds_where_it_can_and_else_the_kernel_with_steps_runs(
    n: int, d: int, queries: int | None, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "choose", lambda *_: choice)
    started = count_launches(monkeypatch, short, _attention_kernel)
    qkv = draw((1, n), 1, d, torch.float16)[0]
    o = packed._fastest(qkv, 1, None, queries, d**-0.5)
    taken = choice == "short" and n <= 288 and d <= 64
    assert started == ["_short_attention_kernel" if taken else "_packed_attention_kernel"]
    plain = packed_attention_ref(qkv, 1, None, queries, d**-0.5)
    assert_no_worse(o, formula(qkv, 1, queries, d**-0.5), plain)


@needs_kernel
def test_the_folded_form_takes_it_where_it_was_chosen_and_segments_never(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, short, _attention_kernel)
    qkv, row_scale, bias = draw((2, 20), 1, 16, torch.float16)
    for choice in ("short", "sdpa"):  # SDPA does not know the form
        monkeypatch.setattr(packed, "choose", lambda *_, choice=choice: choice)
        packed._fastest(qkv, 1, None, None, 1.0, row_scale, bias)
    monkeypatch.setattr(packed, "choose", lambda *_: "short")
    cu = torch.tensor([0, 5, 20], dtype=torch.int32, device=DEVICE)
    packed._fastest(qkv[0], 1, cu, None, 1.0, row_scale[0], bias, 15)
    assert started == ["_short_attention_kernel", "_packed_attention_kernel", "_packed_attention_kernel"]

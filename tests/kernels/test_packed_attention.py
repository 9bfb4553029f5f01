import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
from vtk_kernels import _attention_backward, _attention_kernel
from vtk_kernels import packed_attention as module
from vtk_kernels._attention_backward import packed_attention_backward
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels.packed_attention import packed_attention, packed_attention_ref

OPS = torch.ops.vtk_kernels
FP32 = 2e-6
"""Tolerance of attention in fp32: a logit's rounding is multiplied by its size before it is an exponent."""

MIXED = (1, 0, 50, 50, 197)
"""Lengths of segments: one token, none, a run of equal lengths, more than one step of the kernel."""


def one_image(
    qkv: Tensor, heads: int, queries: int | None, scale: float, row_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Attention of (N, 3·H·D) by its definition, head by head, with the LN-folded form unfolded first."""
    wide = qkv.double()
    wide = wide if row_scale is None else wide * row_scale.double()[:, None]
    wide = wide if bias is None else wide + bias.double()
    q, k, v = (t.unflatten(1, (heads, -1)) for t in wide.chunk(3, 1))
    logits = torch.einsum("ihd,jhd->hij", q[:queries], k) * scale
    weights = torch.exp(logits - logits.amax(-1, keepdim=True)) if logits.numel() else logits
    return torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), v).flatten(1)


def formula(
    qkv: Tensor, heads: int, queries: int | None = None, scale: float = 1.0,
    row_scale: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    scales = [None] * len(qkv) if row_scale is None else row_scale
    images = zip(qkv, scales, strict=True)
    return torch.stack([one_image(image, heads, queries, scale, s, bias) for image, s in images])


def segments_formula(
    qkv: Tensor, lengths: Sequence[int], heads: int, queries: int | None = None, scale: float = 1.0,
    row_scale: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    width = qkv.shape[1] // 3
    out = torch.zeros(
        *((len(qkv),) if queries is None else (len(lengths), queries)), width, dtype=torch.float64, device=qkv.device
    )
    for i, (first, last) in enumerate(itertools.pairwise(itertools.accumulate(lengths, initial=0))):
        if first == last:
            continue
        scales = None if row_scale is None else row_scale[first:last]
        o = one_image(qkv[first:last], heads, queries, scale, scales, bias)
        if queries is None:
            out[first:last] = o
        else:
            out[i, : len(o)] = o
    return out


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def draw(
    rows: tuple[int, ...], heads: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, row_scale, bias."""
    width = 3 * heads * d
    qkv = torch.randn(*rows, width, device=DEVICE).to(dtype)
    return qkv, torch.rand(rows, device=DEVICE) + 0.5, torch.randn(width, device=DEVICE).to(dtype)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("queries", [None, 1, 3])
def test_reference_is_the_formula(queries: int | None, folded: bool) -> None:
    qkv, row_scale, bias = (t.double().cpu() for t in draw((2, 17), 3, 8))
    more = (row_scale, bias) if folded else (None, None)
    o = packed_attention_ref(qkv, 3, None, queries, 0.3, *more)
    assert_close(o, formula(qkv, 3, queries, 0.3, *more))
    qkv, row_scale, bias = (t.double().cpu() for t in draw((sum(MIXED) + 3,), 2, 8))
    more = (row_scale, bias) if folded else (None, None)
    o = packed_attention_ref(qkv, 2, offsets(MIXED).cpu(), queries, 0.3, *more)
    assert_close(o, segments_formula(qkv, MIXED, 2, queries, 0.3, *more))


@needs_kernel
@pytest.mark.parametrize(
    "b,n,heads,d,queries",
    [
        (1, 1, 1, 8, None), (2, 17, 3, 16, None), (1, 197, 1, 64, None), (1, 130, 1, 72, None), (1, 40, 1, 128, 20),
        (2, 50, 2, 64, 1), (1, 300, 1, 64, 3), (1, 70, 1, 20, None),
    ],
    ids=str,
)  # fmt: skip
def test_kernel_is_the_formula(b: int, n: int, heads: int, d: int, queries: int | None) -> None:
    qkv, row_scale, bias = draw((b, n), heads, d)
    forms = ((None, None), (row_scale, bias), (None, bias), (row_scale, None))
    for more in forms if n < 100 else forms[:2]:
        with nan_filled():
            o = packed_attention(qkv, heads, None, queries, d**-0.5, *more, use_triton=True)
        assert o.is_contiguous()
        assert_close(o, formula(qkv, heads, queries, d**-0.5, *more), FP32)


@needs_kernel
@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("heads,d,folded", [(2, 64, True), (1, 24, False)])
def test_segments_in_the_kernel(heads: int, d: int, folded: bool, queries: int | None) -> None:
    rows = sum(MIXED) + 12  # the last rows belong to no segment
    qkv, row_scale, bias = draw((rows,), heads, d)
    more = (row_scale, bias) if folded else (None, None)
    with nan_filled():
        o = packed_attention(qkv, heads, offsets(MIXED), queries, 0.2, *more, max_seqlen=197, use_triton=True)
    assert_close(o, segments_formula(qkv, MIXED, heads, queries, 0.2, *more), FP32)
    if queries is None:
        assert not o[-12:].any()


@needs_kernel
def test_segments_without_a_token() -> None:
    qkv = draw((0,), 2, 8)[0]
    for queries, shape in ((None, (0, 16)), (2, (3, 2, 16))):
        with nan_filled():
            o = packed_attention(qkv, 2, offsets((0, 0, 0)), queries, max_seqlen=0, use_triton=True)
        assert o.shape == shape and not o.any()
        assert packed_attention(qkv, 2, offsets((0, 0, 0)), queries).shape == shape
    assert packed_attention(draw((0, 5), 2, 8)[0], 2, use_triton=True).shape == (0, 5, 16)


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype) -> None:
    for n, heads, d in ((197, 1, 64), (70, 2, 80), (20, 2, 64)):
        qkv, row_scale, bias = draw((2, n), heads, d, dtype)
        o = packed_attention(qkv, heads, None, None, d**-0.5, use_triton=True)
        assert o.dtype == dtype
        assert_no_worse(o, formula(qkv, heads, None, d**-0.5), packed_attention_ref(qkv, heads, None, None, d**-0.5))
        o = packed_attention(qkv, heads, None, None, d**-0.5, row_scale, bias, use_triton=True)
        plain = packed_attention_ref(qkv * row_scale[..., None].to(dtype) + bias, heads, None, None, d**-0.5)
        assert_no_worse(o, formula(qkv, heads, None, d**-0.5, row_scale, bias), plain)


@needs_kernel
def test_large_logits_do_not_overflow() -> None:
    # logits beyond ±1000: e to their power is inf; many heads, since one is a matter of how its largest two round
    qkv = draw((2, 80), 4, 32)[0] * 8
    for longer in (qkv, torch.cat([qkv] * 4, 1)):
        plain = packed_attention_ref(longer, 4)
        assert_no_worse(packed_attention(longer, 4, use_triton=True), formula(longer, 4), plain)


@needs_kernel
def test_strided_operands() -> None:
    qkv, row_scale, bias = draw((2, 9), 2, 16)
    expected = formula(qkv, 2, None, 1.0, row_scale, bias)
    views = (qkv.transpose(0, 1).contiguous().transpose(0, 1), strided(qkv), torch.cat([qkv, qkv], -1)[..., :96])
    for view in views:
        o = packed_attention(view, 2, row_scale=strided(row_scale), bias=strided(bias), use_triton=True)
        assert_close(o, expected)
    o = packed_attention(
        strided(qkv[0]), 2, torch.stack([offsets((4, 5))] * 2, -1)[:, 0], max_seqlen=5, use_triton=True
    )
    assert_close(o, segments_formula(qkv[0], (4, 5), 2))


@needs_kernel
@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 20)),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_any_segments(
    lengths: list[int], heads: int, d: int, queries: int | None, folded: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(sum(lengths) * 41 + d)
    qkv, row_scale, bias = draw((sum(lengths) + 2,), heads, d, dtype)
    more = (row_scale, bias) if folded else (None, None)
    with nan_filled():
        o = packed_attention(
            qkv, heads, offsets(lengths), queries, d**-0.5, *more, max_seqlen=max(lengths), use_triton=True
        )
    expected = segments_formula(qkv, lengths, heads, queries, d**-0.5, *more)
    assert error(o, expected) <= (FP32 if dtype == torch.float32 else 4e-3)


@needs_kernel
def test_one_launch_whatever_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _attention_kernel)
    qkv, row_scale, bias = draw((2, 5), 1, 8)
    packed_attention(qkv, 1, use_triton=True)
    packed_attention(qkv, 1, None, 1, 1.0, row_scale, bias, use_triton=True)
    packed_attention(qkv[0], 1, offsets((2, 3)), max_seqlen=3, use_triton=True)
    assert len(started) == 3 * LAUNCHES["packed_attention"]


@pytest.mark.parametrize(
    "more,expected",
    [
        ({}, "sdpa"),
        ({"num_queries": 1}, "sdpa"),
        ({"row_scale": torch.ones(2, 4)}, "kernel"),
        ({"bias": torch.ones(3 * 64)}, "kernel"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32), "max_seqlen": 4}, "kernel"),
    ],
)
def test_choice_on_the_card(more: dict[str, object], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "launch", lambda *_: "kernel")
    monkeypatch.setattr(module, "_attend", lambda *_: torch.tensor(1.0))
    qkv = torch.ones(4, 3 * 64) if "cu_seqlens" in more else torch.ones(2, 4, 3 * 64)
    assert (module._fastest(qkv, 1, **more) == "kernel") == (expected == "kernel")


def test_choice_follows_the_table_for_heads_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(op: str, rows: int, n: int, k: int, dtype: torch.dtype, name: str | None) -> str:
        asked.append((op, rows, n, k, dtype, name))
        return "triton" if name == "card" else "sdpa"

    monkeypatch.setattr(module, "choose", choose)
    monkeypatch.setattr(module, "device_name", lambda _: "card")
    monkeypatch.setattr(module, "launch", lambda *_: "kernel")
    assert module._fastest(torch.ones(2, 4, 3 * 64 * 5), 5) == "kernel"
    assert asked == [("packed_attention", 2, 4, 5, torch.float32, "card")]
    assert module._fastest(torch.ones(2, 4, 3 * 32 * 5), 5) != "kernel"
    assert module._fastest(torch.ones(2, 4, 3 * 64 * 5), 5, None, 1) != "kernel"


def test_gradients_are_those_of_the_formula() -> None:
    qkv, row_scale, bias = (t.double().cpu().requires_grad_() for t in draw((2, 4), 2, 3))
    cu = torch.tensor([0, 1, 1, 6], dtype=torch.int32)

    def images(qkv: Tensor, row_scale: Tensor, bias: Tensor) -> Tensor:
        return OPS.packed_attention(qkv, 2, None, 3, 0.5, row_scale, bias)

    def packed(qkv: Tensor, bias: Tensor) -> Tensor:
        return OPS.packed_attention(qkv.flatten(0, 1), 2, cu, None, 0.5, None, bias, 5)

    assert torch.autograd.gradcheck(images, (qkv, row_scale, bias))
    assert torch.autograd.gradcheck(packed, (qkv, bias))
    assert torch.autograd.gradcheck(lambda t: OPS.packed_attention(t[0], 2, cu[:3], 2), (qkv,))
    assert torch.autograd.gradcheck(lambda qkv: OPS.packed_attention(qkv, 2), (qkv,))
    g = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = torch.autograd.grad(formula(qkv, 2, 3, 0.5, row_scale, bias), (qkv, row_scale, bias), g)
    for found, wanted in zip(
        torch.autograd.grad(images(qkv, row_scale, bias), (qkv, row_scale, bias), g), expected, strict=True
    ):
        assert_close(found, wanted)


def test_gradient_of_a_large_batch_comes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, g = torch.randn(5, 4, 24, dtype=torch.float64), torch.randn(5, 4, 8, dtype=torch.float64)
    arguments = (g, qkv, 2, None, None, 0.5, None, None)
    whole = OPS.packed_attention_backward(*arguments)[0]
    monkeypatch.setattr(_attention_backward, "LOGITS", 2 * 4 * 4 * 2)
    assert_close(OPS.packed_attention_backward(*arguments)[0], whole)


NO_KERNEL = ("aten::_unsafe_view", "aten::new_empty", "aten::promote_types")


def test_gradient_starts_as_many_kernels_as_declared() -> None:
    class Count(TorchDispatchMode):
        started = 0

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.started += not (f.is_view or f.name() in NO_KERNEL)
            return f(*args, **(kwargs or {}))

    qkv, g = torch.randn(2, 4, 24).half(), torch.randn(2, 4, 8).half()
    with Count() as count:
        packed_attention_backward._init_fn(g, qkv, 2, None, None, 0.5, None, None)
    assert count.started == LAUNCHES["packed_attention_backward"]


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operators_keep_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    qkv, row_scale, bias = (t.cpu() for t in draw((2, 5), 2, 8, dtype))
    leaf = [t.clone().requires_grad_() for t in (qkv, row_scale, bias)]
    op, cu = OPS.packed_attention.default, torch.tensor([0, 2, 9], dtype=torch.int32)
    torch.library.opcheck(op, (leaf[0], 2, None, None, 0.5, *leaf[1:]), test_utils=checks)
    for operands in (
        (strided(qkv), 2, None, 3),
        (qkv.flatten(0, 1), 2, cu, None, 1.0, None, None, 7),
        (qkv.flatten(0, 1), 2, cu, 4, 1.0, None, bias),
    ):
        torch.library.opcheck(op, operands, test_utils="test_faketensor")
    g = torch.randn(2, 5, 16).to(dtype)
    for more in ((None, None), (row_scale, bias)):
        operands = (g, strided(qkv), 2, None, None, 0.5, *more)
        torch.library.opcheck(OPS.packed_attention_backward.default, operands, test_utils="test_faketensor")


def test_compiles_without_a_break() -> None:
    qkv, row_scale, bias = (t.float().cpu().requires_grad_() for t in draw((2, 5), 2, 8))
    cu = torch.tensor([0, 4, 4, 9], dtype=torch.int32)

    def step(qkv: Tensor, row_scale: Tensor, bias: Tensor, cu: Tensor) -> Tensor:
        o = OPS.packed_attention(qkv * 2, 2, None, None, 0.5, row_scale, bias)
        return (o**2).sum() + (packed_attention(qkv.flatten(0, 1), 2, cu) ** 2).sum()  # lengths are read inside the op

    torch.compile(step, fullgraph=True, backend="aot_eager")(qkv, row_scale, bias, cu).backward()
    wide = [t.detach().double().requires_grad_() for t in (qkv, row_scale, bias)]
    loss = (formula(2 * wide[0], 2, None, 0.5, *wide[1:]) ** 2).sum()
    loss = loss + (segments_formula(wide[0].flatten(0, 1), (4, 0, 5), 2) ** 2).sum()
    for found, expected in zip((qkv, row_scale, bias), torch.autograd.grad(loss, wide), strict=True):
        assert found.grad is not None
        assert_close(found.grad, expected, 5e-6)


ONES, INTS = torch.ones, torch.tensor([0, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((ONES(2, 4, 24), 5), r"`num_heads` \(5\) must split the 24 columns"),
        ((ONES(2, 4, 24), 0), r"`num_heads` \(0\)"),
        ((ONES(2, 4, 3 * 130), 1), "at most 128 channels"),
        ((ONES(4, 24), 2), r"`qkv` is \(4, 24\); it must be \(B, N, 3·H·D\)"),
        ((ONES(2, 4, 24), 2, INTS), r"`qkv` is \(2, 4, 24\); it must be \(T, 3·H·D\) with"),
        ((ONES(4, 24), 2, INTS.long()), r"`cu_seqlens` is \(2,\) torch.int64; it must be \(S \+ 1,\) torch.int32"),
        ((ONES(4, 24), 2, INTS[:0]), r"`cu_seqlens` is \(0,\)"),
        ((ONES(4, 24), 2, INTS.to("meta")), "`cu_seqlens` is on meta; it must be on the device of `qkv`, cpu"),
        ((ONES(2, 4, 24), 2, None, 5), r"`num_queries` \(5\) must be from 1 to the number of tokens, 4"),
        ((ONES(4, 24), 2, INTS, 0), r"`num_queries` \(0\)"),
        ((ONES(2, 4, 24), 2, None, None, 1.0, ONES(2)), r"`row_scale` is \(2,\) torch.float32; it must be \(2, 4\)"),
        ((ONES(2, 4, 24), 2, None, None, 1.0, None, ONES(8)), r"`bias` is \(8,\) torch.float32; it must be \(24,\)"),
        ((ONES(2, 4, 24).int(), 2), "`qkv` must be floating point"),
        ((ONES(4, 24), 2, INTS.flip(0)), r"`cu_seqlens` \(\[2, 0\]\) must ascend from 0 to at most 4"),
        ((ONES(1, 24), 2, INTS), r"must ascend from 0 to at most 1, the number of rows"),
        ((ONES(4, 24), 2, INTS, None, 1.0, None, None, 1), r"`max_seqlen` \(1\) is less than the longest segment, 2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Tensor, int], said: str) -> None:
    for run in (packed_attention, OPS.packed_attention):
        if run is packed_attention or "meta" not in said:
            with pytest.raises(ValueError, match=said):
                run(*arguments)


def test_card_needs_the_longest_length() -> None:
    class OnCard:
        is_cuda = True

    with pytest.raises(ValueError, match="`max_seqlen` is needed with `cu_seqlens` on CUDA"):
        _attention_kernel.launch(OnCard(), 1, INTS)  # type: ignore[arg-type]

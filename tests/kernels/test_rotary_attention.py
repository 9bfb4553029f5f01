"""`packed_attention` with prepared heads: rotation, norms, fewer keys, additive bias."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from timm.layers import AttentionRope, LayerNorm, RmsNorm
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels._cases import (
    ALL,
    DEVICE,
    HALF,
    assert_close,
    assert_no_worse,
    count_launches,
    nan_filled,
    needs_kernel,
    strided,
)
from tests.kernels.test_packed_attention import NO_KERNEL, offsets
from vtk_kernels import _heads_kernel, _rotary_attention, _rotary_backward, _rotary_operator
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels._heads import HeadNorms, Heads
from vtk_kernels._rotary_operator import flat
from vtk_kernels.packed_attention import packed_attention, packed_attention_ref

OPS = torch.ops.vtk_kernels
FP32 = 2e-6
EPS = 1e-3  # large enough to be seen in fp32


def turned(x: Tensor, rope: Tensor, half: bool) -> Tensor:
    """x (N, D) by complex numbers, one per pair: times cos + i sin."""
    first, second = x.chunk(2, 1) if half else (x[:, ::2], x[:, 1::2])
    cos, sin = rope.double().chunk(2, 1)
    out = torch.complex(first, second) * torch.complex(cos, sin)
    return torch.cat([out.real, out.imag], 1) if half else torch.view_as_real(out).flatten(1)


def normed(x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x - x.mean(1, keepdim=True) if kind == "layer" else x
    x = x / torch.sqrt((x * x).mean(1, keepdim=True) + EPS)
    x = x if weight is None else x * weight.double()
    return x if bias is None else x + bias.double()


def one_image(
    qkv: Tensor, heads: Heads, queries: int | None, scale: float, row: Tensor | None, slot: int | None,
    row_scale: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of (N, (H + 2·Hkv)·D) by its definition, head by head."""
    wide = qkv.double() if row_scale is None else qkv.double() * row_scale.double()[:, None]
    wide = wide if bias is None else wide + bias.double()
    h, kv, norm = heads.num_heads, heads.num_kv_heads, heads.qk_norm
    parts, out = wide.unflatten(1, (h + 2 * kv, -1)).unbind(1), []

    def of(t: Tensor | None, i: int) -> Tensor | None:
        return None if t is None else t[i] if slot is None else t[slot, i]

    for i in range(h):
        j = i * kv // h
        q, k, v = parts[i], parts[h + j], parts[h + kv + j]
        if norm is not None:
            q = normed(q, norm.kind, of(norm.q_weight, i), of(norm.q_bias, i))
            k = normed(k, norm.kind, of(norm.k_weight, j), of(norm.k_bias, j))
        if heads.rope is not None:
            table = heads.rope if heads.rope.ndim == 2 else heads.rope[i]
            table = table[: len(qkv)] if row is None else table[row.long()]
            q, k = turned(q, table, heads.rotate_half), turned(k, table, heads.rotate_half)
        z = q[:queries] @ k.T * scale
        z = z if heads.attn_bias is None else z + heads.attn_bias[i, : len(z), : len(k)].double()
        out.append(torch.softmax(z, 1) @ v)
    return torch.cat(out, 1)


def formula(
    qkv: Tensor, heads: Heads, lengths: Sequence[int] | None = None, queries: int | None = None, scale: float = 1.0,
    row_scale: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of (B, N, C), or of segments of (T, C)."""
    slot = None if heads.qk_norm is None else heads.qk_norm.slot
    if lengths is None:
        rows, scales = ([None] * len(qkv) if t is None else list(t) for t in (heads.rope_row, row_scale))
        slots = [None] * len(qkv) if slot is None else slot.tolist()
        images = zip(qkv, rows, slots, scales, strict=True)
        return torch.stack([one_image(x, heads, queries, scale, r, s, f, bias) for x, r, s, f in images])
    width = qkv.shape[1] // heads.parts * heads.num_heads
    shape = (len(qkv), width) if queries is None else (len(lengths), queries, width)
    out = torch.zeros(shape, dtype=torch.float64, device=qkv.device)
    for i, (first, last) in enumerate(itertools.pairwise(itertools.accumulate(lengths, initial=0))):
        if first == last:
            continue
        row, factor = (None if t is None else t[first:last] for t in (heads.rope_row, row_scale))
        o = one_image(qkv[first:last], heads, queries, scale, row, None if slot is None else int(slot[i]), factor, bias)
        if queries is None:
            out[first:last] = o
        else:
            out[i, : len(o)] = o
    return out


def angles(*shape: int, prefix: int = 1) -> Tensor:
    """A table (..., R, D) of random angles whose first rows do not turn."""
    *front, d = shape
    turn = torch.randn(*front, d // 2, dtype=torch.float64, device=DEVICE) * 3
    turn[..., :prefix, :] = 0
    return torch.cat([turn.cos(), turn.sin()], -1).float()


def norms(kind: Any, h: int, kv: int, d: int, slots: int = 0, images: int = 0) -> HeadNorms:
    front = (slots,) if slots else ()
    q_weight, q_bias, k_weight, k_bias = (torch.randn(*front, n, d, device=DEVICE) for n in (h, h, kv, kv))
    slot = torch.randint(slots, (images,), device=DEVICE).int() if slots else None
    return HeadNorms(kind, EPS, q_weight, q_bias if kind == "layer" else None, k_weight, k_bias, slot)


def cast(heads: Heads, dtype: torch.dtype) -> Heads:
    """Tensors in another type, integers excepted."""

    def to(t: Any) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t

    norm = None if heads.qk_norm is None else HeadNorms(*map(to, heads.qk_norm))
    return Heads(*(norm if isinstance(field, HeadNorms) else to(field) for field in heads))


def named(heads: Heads) -> dict[str, Any]:
    """The keyword arguments of `packed_attention`."""
    return {name: value for name, value in heads._asdict().items() if name != "num_heads"}


def run(qkv: Tensor, heads: Heads, *more: Any, **others: Any) -> Tensor:
    return packed_attention(qkv, heads.num_heads, *more, **named(heads), **others)


def draw(rows: tuple[int, ...], h: int, kv: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, row_scale, bias."""
    width = (h + 2 * kv) * d
    return (
        torch.randn(*rows, width, device=DEVICE), torch.rand(rows, device=DEVICE) + 0.5,
        torch.randn(width, device=DEVICE),
    )  # fmt: skip


def timm_table(embedding: Tensor, prefix: int, half: bool) -> Tensor:
    """timm's (..., N, 2·D), sin and cos repeated for their pairs, as a table with rows for prefix tokens."""
    sin, cos = embedding.chunk(2, -1)
    sin, cos = (t.chunk(2, -1)[0] if half else t[..., ::2] for t in (sin, cos))
    front = (*cos.shape[:-2], prefix, cos.shape[-1])
    return torch.cat([torch.cat([t.new_full(front, f), t], -2) for t, f in ((cos, 1.0), (sin, 0.0))], -1)


@pytest.mark.parametrize("half", [False, True], ids=["interleaved", "half"])
@pytest.mark.parametrize(("h", "kv"), [(3, 3), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("norm", [None, LayerNorm, RmsNorm])
def test_reference_is_timms_attention(norm: Any, h: int, kv: int, half: bool) -> None:
    more = {"num_prefix_tokens": 3, "norm_layer": norm, "qk_norm": norm is not None, "rotate_half": half}
    kinds: list[Any] = [AttentionRope(h * 8, h, qkv_fused=False, num_kv_heads=kv, **more)]
    if h == kv:
        kinds.append(EvaAttention(h * 8, h, scale_norm=False, **more))
    for attn in kinds:
        attn = attn.double()
        for p in attn.parameters():
            nn.init.normal_(p)
        turn = torch.randn(*((h,) if h == kv else ()), 14, 4, dtype=torch.float64)
        turn = torch.cat([turn, turn], -1) if half else turn.repeat_interleave(2, -1)
        embedding, x = torch.cat([turn.sin(), turn.cos()], -1), torch.randn(2, 17, h * 8, dtype=torch.float64)
        qk_norm = None
        if norm is not None:
            w = [
                None if t is None else t.expand(n, 8)
                for a, n in ((attn.q_norm, h), (attn.k_norm, kv))
                for t in (a.weight, getattr(a, "bias", None))
            ]
            qk_norm = HeadNorms("layer" if norm is LayerNorm else "rms", attn.q_norm.eps, *w)
        if attn.qkv is None:
            qkv = torch.cat([attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)], -1)
        else:
            qkv = attn.qkv(x) + torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        heads = Heads(h, kv, timm_table(embedding, 3, half), half, None, qk_norm)
        assert_close(attn.proj(run(qkv, heads, scale=8**-0.5)), attn(x, rope=embedding), 1e-14)


SEGMENTS = (1, 0, 9, 9, 70)


def everything(rows: int, h: int, kv: int, d: int, half: bool, kind: str, segments: bool) -> Heads:
    """All parts at once; segments have rows of a longer table and norms of their own."""
    if segments:
        row = torch.randint(90, (rows,), device=DEVICE).int()
        norm = norms(kind, h, kv, d, 3, len(SEGMENTS))
        return Heads(h, kv, angles(90, d), half, row, norm, torch.randn(h, 72, 72, device=DEVICE))
    table = angles(h, rows, d) if h == kv else angles(rows + 2, d)
    return Heads(h, kv, table, half, None, norms(kind, h, kv, d), torch.randn(h, rows, rows, device=DEVICE))


@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize(("h", "kv", "half", "kind"), [(4, 2, True, "layer"), (3, 3, False, "rms")], ids=str)
def test_reference_is_the_formula(h: int, kv: int, half: bool, kind: str, queries: int | None) -> None:
    for segments in (False, True):
        rows = (sum(SEGMENTS) + 3,) if segments else (2, 9)
        qkv, row_scale, bias = (t.double().cpu() for t in draw(rows, h, kv, 6))
        heads = cast(everything(rows[-1], h, kv, 6, half, kind, segments), torch.float64)
        cu = offsets(SEGMENTS) if segments else None
        for more in ((None, None), (row_scale, bias)):
            o = packed_attention_ref(qkv, h, cu, queries, 0.3, *more, **named(heads))
            assert_close(o, formula(qkv, heads, SEGMENTS if segments else None, queries, 0.3, *more))


@needs_kernel
@pytest.mark.parametrize(
    ("n", "h", "kv", "d", "half", "kind"),
    [
        (70, 1, 1, 64, True, None), (70, 1, 1, 64, False, None), (19, 4, 2, 24, True, "rms"),
        (19, 3, 3, 10, False, "layer"), (9, 1, 1, 88, False, None), (1, 1, 1, 8, True, "layer"),
        (40, 2, 1, 128, True, None),
    ],
    ids=str,
)  # fmt: skip
def test_kernel_is_the_formula(n: int, h: int, kv: int, d: int, half: bool, kind: str | None) -> None:
    qkv, row_scale, bias = draw((2, n), h, kv, d)
    heads = everything(n, h, kv, d, half, kind or "rms", False)
    heads = heads if kind else heads._replace(qk_norm=None, attn_bias=None)
    for queries, more in ((None, (None, None)), (min(n, 3), (row_scale, bias))):
        with nan_filled():
            o = run(qkv, heads, None, queries, d**-0.5, *more, use_triton=True)
        assert o.is_contiguous()
        assert_close(o, formula(qkv, heads, None, queries, d**-0.5, *more), FP32)


@needs_kernel
@pytest.mark.parametrize(
    "part", ["grouped", "norm without k", "norm without q", "bare norm", "rows of a table", "bias"]
)
def test_each_part_alone_in_the_kernel(part: str) -> None:
    norm = norms("layer", 2, 2, 16)
    heads = {
        "norm without k": Heads(2, 2, None, False, None, norm._replace(q_bias=None, k_weight=None, k_bias=None)),
        "norm without q": Heads(2, 2, None, False, None, norm._replace(q_weight=None, q_bias=None, k_bias=None)),
        "bare norm": Heads(2, 2, None, False, None, HeadNorms("rms", EPS)),
        "rows of a table": Heads(2, 2, angles(40, 16), True, torch.randint(40, (1, 20), device=DEVICE).int()),
        "bias": Heads(2, 2, attn_bias=torch.randn(2, 24, 24, device=DEVICE).half().transpose(1, 2)),
        "grouped": Heads(4, 2),
    }[part]
    d = 9 if part == "grouped" else 16  # an odd number of channels, where nothing is turned
    qkv, row_scale, bias = draw((1, 20), heads.num_heads, heads.num_kv_heads, d)
    for more in ((row_scale, None), (None, bias)):
        o = run(qkv, heads, None, None, 0.25, *more, use_triton=True)
        assert_close(o, formula(qkv, heads, None, None, 0.25, *more), FP32)


@needs_kernel
@pytest.mark.parametrize(("queries", "half", "folded"), [(None, True, False), (3, False, True)], ids=str)
def test_segments_in_the_kernel(queries: int | None, half: bool, folded: bool) -> None:
    rows = sum(SEGMENTS) + 5  # the last rows belong to no segment
    qkv, row_scale, bias = draw((rows,), 2, 1, 16)
    heads = everything(rows, 2, 1, 16, half, "layer", True)
    more = (row_scale, bias) if folded else (None, None)
    with nan_filled():
        o = run(qkv, heads, offsets(SEGMENTS), queries, 0.2, *more, max_seqlen=70, use_triton=True)
    assert_close(o, formula(qkv, heads, SEGMENTS, queries, 0.2, *more), FP32)


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype) -> None:
    for half, kind, n in ((True, "rms", 40), (False, "layer", 20)):
        qkv, row_scale, bias = (t if t.ndim == 2 else t.to(dtype) for t in draw((1, n), 2, 2, 32))
        heads = everything(n, 2, 2, 32, half, kind, False)
        heads = heads._replace(attn_bias=heads.attn_bias.to(dtype))
        for more in ((None, None), (row_scale, bias)) if half else ((row_scale, bias),):
            o = run(qkv, heads, None, None, 0.125, *more, use_triton=True)
            plain = packed_attention_ref(qkv, 2, None, None, 0.125, *more, **named(heads))
            assert o.dtype == dtype
            assert_no_worse(o, formula(qkv, heads, None, None, 0.125, *more), plain)


@needs_kernel
def test_keys_that_a_bias_of_minus_infinity_hides_count_for_nothing() -> None:
    qkv = draw((1, 80), 1, 1, 16)[0]
    hidden = torch.zeros(1, 80, 80, device=DEVICE)
    hidden[:, :, :70] = -torch.inf  # more than the first step of the kernel has
    o = run(qkv, Heads(1, 1, attn_bias=hidden), scale=0.25, use_triton=True)
    q, k, v = qkv.double().chunk(3, -1)
    assert_close(o, torch.softmax(q @ k[:, 70:].mT * 0.25, -1) @ v[:, 70:], FP32)


@needs_kernel
def test_strided_operands_and_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _rotary_attention)
    qkv, row_scale, bias = draw((2, 9), 2, 2, 16)
    heads = everything(9, 2, 2, 16, False, "layer", False)
    expected = formula(qkv, heads, None, None, 1.0, row_scale, bias)
    assert heads.qk_norm is not None
    loose = Heads(
        2, 2, strided(heads.rope), False, None,
        HeadNorms(*(strided(t) if isinstance(t, Tensor) else t for t in heads.qk_norm)), strided(heads.attn_bias),
    )  # fmt: skip
    for view in (qkv.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([qkv, qkv], -1)[..., :96]):
        o = run(view, loose, row_scale=strided(row_scale), bias=strided(bias), use_triton=True)
        assert_close(o, expected, FP32)
    assert len(started) == 2 * LAUNCHES["rotary_attention"]


@needs_kernel
@pytest.mark.parametrize(
    ("h", "kv", "half", "kind", "part"),
    [(2, 2, True, "layer", "slots"), (4, 2, False, "rms", "pooled"), (2, 2, False, None, ""), (3, 1, True, None, "")],
    ids=str,
)  # fmt: skip
def test_sdpa_behind_the_kernel_that_prepares_heads_is_the_formula(
    h: int, kv: int, half: bool, kind: str | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = count_launches(monkeypatch, _heads_kernel)
    qkv, row_scale, bias = draw((2, 70), h, kv, 12)
    heads = everything(70, h, kv, 12, half, kind or "rms", False)
    if part == "slots":  # rows of a longer table, and norms of an image's own
        row = torch.randint(90, (2, 70), device=DEVICE).int()
        heads = heads._replace(rope=angles(90, 12), rope_row=row, qk_norm=norms("layer", h, kv, 12, 3, 2))
    heads = heads if kind else heads._replace(qk_norm=None, attn_bias=None)
    queries = 3 if part == "pooled" else None
    for more in ((None, None), (row_scale, bias)):
        with nan_filled():
            o = _rotary_operator.behind(qkv, heads, queries, 0.25, *more)
        assert o.is_contiguous()
        assert_close(o, formula(qkv, heads, None, queries, 0.25, *more), FP32)
    assert started == ["_prepare_heads_kernel"] * 2


def test_what_runs_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rotary_operator, "launch", lambda *_: "kernel")
    monkeypatch.setattr(_rotary_operator, "behind", lambda *_: "sdpa")
    asked = []

    def choose(*question: Any) -> str:
        asked.append(question)
        return "sdpa" if question[-1] == "card" else "triton"

    monkeypatch.setattr(_rotary_operator, "choose", choose)
    monkeypatch.setattr(_rotary_operator, "device_name", lambda _: "card")

    def kernel(heads: Heads, d: int = 64, *more: Any) -> bool:
        return _rotary_operator.fastest(torch.ones(2, 4, heads.parts * d), heads, *more) == "kernel"

    rope, norm = torch.ones(4, 64), HeadNorms("rms", EPS)
    assert not kernel(Heads(5, 5, rope)) and asked == [("rotary_attention", 2, 4, 5, torch.float32, "card")]
    assert kernel(Heads(5, 5), 64, None, None, 1.0, torch.ones(2, 4))  # without another part it is the packed kernel's
    assert kernel(Heads(5, 5, rope), 64, None, 1) and kernel(Heads(5, 5, rope), 32) and kernel(Heads(4, 2, rope))
    assert not kernel(Heads(5, 5, rope, qk_norm=norm)) and kernel(Heads(4, 2))
    bias = torch.ones(5, 9, 9)  # which SDPA would copy: 2 · 5 · 16 elements beside 2 · 4 · 5 · 4 · 4 + 5 · 16
    assert kernel(Heads(5, 5, attn_bias=bias), 4) and not kernel(Heads(5, 5, attn_bias=bias))
    assert kernel(Heads(5, 5, attn_bias=torch.ones(5, 8, 8).half()), 4)
    padded = torch.empty(5, 16, 16)[:, :9, :9]
    assert not kernel(Heads(5, 5, attn_bias=padded), 4)
    assert kernel(Heads(5, 5, attn_bias=padded), 4, torch.tensor([0, 4], dtype=torch.int32))


def with_leaves(heads: Heads, rope: Tensor, attn_bias: Tensor, *weights: Tensor) -> Heads:
    """The same heads around other tensors; a norm's weights that are None stay."""
    assert heads.qk_norm is not None
    given = iter(weights)
    of_norm = (None if t is None else next(given) for t in heads.qk_norm[2:6])
    norm = HeadNorms(*heads.qk_norm[:2], *of_norm, heads.qk_norm.slot)
    return heads._replace(rope=rope, qk_norm=norm, attn_bias=attn_bias)


def leaves_of(heads: Heads, *first: Tensor) -> list[Tensor]:
    """qkv, row scale and bias, then the tensors that `with_leaves` takes, in fp64 on the CPU, as leaves."""
    assert heads.qk_norm is not None
    tensors = (*first, heads.rope, heads.attn_bias, *(t for t in heads.qk_norm[2:6] if t is not None))
    return [t.detach().double().cpu().requires_grad_() for t in tensors if t is not None]


@pytest.mark.parametrize(
    ("h", "kv", "half", "kind", "lengths", "queries"),
    [
        (2, 1, True, "layer", None, 2), (2, 2, False, "rms", None, None), (2, 2, True, "layer", (1, 0, 2, 2), None),
        (2, 1, False, "layer", (1, 0, 2, 2), 2),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_those_of_the_formula(
    h: int, kv: int, half: bool, kind: str, lengths: tuple[int, ...] | None, queries: int | None
) -> None:
    rows = (2, 3) if lengths is None else (6,)
    heads = everything(rows[-1], h, kv, 4, half, kind, False)
    if lengths is not None:
        row, norm = torch.tensor([0, 1, 2, 4, 3, 1]).int(), norms(kind, h, kv, 4, 2, 4)
        heads = heads._replace(rope_row=row, qk_norm=norm._replace(slot=norm.slot.cpu()))  # type: ignore[union-attr]
    leaves = leaves_of(heads, *draw(rows, h, kv, 4))
    cu = None if lengths is None else offsets(lengths).cpu()
    mine = with_leaves(heads, *leaves[3:])
    o = OPS.rotary_attention(leaves[0], cu, queries, 0.5, leaves[1], leaves[2], 2, h, *flat(mine))
    expected = formula(leaves[0], mine, lengths, queries, 0.5, leaves[1], leaves[2])
    assert_close(o, expected.detach())
    g = torch.randn_like(o)
    wanted = torch.autograd.grad(expected, leaves, g)
    for found, gradient in zip(torch.autograd.grad(o, leaves, g), wanted, strict=True):
        assert_close(found, gradient, 1e-12)
    frozen = with_leaves(heads, *(t.detach() for t in leaves[3:]))
    o = OPS.rotary_attention(leaves[0], cu, queries, 0.5, leaves[1], leaves[2], 2, h, *flat(frozen))
    assert_close(torch.autograd.grad(o, leaves[0], g)[0], wanted[0], 1e-12)


def test_gradient_of_a_large_batch_comes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, _, _, *others = leaves_of(everything(4, 2, 2, 4, True, "rms", False), *draw((5, 4), 2, 2, 4))
    heads = with_leaves(everything(4, 2, 2, 4, True, "rms", False), *others)
    g = torch.randn(5, 4, 8, dtype=torch.float64)
    arguments = (g, qkv.detach(), None, None, 0.5, None, None, None, 2, *flat(heads), [0, 9, 14, 16, 19])
    whole = OPS.rotary_attention_backward(*arguments)
    monkeypatch.setattr(_rotary_backward, "LOGITS", 2 * 4 * 4 * 2)
    for found, wanted in zip(OPS.rotary_attention_backward(*arguments), whole, strict=True):
        assert_close(found, wanted)


def test_gradient_starts_as_many_kernels_as_declared() -> None:
    class Count(TorchDispatchMode):
        started = 0

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.started += not (f.is_view or f.name() in NO_KERNEL)
            return f(*args, **(kwargs or {}))

    qkv, g, heads = torch.randn(2, 4, 24).half(), torch.randn(2, 4, 8).half(), Heads(2, 2, angles(4, 4).cpu(), True)
    with Count() as count:
        _rotary_backward.backward(g, qkv, heads, None, None, 0.5, None, None)
    assert count.started == LAUNCHES["rotary_attention_backward"]


@pytest.mark.parametrize(
    ("dtype", "checks"), [(torch.bfloat16, "test_faketensor"), (torch.float32, ALL)], ids=["bfloat16", "float32"]
)
def test_operator_keeps_torchs_contract(dtype: torch.dtype, checks: Any) -> None:
    heads = everything(5, 2, 2, 8, False, "layer", False)
    heads = Heads(*(field.cpu() if isinstance(field, Tensor) else field for field in heads))
    assert heads.qk_norm is not None
    heads = heads._replace(qk_norm=HeadNorms(*(t.cpu() if isinstance(t, Tensor) else t for t in heads.qk_norm)))
    qkv, row_scale, bias = (t.cpu() for t in draw((2, 5), 2, 2, 8))
    leaf = [t.clone().requires_grad_() for t in (qkv.to(dtype), row_scale, bias)]
    torch.library.opcheck(
        OPS.rotary_attention.default, (leaf[0], None, 3, 0.5, *leaf[1:], None, 2, *flat(heads)), test_utils=checks
    )
    cu = torch.tensor([0, 2, 9], dtype=torch.int32)
    packed = (qkv.to(dtype).flatten(0, 1), cu, None, 1.0, None, None, 7, 2, *flat(heads._replace(attn_bias=None)))
    g, wanted = torch.randn(10, 16).to(dtype), [0, 9, 14, 15, 16, 17]
    wide = heads._replace(rope=angles(7, 8).cpu(), attn_bias=None)
    packed = (*packed[:7], 2, *flat(wide))
    torch.library.opcheck(OPS.rotary_attention.default, packed, test_utils="test_faketensor")
    torch.library.opcheck(OPS.rotary_attention_backward.default, (g, *packed, wanted), test_utils="test_faketensor")


def test_compiles_without_a_break() -> None:
    heads, cu = Heads(2, 1, angles(6, 8).cpu(), True), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    qkv = draw((2, 5), 2, 1, 8)[0].cpu().requires_grad_()

    def step(qkv: Tensor, cu: Tensor) -> Tensor:
        found: Tensor = (run(qkv, heads) ** 2).sum() + (run(qkv.flatten(0, 1), heads, cu) ** 2).sum()
        return found

    torch.compile(step, fullgraph=True, backend="aot_eager")(qkv, cu).backward()
    wide = qkv.detach().double().requires_grad_()
    loss = (formula(wide, heads) ** 2).sum() + (formula(wide.flatten(0, 1), heads, (4, 0, 5)) ** 2).sum()
    assert_close(qkv.grad, torch.autograd.grad(loss, wide)[0], 1e-5)


QKV = torch.zeros(2, 5, 3 * 2 * 8)
NORM = HeadNorms("layer", EPS, torch.ones(2, 8))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"num_kv_heads": 3}, "`num_kv_heads` (3) must divide `num_heads` (2)"),
        ({"num_kv_heads": 0}, "`num_kv_heads` (0) must divide"),
        ({"num_kv_heads": 1, "qkv": QKV[..., :30]}, "must split the 30 columns"),
        ({"rope": torch.zeros(4, 8)}, "`rope` has 4 rows; 5 tokens need one each, or `rope_row`"),
        (
            {"rope": torch.zeros(5, 16)},
            "`rope` is (5, 16) torch.float32; it must be (R, 8) torch.float32, or (2, R, 8)",
        ),
        ({"rope": torch.zeros(5, 8).half()}, "torch.float16; it must be (R, 8) torch.float32"),
        ({"rope": torch.zeros(3, 5, 8)}, "or (2, R, 8)"),
        ({"num_kv_heads": 1, "qkv": QKV[..., :32], "rope": torch.zeros(2, 5, 8)}, "no table per head where keys have"),
        ({"qkv": QKV[..., :42], "rope": torch.zeros(5, 7)}, "have 7, an odd number"),
        ({"rope_row": torch.zeros(2, 5).int()}, "`rope_row` needs `rope`"),
        ({"rope": torch.zeros(5, 8), "rope_row": torch.zeros(2, 5)}, "it must be (2, 5) int32"),
        ({"qk_norm": NORM._replace(kind="batch")}, "kind 'batch'; it must be 'layer' or 'rms'"),
        ({"qk_norm": NORM._replace(eps=-1.0)}, "eps -1.0; it must be at least 0"),
        (
            {"qk_norm": NORM._replace(k_weight=torch.ones(1, 8))},
            "`k_weight` is (1, 8) torch.float32; it must be (2, 8)",
        ),
        ({"qk_norm": NORM._replace(slot=torch.zeros(2).int())}, "it must be (S, 2, 8) with `slot`"),
        (
            {"qk_norm": HeadNorms("rms", EPS, slot=torch.zeros(3).int())},
            "`slot` is (3,) torch.int32; it must be (2,) int32",
        ),
        ({"attn_bias": torch.zeros(2, 4, 4)}, "it must be (2, 5, 5) or larger"),
        ({"attn_bias": torch.zeros(1, 5, 5)}, "it must be (2, 5, 5)"),
        ({"attn_bias": torch.zeros(2, 5, 5).int()}, "floating point"),
        ({"rope": torch.zeros(5, 8, device="meta")}, "`rope` is on meta; it must be on the device of `qkv`, cpu"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        packed_attention(more.pop("qkv", QKV), 2, **more)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_segment_longer_than_its_table_or_bias_is_refused() -> None:
    cu = torch.tensor([0, 5], dtype=torch.int32)
    for more in ({"rope": torch.zeros(4, 8)}, {"attn_bias": torch.zeros(2, 4, 4)}):
        with pytest.raises(ValueError, match=r"`(rope|attn_bias)`"):
            packed_attention(QKV[0], 2, cu, **more)

"""`linear_swiglu`: the gated layer, behind and in front of folded norms, and its gradient from eight bits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import SwiGLU, SwiGLUPacked
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
from vtk_kernels import _matmul, _swiglu_backward_kernel, _swiglu_kernel
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels.linear_residual import linear_residual
from vtk_kernels.linear_swiglu import linear_swiglu, linear_swiglu_backward, linear_swiglu_ref
from vtk_kernels.linear_swiglu_backward import linear_swiglu_backward_ref
from vtk_kernels.row_stats import row_stats_ref

OPS = torch.ops.vtk_kernels
EPS = 1e-6
SHAPES = [(1, 100, 40), (17, 64, 66), (66, 32, 130), (33, 200, 20)]
"""Rows, K, F: each on its own tiles of `gated_tile_config`, pieces whole or not, K with and without a masked end."""


def scaled(x: Tensor, norm: str | None) -> Tensor:
    """Rows over their standard deviation ("layer") or root mean square ("rms") in fp64."""
    if norm is None:
        return x.double()
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True) if norm == "layer" else wide
    return wide / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def formula(x: Tensor, w: Tensor, b: Tensor | None = None, norm: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """y and its derivatives by gate and value in fp64."""
    u = torch.einsum("...k,fk->...f", scaled(x, norm), w.double())
    u = u if b is None else u + b.double()
    gate, value = u[..., : len(w) // 2], u[..., len(w) // 2 :]
    bell = 1 / (1 + torch.exp(-gate))
    return gate * bell * value, value * (bell + gate * bell * (1 - bell)), gate * bell


def factors(q: Tensor, scales: Tensor, f: int, step: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return both factors from their codes, each one piece of 64 columns after the other; or a part of the scales."""
    found = []
    for half in range(2):
        codes = q[..., half * q.shape[-1] // 2 :][..., :f].double() - 128
        pieces = zip(scales[..., half].double().unbind(-1), codes.split(64, -1), strict=True)
        found.append(torch.cat([s[..., None].expand(part.shape) for s, part in pieces], -1) * (step or codes))
    return found[0], found[1]


def assert_factors(q: Tensor, scales: Tensor, by_gate: Tensor, by_value: Tensor, slack: float) -> None:
    """Compare with the derivatives: half a step of each piece off, and what the product before was off."""
    f = by_gate.shape[-1]
    steps, wanted = factors(q, scales, f, 0.5), (by_gate, by_value)
    for found, half_step, expected in zip(factors(q, scales, f), steps, wanted, strict=True):
        off = (found - expected).abs() - half_step - slack * expected.abs().amax()
        assert off.max() <= 0, f"{off.max():.2e} beyond half a step"


def scaled_gradient(gy: Tensor, q: Tensor, scales: Tensor) -> Tensor:
    """The gradient of gate and value from that of y, by the factors, in fp64."""
    return torch.cat([gy.double() * factor for factor in factors(q, scales, gy.shape[-1])], -1)


def draw(rows: int, k: int, f: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = (
        torch.randn(rows, k) * (torch.rand(rows, 1) + 0.5) + 0.3,
        torch.randn(2 * f, k) * k**-0.5,
        torch.randn(2 * f),
    )
    return x.to(DEVICE, dtype), w.to(DEVICE, dtype), b.to(DEVICE, dtype)


def test_reference_is_timms_layer() -> None:
    x = torch.randn(2, 5, 20, dtype=torch.float64)
    split = SwiGLU(20, 30, norm_layer=torch.nn.LayerNorm).double()
    w = torch.cat([split.fc1_g.weight, split.fc1_x.weight])
    y = linear_swiglu_ref(x, w, torch.cat([split.fc1_g.bias, split.fc1_x.bias]))
    assert isinstance(y, Tensor)
    assert_close(split.fc2(split.norm(y)), split(x))
    packed = SwiGLUPacked(20, 60).double()
    y = linear_swiglu_ref(x, packed.fc1.weight, packed.fc1.bias)
    assert isinstance(y, Tensor)
    assert_close(packed.fc2(y), packed(x))


@pytest.mark.parametrize("norm", [None, "layer", "rms"])
def test_reference_is_the_formula(norm: str | None) -> None:
    x, w, b = (t.double().cpu() for t in draw(17, 70, 100))
    folded: dict[str, Any] = {} if norm is None else {"row_stats": row_stats_ref(x), "eps": EPS, "rms": norm == "rms"}
    for bias in (b, None):
        expected, by_gate, by_value = formula(x, w, bias, norm)
        y, stats = linear_swiglu(x, w, bias, stats=True, **folded)
        assert_close(y, expected)
        assert_stats(stats, y)
        assert torch.equal(linear_swiglu(x, w, bias, **folded), y)
        if norm is None:
            _, q, scales = linear_swiglu(x, w, bias, save_grad=True)
            assert_factors(q, scales, by_gate, by_value, 1e-12)
    g, w2 = torch.randn(17, 9).double(), torch.randn(9, 100).double()
    _, q, scales = linear_swiglu(x, w, b, save_grad=True)
    gy = torch.einsum("tc,cf->tf", g, w2)
    wanted = scaled_gradient(gy, q, scales)
    assert_close(linear_swiglu_backward(g, w2, q, scales), wanted)
    assert_close(linear_swiglu_backward(gy, None, q, scales), wanted)


@needs_kernel
@pytest.mark.parametrize("rows,k,f", SHAPES, ids=str)
def test_kernel_is_the_formula(rows: int, k: int, f: int) -> None:
    x, w, b = draw(rows, k, f)
    bias = b if rows % 2 else None
    expected, by_gate, by_value = formula(x, w, bias)
    with nan_filled():
        y, q, scales = linear_swiglu(x, w, bias, save_grad=True, use_triton=True)
        again, stats = linear_swiglu(x, w, bias, stats=True, use_triton=True)
        alone = linear_swiglu(x, w, bias, use_triton=True)
    assert_close(y, expected)
    assert torch.equal(again, y) and torch.equal(alone, y)
    assert_stats(stats, y)
    assert_factors(q, scales, by_gate, by_value, 1e-6)
    for norm in ("layer", "rms"):
        folded = {"row_stats": row_stats_ref(x), "eps": EPS, "rms": norm == "rms"}
        with nan_filled():
            y, stats = linear_swiglu(x, w, b, stats=True, use_triton=True, **folded)  # type: ignore[call-overload]
        assert_close(y, formula(x, w, b, norm)[0])
        assert_stats(stats, y)
    g, w2 = torch.randn(rows, 40, device=DEVICE), torch.randn(40, f, device=DEVICE)
    with nan_filled():
        gu = linear_swiglu_backward(g, w2, q, scales, use_triton=True)
        without = linear_swiglu_backward(g @ w2, None, q, scales, use_triton=True)
    wanted = scaled_gradient(g.double() @ w2.double(), q, scales)
    assert_close(gu, wanted)
    assert_close(without, wanted, 2e-6)


@needs_kernel
@pytest.mark.parametrize("rows", [1, 66])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype, rows: int) -> None:
    x, w, b = draw(rows, 96, 96, dtype)
    w2 = torch.randn(96, 96, device=DEVICE).to(dtype)
    y, q, scales = linear_swiglu(x, w, b, save_grad=True, use_triton=True)
    assert (y.dtype, q.dtype, scales.dtype) == (dtype, torch.uint8, torch.float32)
    gate, value = F.linear(x, w, b).chunk(2, -1)
    assert_no_worse(y, formula(x, w, b)[0], F.silu(gate) * value)
    assert_factors(q, scales, *formula(x, w, b)[1:], 1e-5)
    y, stats = linear_swiglu(x, w, b, row_stats=row_stats_ref(x), eps=EPS, rms=True, stats=True, use_triton=True)
    gate, value = F.linear(x / x.square().mean(-1, keepdim=True).sqrt(), w, b).chunk(2, -1)
    assert_no_worse(y, formula(x, w, b, "rms")[0], F.silu(gate) * value)
    assert_stats(stats, y)  # of what is stored, which the next product reads
    gu = linear_swiglu_backward(x, w2, q, scales, use_triton=True)
    wanted = scaled_gradient(x.double() @ w2.double(), q, scales)
    assert_no_worse(gu, wanted, torch.cat([(x @ w2) * factor.to(dtype) for factor in factors(q, scales, 96)], -1))


@needs_kernel
@pytest.mark.parametrize("enough", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_tiles_are_all_written(enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # tiles of 128 and of 64 rows, in groups of eight rows of tiles, the last group short
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    x, w, b = draw(530 if enough > 1 else 300, 32, 80, torch.float16)
    assert _matmul.gated_tile_config(False, len(x), 80, True, x, w)[0] == (64 if enough > 1 else 128)
    with nan_filled():
        y, q, scales = linear_swiglu(x, w, b, save_grad=True, use_triton=True)
        gu = linear_swiglu_backward(x, w[:80].T.contiguous(), q, scales, use_triton=True)
    expected, *derivatives = formula(x, w, b)
    assert error(y, expected) <= 1e-3
    assert_factors(q, scales, *derivatives, 1e-5)
    gy = x.double() @ w[:80].double().T
    assert error(gu, scaled_gradient(gy, q, scales)) <= 1e-3


@needs_kernel
def test_strided_operands_and_further_dimensions() -> None:
    x, w, b = draw(30, 40, 24)
    expected, *derivatives = formula(x, w, b)
    for view in (x.T.contiguous().T, strided(x), torch.cat([x, x], 1)[:, :40]):
        y = linear_swiglu(view.view(2, 15, 40) if view.stride(0) == 80 else view, w, b, use_triton=True)
        assert_close(y.flatten(0, -2), expected)
    tokens = torch.stack([x, torch.full_like(x, torch.nan)], 1)  # (30, 2, 40): pooled rows, two apart
    y, q, scales = linear_swiglu(tokens[:, 0], strided(w), strided(b), save_grad=True, use_triton=True)
    assert_close(y, expected)
    assert_factors(q, scales, *derivatives, 1e-6)
    y, stats = linear_swiglu(
        tokens[:, :1], w, b, row_stats=strided(row_stats_ref(x))[:, None], eps=EPS, stats=True, use_triton=True
    )
    assert (y.shape, stats.shape) == ((30, 1, 24), (30, 1, 1, 2))
    assert_close(y[:, 0], formula(x, w, b, "layer")[0])
    w2, g = torch.randn(8, 24, device=DEVICE), torch.randn(30, 8, device=DEVICE)
    gu = linear_swiglu_backward(
        strided(g), w2.T.contiguous().T, torch.stack([q, q], -1)[..., 0], strided(scales), use_triton=True
    )
    assert_close(gu, scaled_gradient(g.double() @ w2.double(), q, scales))


@needs_kernel
def test_no_rows() -> None:
    x, w, b = draw(2, 8, 5)
    none = linear_swiglu(x[:0].view(0, 3, 8), w, b, save_grad=True, use_triton=True)
    assert [t.shape for t in none] == [(0, 3, 5), (0, 3, 10), (0, 3, 1, 2)]
    assert linear_swiglu_backward(x[:0], w[:5].T, none[1][:, 0], none[2][:, 0], use_triton=True).shape == (0, 10)


@needs_kernel
@settings(max_examples=4, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 90),
    st.integers(1, 140),
    st.sampled_from([None, "layer", "rms"]),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_any_shape(rows: int, k: int, f: int, norm: str | None, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * 8100 + k * 90 + f)
    x, w, b = draw(rows, k, f, dtype)
    folded: dict[str, Any] = {} if norm is None else {"row_stats": row_stats_ref(x), "eps": EPS, "rms": norm == "rms"}
    expected, *derivatives = formula(x, w, b, norm)
    with nan_filled():
        y, stats = linear_swiglu(x, w, b, stats=True, use_triton=True, **folded)
        if norm is None:
            _, q, scales = linear_swiglu(x, w, b, save_grad=True, use_triton=True)
            assert_factors(q, scales, *derivatives, 1e-5)
    assert error(y, expected) <= (2e-6 if dtype == torch.float32 else 1e-3)
    assert_stats(stats, y)


@needs_kernel
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_two_products_are_an_mlp_with_a_sub_norm_between(norm: str) -> None:
    x, w, b = draw(17, 64, 130)
    residual, w2 = torch.randn(17, 72, device=DEVICE), torch.randn(72, 130, device=DEVICE) / 11
    y, stats = linear_swiglu(x, w, b, stats=True, use_triton=True)
    centred = w2 - w2.mean(1, keepdim=True) if norm == "layer" else w2
    found, _ = linear_residual(y, centred, None, residual, row_stats=stats, eps=EPS, rms=norm == "rms", use_triton=True)
    h = formula(x, w, b)[0]
    h = F.layer_norm(h, (130,), eps=EPS) if norm == "layer" else F.rms_norm(h, (130,), eps=EPS)
    assert_close(found, residual.double() + h @ w2.double().T, 5e-6)


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _swiglu_kernel, _swiglu_backward_kernel)
    x, w, b = draw(3, 8, 5)
    stats = row_stats_ref(x)
    linear_swiglu(x, w, b, use_triton=True)
    linear_swiglu(x, w, b, row_stats=stats, eps=EPS, use_triton=True)
    linear_swiglu(x, w, b, stats=True, use_triton=True)
    _, q, scales = linear_swiglu(x, w, b, save_grad=True, use_triton=True)
    names = ("linear_swiglu", "linear_swiglu_folded", "linear_swiglu_stats", "linear_swiglu_save")
    assert started == ["_swiglu_kernel"] * sum(LAUNCHES[name] for name in names)
    linear_swiglu_backward(x, w[:5].T, q, scales, use_triton=True)
    assert started[4:] == ["_swiglu_backward_kernel"] * LAUNCHES["linear_swiglu_backward"]


def leaves(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = (t.double().cpu().requires_grad_() for t in draw(*shape))
    return x, w, b


def test_gradients_are_those_of_the_formula() -> None:
    x, w, b = leaves(4, 5, 3)
    assert torch.autograd.gradcheck(lambda *t: OPS.linear_swiglu(t[0], t[1], t[2]), (x, w, b))
    assert torch.autograd.gradcheck(lambda *t: OPS.linear_swiglu_save(t[0], t[1], t[2])[0], (x, w, b))
    assert torch.autograd.gradcheck(lambda *t: OPS.linear_swiglu(t[0].view(2, 2, 5), t[1], None), (x, w))
    _, q, scales = OPS.linear_swiglu_save(x, w, b)
    assert not q.requires_grad and not scales.requires_grad


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_folded_norms_gradient_is_torchs(norm: str) -> None:
    x, w, b = leaves(4, 70, 3)
    g = torch.randn(4, 3, dtype=torch.float64)
    y, stats = linear_swiglu(x, w, b, row_stats=row_stats_ref(x), eps=EPS, rms=norm == "rms", stats=True)
    found = torch.autograd.grad(((y + stats.sum((-1, -2))[:, None]) * g).sum(), (x, w, b))
    y = formula(x, w, b, norm)[0]
    sums = y.mean(-1) + (y - y.mean(-1, keepdim=True)).square().sum(-1)
    for one, other in zip(found, torch.autograd.grad(((y + sums[:, None]) * g).sum(), (x, w, b)), strict=True):
        assert_close(one, other, 1e-11)
    with fake_leaves(x, w, b) as faked:
        known = row_stats_ref(faked[0])
        y = linear_swiglu(*faked, row_stats=known, eps=EPS)
        assert has_torchs_gradient(y, *faked) and not has_torchs_gradient(linear_swiglu(*faked), *faked)
        with torch.no_grad():
            shapes = [t.shape for t in linear_swiglu(*faked, row_stats=known, eps=EPS, stats=True)]
            assert shapes == [(4, 3), (4, 1, 2)]
            assert linear_swiglu(*faked, row_stats=known, eps=EPS).shape == (4, 3)
    for op in (OPS.linear_swiglu_folded, OPS.linear_swiglu_stats):
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            found = op(x, w, b, row_stats_ref(x), EPS, False)
            (found if isinstance(found, Tensor) else found[0]).sum().backward()


@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_eight_bits_are_enough_for_a_frozen_mlps_gradient(outlier: float) -> None:
    x, w, b = leaves(50, 64, 256)
    with torch.no_grad():
        w[5] *= outlier  # one gate of 256: a large activation spoils its own piece alone
    w2 = torch.randn(64, 256, dtype=torch.float64) / 16
    g = torch.randn(50, 64, dtype=torch.float64)
    exact = torch.autograd.grad(formula(x, w, b)[0] @ w2.T, x, g)[0]
    _, q, scales = linear_swiglu(x, w, b, save_grad=True)
    gu = linear_swiglu_backward(g, w2, q, scales)
    wanted = torch.cat([g @ w2 * factor for factor in formula(x, w, b)[1:]], -1).detach()
    kept = [i for i in range(512) if not (outlier > 1 and i % 256 < 64)]
    assert 1e-5 < error(gu[:, kept] @ w[kept].detach(), wanted[:, kept] @ w[kept].detach()) < 1.5e-2
    assert error(gu @ w.detach(), exact) < 2e-2
    assert q.numel() + scales.numel() * 4 == 50 * (2 * 256 + 8 * 4)  # scales in fp32: 2.125 bytes a hidden unit


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operators_keep_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x, w, b = (t.cpu() for t in draw(6, 8, 70, dtype))
    leaf = [t.clone().requires_grad_() for t in (x, w, b)]
    views, only = (strided(x).view(2, 3, 8), strided(w), None), "test_faketensor"
    torch.library.opcheck(OPS.linear_swiglu_save.default, tuple(leaf), test_utils=checks)
    for op in (OPS.linear_swiglu.default, OPS.linear_swiglu_save.default):
        torch.library.opcheck(op, views, test_utils=only)
    stats = row_stats_ref(x)
    torch.library.opcheck(OPS.linear_swiglu_stats.default, (x, w, b, stats, EPS, False), test_utils=checks)
    torch.library.opcheck(OPS.linear_swiglu_stats.default, (*views, None, None, False), test_utils=only)
    torch.library.opcheck(OPS.linear_swiglu_folded.default, (x, w, b, stats, EPS, True), test_utils=only)
    _, q, scales = linear_swiglu(x, w, b, save_grad=True)
    for g, w2 in ((strided(x), w[:70].T), (torch.ones(6, 70, dtype=dtype), None)):
        torch.library.opcheck(OPS.linear_swiglu_backward.default, (g, w2, q, scales), test_utils=only)


def test_compiles_without_a_break() -> None:
    x, w, b = (t.float().detach().requires_grad_() for t in leaves(6, 8, 5))

    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y, _, _ = OPS.linear_swiglu_save(x * 2, w, b)
        return (OPS.linear_swiglu(x, w, b) ** 2 + y).sum()

    torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, b).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    loss = (formula(wide[0], wide[1], wide[2])[0] ** 2 + formula(2 * wide[0], wide[1], wide[2])[0]).sum()
    for found, expected in zip((x, w, b), torch.autograd.grad(loss, wide), strict=True):
        assert found.grad is not None
        assert_close(found.grad, expected, 5e-6)


ONES = torch.ones


@pytest.mark.parametrize(
    "arguments,options,said",
    [
        ((ONES(2, 8), ONES(4, 7), None), {}, r"`w` is \(4, 7\) torch.float32; it must be \(F, 8\) torch.float32"),
        ((ONES(2, 8), ONES(3, 8), None), {}, "`w` has 3 rows; it must have an even number: F of the gate"),
        ((ONES(2, 8), ONES(4, 8), ONES(2)), {}, r"`b` is \(2,\) torch.float32; it must be \(4,\)"),
        ((ONES(2, 8).int(), ONES(4, 8).int(), None), {}, "`x` must be floating point"),
        ((ONES(2, 8), ONES(4, 8), None), {"row_stats": ONES(3, 1, 2), "eps": EPS}, r"must be \(2, 1, 2\)"),
        ((ONES(2, 8), ONES(4, 8), None), {"row_stats": ONES(2, 1, 2)}, "`row_stats` and `eps` together"),
        ((ONES(2, 8), ONES(4, 8), None), {"rms": True}, "`rms` says which norm `row_stats` are for"),
        ((ONES(2, 8), ONES(4, 8), None), {"stats": True, "save_grad": True}, "`save_grad` is for training"),
        ((ONES(2, 8), ONES(4, 8), None), {"row_stats": ONES(2, 1, 2), "eps": EPS, "save_grad": True}, "give one of"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        linear_swiglu(*arguments, **options)
    if not options:
        with pytest.raises(ValueError, match=said):
            OPS.linear_swiglu(*arguments)


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((ONES(2, 8), ONES(7, 3), ONES(2, 6).byte(), ONES(2, 1, 2)), r"`w2` is \(7, 3\) .* it must be \(8, F\)"),
        ((ONES(2, 8), ONES(8, 3), ONES(2, 3).byte(), ONES(2, 1, 2)), r"`q` is \(2, 3\) .* it must be \(2, 6\)"),
        ((ONES(2, 8), ONES(8, 3), ONES(2, 6), ONES(2, 1, 2)), r"`q` is \(2, 6\) torch.float32"),
        ((ONES(2, 8), ONES(8, 3), ONES(2, 6).byte(), ONES(2, 2)), r"`scales` is \(2, 2\) .* must be \(2, 1, 2\)"),
        ((ONES(2, 8), None, ONES(2, 6).byte(), ONES(2, 1, 2)), r"`q` is \(2, 6\) .* it must be \(2, 16\)"),
        ((ONES(2, 8).int(), None, ONES(2, 16).byte(), ONES(2, 1, 2)), "`g` must be floating point"),
    ],
)
def test_backward_refuses_what_does_not_fit(arguments: tuple[Any, ...], said: str) -> None:
    for run in (linear_swiglu_backward, OPS.linear_swiglu_backward):
        with pytest.raises(ValueError, match=said):
            run(*arguments)


def test_a_piece_of_zeros_and_one_that_is_not_finite() -> None:
    x, w = torch.zeros(2, 8), torch.ones(8, 8)
    x[1, 0] = torch.inf
    _, q, scales = linear_swiglu(x, w, None, save_grad=True)
    gu = linear_swiglu_backward_ref(torch.ones(2, 4), None, q, scales)
    assert not gu[0].any() and not gu[1].isfinite().any()

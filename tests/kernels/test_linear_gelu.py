import math
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
    count_launches,
    error,
    fake_leaves,
    has_torchs_gradient,
    nan_filled,
    needs_kernel,
    strided,
)
from vtk_kernels import _linear_kernel, _matmul
from vtk_kernels import linear_gelu_backward as backward_module
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels.linear_gelu import linear_gelu, linear_gelu_backward, linear_gelu_ref
from vtk_kernels.row_stats import row_stats_ref

OPS = torch.ops.vtk_kernels
HALF_STEP = 1.2582 / 255 / 2
EPS = 1e-6
SHAPES = [(1, 100, 40), (17, 64, 66), (130, 64, 40), (33, 1000, 20)]
"""Rows, K, F: each on its own tiles of `tile_config`, K with and without a masked end."""


def phi(u: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(u / math.sqrt(2)))


def slope(u: Tensor) -> Tensor:
    return phi(u) + u * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)


def formula(x: Tensor, w: Tensor, b: Tensor | None = None, folded: bool = False) -> tuple[Tensor, Tensor]:
    """y and GELU′ in fp64; folded, of rows divided by their standard deviation."""
    u = torch.einsum("...k,fk->...f", x.double(), w.double())
    u = u / (x.double().var(-1, keepdim=True, unbiased=False) + EPS).sqrt() if folded else u
    u = u if b is None else u + b.double()
    return u * phi(u), slope(u)


def dequantised(q: Tensor) -> Tensor:
    return q.double() * 1.2582 / 255 - 0.1291


def draw(rows: int, k: int, f: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = torch.randn(rows, k) * (torch.rand(rows, 1) + 0.5), torch.randn(f, k) * k**-0.5, torch.randn(f)
    return x.to(DEVICE, dtype), w.to(DEVICE, dtype), b.to(DEVICE, dtype)


def test_reference_is_the_formula() -> None:
    x, w, b = (t.double() for t in draw(17, 30, 20))
    for bias in (b, None):
        y, q = linear_gelu_ref(x, w, bias, True)
        expected, derivative = formula(x, w, bias)
        assert_close(y, expected)
        assert (dequantised(q) - derivative).abs().max() <= HALF_STEP * (1 + 1e-9)
        assert torch.equal(linear_gelu_ref(x, w, bias, False), y)
        folded = linear_gelu_ref(x, w, bias, row_stats=row_stats_ref(x), eps=EPS)
        assert isinstance(folded, Tensor)
        assert_close(folded, formula(x, w, bias, True)[0])
    g, w2 = torch.randn(17, 9).double(), torch.randn(9, 20).double()
    assert_close(backward_module.linear_gelu_backward_ref(g, w2, q), torch.einsum("tc,cf->tf", g, w2) * dequantised(q))


@needs_kernel
@pytest.mark.parametrize("rows,k,f", SHAPES, ids=str)
def test_kernel_is_the_formula(rows: int, k: int, f: int) -> None:
    x, w, b = draw(rows, k, f)
    g, w2 = torch.randn(rows, k, device=DEVICE), torch.randn(k, f, device=DEVICE)
    for bias in (b, None):
        with nan_filled():
            y, q = linear_gelu(x, w, bias, True, use_triton=True)
        expected, derivative = formula(x, w, bias)
        assert_close(y, expected)
        assert (dequantised(q) - derivative).abs().max() <= HALF_STEP + 1e-6
    with nan_filled():
        folded = linear_gelu(x, w, b, row_stats=row_stats_ref(x), eps=EPS, use_triton=True)
    assert_close(folded, formula(x, w, b, True)[0])
    with nan_filled():
        assert torch.equal(linear_gelu(x, w, None, use_triton=True), y)
        gu = linear_gelu_backward(g, w2, q, use_triton=True)
    assert_close(gu, (g.double() @ w2.double()) * dequantised(q))


@needs_kernel
@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype, rows: int) -> None:
    x, w, b = draw(rows, 192, 96, dtype)
    w2 = torch.randn(192, 96, device=DEVICE).to(dtype)
    y, q = linear_gelu(x, w, b, True, use_triton=True)
    assert (y.dtype, q.dtype) == (dtype, torch.uint8)
    assert_no_worse(y, formula(x, w, b)[0], F.gelu(F.linear(x, w, b)))
    assert (dequantised(q) - formula(x, w, b)[1]).abs().max() <= HALF_STEP + 1e-5
    folded = linear_gelu(x, w, b, row_stats=row_stats_ref(x), eps=EPS, use_triton=True)
    assert_no_worse(folded, formula(x, w, b, True)[0], F.gelu((x / x.std(-1, keepdim=True, correction=0)) @ w.T + b))
    gu = linear_gelu_backward(x, w2, q, use_triton=True)
    plain = (x @ w2) * dequantised(q).to(dtype)
    assert_no_worse(gu, (x.double() @ w2.double()) * dequantised(q), plain)


@needs_kernel
@pytest.mark.parametrize("dtype,enough", [(torch.float16, 4), (torch.float16, 1000), (torch.float32, 4)], ids=str)
def test_many_tiles_are_all_written(dtype: torch.dtype, enough: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # tiles of 128, of 64 and of 32 rows: in groups of eight rows of tiles, the last group short
    monkeypatch.setattr(_matmul, "_ENOUGH_TILES", enough)
    x, w, b = draw(300, 32, 144 if dtype == torch.float16 else 70, dtype)
    with nan_filled():
        y, q = linear_gelu(x, w, b, True, use_triton=True)
        gu = linear_gelu_backward(x, w.T.contiguous(), q, use_triton=True)
    assert error(y, formula(x, w, b)[0]) <= (1e-6 if dtype == torch.float32 else 1e-3)
    assert (dequantised(q) - formula(x, w, b)[1]).abs().max() <= HALF_STEP + 1e-5
    assert error(gu, (x.double() @ w.double().T) * dequantised(q)) <= (1e-6 if dtype == torch.float32 else 1e-3)


def test_gelus_slope_fits_the_byte_at_every_point() -> None:
    u = torch.cat([torch.linspace(-12, 12, 4001, dtype=torch.float64), torch.tensor([-1e4, 1e4, 0.0])])[:, None]
    _, q = linear_gelu_ref(u, torch.ones(1, 1, dtype=torch.float64), None, True)
    assert (dequantised(q) - slope(u)).abs().max() <= HALF_STEP * (1 + 1e-9)
    assert 0 <= q.min() <= 1 and 254 <= q.max() <= 255  # the range is used


@needs_kernel
def test_strided_operands_and_further_dimensions() -> None:
    x, w, b = draw(30, 40, 24)
    expected, _ = formula(x, w, b)
    views = (x.T.contiguous().T, strided(x), torch.cat([x, x], 1)[:, :40])
    for view in views:
        y = linear_gelu(view.view(2, 15, 40) if view is views[2] else view, w, b, use_triton=True)
        assert_close(y.flatten(0, -2), expected)
    tokens = torch.stack([x, torch.full_like(x, torch.nan)], 1)  # (30, 2, 40): pooled rows, two apart
    y, q = linear_gelu(tokens[:, 0], strided(w), strided(b), True, use_triton=True)
    assert_close(y, expected)
    stats = strided(row_stats_ref(x))
    y = linear_gelu(tokens[:, 0], w, b, row_stats=stats, eps=EPS, use_triton=True)
    assert_close(y, formula(x, w, b, True)[0])
    w2, g = torch.randn(8, 24, device=DEVICE), torch.randn(30, 8, device=DEVICE)
    gu = linear_gelu_backward(strided(g), w2.T.contiguous().T, torch.stack([q, q], -1)[..., 0], use_triton=True)
    assert_close(gu, (g.double() @ w2.double()) * dequantised(q))


@needs_kernel
def test_no_rows() -> None:
    x, w, b = draw(2, 8, 5)
    y, q = linear_gelu(x[:0].view(0, 3, 8), w, b, True, use_triton=True)
    assert y.shape == q.shape == (0, 3, 5)
    assert linear_gelu_backward(x[:0], w.T, q[:, 0], use_triton=True).shape == (0, 5)


@needs_kernel
@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 90),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_any_shape(rows: int, k: int, f: int, folded: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * 8100 + k * 90 + f)
    x, w, b = draw(rows, k, f, dtype)
    with nan_filled():
        if folded:
            y = linear_gelu(x, w, b, row_stats=row_stats_ref(x), eps=EPS, use_triton=True)
        else:
            y, q = linear_gelu(x, w, b, True, use_triton=True)
    expected, derivative = formula(x, w, b, folded)
    assert error(y, expected) <= (1e-6 if dtype == torch.float32 else 1e-3)
    assert folded or (dequantised(q) - derivative).abs().max() <= HALF_STEP + 1e-5


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, _linear_kernel, backward_module)
    x, w, b = draw(3, 8, 5)
    linear_gelu(x, w, b, row_stats=row_stats_ref(x), eps=EPS, use_triton=True)
    assert len(started) == LAUNCHES["linear_gelu_stats"]
    started.clear()
    linear_gelu(x, w, b, use_triton=True)
    assert len(started) == LAUNCHES["linear_gelu"]
    _, q = linear_gelu(x, w, b, True, use_triton=True)
    assert len(started) == LAUNCHES["linear_gelu"] + LAUNCHES["linear_gelu_save"]
    linear_gelu_backward(x, w.T, q, use_triton=True)
    assert started[2:] == ["_linear_gelu_backward_kernel"] * LAUNCHES["linear_gelu_backward"]


def leaves(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = (t.double().cpu().requires_grad_() for t in draw(*shape))
    return x, w, b


def test_gradients_are_those_of_the_formula() -> None:
    x, w, b = leaves(4, 5, 3)
    assert torch.autograd.gradcheck(lambda *t: OPS.linear_gelu(t[0], t[1], t[2]), (x, w, b))
    assert torch.autograd.gradcheck(lambda *t: OPS.linear_gelu_save(t[0], t[1], t[2])[0], (x, w, b))
    assert torch.autograd.gradcheck(lambda *t: OPS.linear_gelu(t[0].view(2, 2, 5), t[1], None), (x, w))
    _, q = OPS.linear_gelu_save(x, w, b)
    assert not q.requires_grad


def test_a_folded_norms_gradient_is_torchs() -> None:
    x, w, b = leaves(4, 70, 3)
    g = torch.randn(4, 3, dtype=torch.float64)
    found = torch.autograd.grad(linear_gelu(x, w, b, row_stats=row_stats_ref(x), eps=EPS), (x, w, b), g)
    expected = torch.autograd.grad(formula(x, w, b, True)[0], (x, w, b), g)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    with fake_leaves(x, w, b) as faked:
        y = linear_gelu(*faked, row_stats=row_stats_ref(faked[0]), eps=EPS)
        assert has_torchs_gradient(y, *faked) and not has_torchs_gradient(linear_gelu(*faked), *faked)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        OPS.linear_gelu_stats(x, w, b, row_stats_ref(x), EPS).sum().backward()


def test_eight_bits_are_enough_for_a_frozen_mlps_gradient() -> None:
    x, w, b = leaves(50, 64, 256)
    w2 = torch.randn(64, 256, dtype=torch.float64) / 16
    g = torch.randn(50, 64, dtype=torch.float64)
    exact = torch.autograd.grad(F.gelu(F.linear(x, w, b)) @ w2.T, x, g)[0]
    _, q = linear_gelu(x, w, b, True)
    found = linear_gelu_backward(g, w2, q) @ w
    assert 1e-5 < error(found, exact) < 1e-2


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operators_keep_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x, w, b = (t.cpu() for t in draw(6, 8, 5, dtype))
    leaf = [t.clone().requires_grad_() for t in (x, w, b)]
    torch.library.opcheck(OPS.linear_gelu.default, tuple(leaf), test_utils=checks)
    torch.library.opcheck(OPS.linear_gelu_save.default, tuple(leaf), test_utils=checks)
    torch.library.opcheck(OPS.linear_gelu_stats.default, (x, w, b, row_stats_ref(x), EPS), test_utils=checks)
    q = torch.randint(0, 255, (6, 5), dtype=torch.uint8)
    for op in (OPS.linear_gelu.default, OPS.linear_gelu_save.default):
        torch.library.opcheck(op, (strided(x).view(2, 3, 8), strided(w), None), test_utils="test_faketensor")
    torch.library.opcheck(OPS.linear_gelu_backward.default, (strided(x), w.T, q), test_utils="test_faketensor")


def test_compiles_without_a_break() -> None:
    x, w, b = (t.float().detach().requires_grad_() for t in leaves(6, 8, 5))

    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y, _ = OPS.linear_gelu_save(x * 2, w, b)
        return (OPS.linear_gelu(x, w, b) ** 2 + y).sum()

    torch.compile(step, fullgraph=True, backend="aot_eager")(x, w, b).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    loss = (formula(wide[0], wide[1], wide[2])[0] ** 2 + formula(2 * wide[0], wide[1], wide[2])[0]).sum()
    for found, expected in zip((x, w, b), torch.autograd.grad(loss, wide), strict=True):
        assert found.grad is not None
        assert_close(found.grad, expected, 5e-6)


ONES = torch.ones


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((ONES(2, 8), ONES(3, 7), None), r"`w` is \(3, 7\) torch.float32; it must be \(F, 8\) torch.float32"),
        ((ONES(2, 8), ONES(3, 8).half(), None), r"`w` is \(3, 8\) torch.float16"),
        ((ONES(2, 8), ONES(3, 8), ONES(8)), r"`b` is \(8,\) torch.float32; it must be \(3,\)"),
        ((ONES(2, 8), ONES(3, 8), ONES(3).double()), r"`b` is \(3,\) torch.float64"),
        ((ONES(2, 8).int(), ONES(3, 8).int(), None), "`x` must be floating point"),
        (
            (ONES(2, 8), ONES(3, 8), None, False, ONES(3, 1, 2), EPS),
            r"`row_stats` is .* must be \(2, 1, 2\) torch.float32",
        ),
        ((ONES(2, 8), ONES(3, 8), None, True, ONES(2, 1, 2), EPS), "`row_stats` for inference: give one of them"),
        ((ONES(2, 8), ONES(3, 8), None, False, ONES(2, 1, 2)), "give `row_stats` and `eps` together; `eps` is None"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        linear_gelu(*arguments)
    if len(arguments) == 3 or said.startswith("`row_stats` is"):
        op = OPS.linear_gelu if len(arguments) == 3 else OPS.linear_gelu_stats
        with pytest.raises(ValueError, match=said):
            op(*arguments[:3], *arguments[4:])


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((ONES(2, 8), ONES(7, 3), ONES(2, 3).byte()), r"`w2` is \(7, 3\) torch.float32; it must be \(8, F\)"),
        ((ONES(2, 8), ONES(8, 3), ONES(2, 4).byte()), r"`q` is \(2, 4\) torch.uint8; it must be \(2, 3\) torch.uint8"),
        ((ONES(2, 8), ONES(8, 3), ONES(2, 3)), r"`q` is \(2, 3\) torch.float32"),
        ((ONES(2, 8).int(), ONES(8, 3).int(), ONES(2, 3).byte()), "`g` must be floating point"),
    ],
)
def test_backward_refuses_what_does_not_fit(arguments: tuple[Tensor, Tensor, Tensor], said: str) -> None:
    for run in (linear_gelu_backward, OPS.linear_gelu_backward):
        with pytest.raises(ValueError, match=said):
            run(*arguments)

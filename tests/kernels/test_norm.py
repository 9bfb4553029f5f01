import sys

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
    nan_filled,
    needs_kernel,
    strided,
)
from vtk_kernels import LAUNCHES
from vtk_kernels.norm import norm, norm_backward_launch, norm_backward_ref, norm_ref

EPS = 1e-6
OPS = torch.ops.vtk_kernels
SHAPES = [(1, 1, 64), (1, 2, 192), (2, 17, 100), (3, 1, 1), (4, 1000), (0, 5, 48), (7,)]


def formula(x: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    x = x.double()
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    rstd = 1 / ((centred**2).sum(-1) / x.shape[-1] + eps).sqrt()
    return centred * rstd[..., None], rstd


def formula_gradient(x: Tensor, g: Tensor) -> Tensor:
    x = x.detach().double().requires_grad_()
    return torch.autograd.grad(formula(x)[0], x, g.double())[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_formula(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    for actual, expected in zip(norm_ref(x, EPS), formula(x), strict=True):
        assert actual.dtype == torch.float64
        assert_close(actual, expected)


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_formula(shape: tuple[int, ...]) -> None:
    x, g = torch.randn(shape, device=DEVICE) * 3 + 1, torch.randn(shape, device=DEVICE)
    with nan_filled():
        x_hat, rstd = norm(x, EPS, use_triton=True)
        gx = norm_backward_launch(g, x_hat, rstd)
    expected, expected_rstd = formula(x)
    assert_close(x_hat, expected)
    assert_close(rstd, expected_rstd)
    assert_close(gx, formula_gradient(x, g), 2e-6)


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype) -> None:
    x, g = ((torch.randn(2, 9, 384, device=DEVICE) * 2 + 0.5).to(dtype) for _ in range(2))
    x_hat, rstd = norm(x, EPS, use_triton=True)
    assert (x_hat.dtype, rstd.dtype) == (dtype, torch.float32)
    leaf = x.clone().requires_grad_()
    plain = F.layer_norm(leaf, (384,), eps=EPS)
    assert_no_worse(x_hat, formula(x)[0], plain)
    assert_close(rstd, formula(x)[1])
    plain_gradient = torch.autograd.grad(plain, leaf, g)[0]
    assert_no_worse(norm_backward_launch(g, x_hat, rstd), formula_gradient(x, g), plain_gradient)


@needs_kernel
@pytest.mark.parametrize("use_triton", [False, True])
def test_a_large_mean_keeps_the_variance(use_triton: bool) -> None:
    x = torch.randn(4, 384, device=DEVICE) + 1000
    x_hat, rstd = norm(x, EPS, use_triton=use_triton)
    # 1000 has 14 bits behind the point in fp32, and the mean is rounded to them; E[x²] − E[x]² would be 6 % wrong
    assert_close(x_hat, formula(x)[0], 5e-5)
    assert_close(rstd, formula(x)[1], 2e-5)


@needs_kernel
@pytest.mark.parametrize("use_triton", [False, True])
def test_constant_rows_give_zero(use_triton: bool) -> None:
    x_hat, rstd = norm(torch.full((3, 100), 0.75, device=DEVICE), EPS, use_triton=use_triton)
    assert torch.equal(x_hat, torch.zeros_like(x_hat))
    assert_close(rstd, torch.full((3,), EPS**-0.5))


@needs_kernel
def test_strided_rows() -> None:
    tokens = torch.randn(3, 17, 40, device=DEVICE)
    for x in (tokens[:, :1], tokens[:, 2:5], tokens.transpose(0, 1), strided(tokens)[:2, 0], tokens[:1, :1]):
        x_hat, rstd = norm(x, EPS, use_triton=True)
        assert x_hat.is_contiguous() and rstd.is_contiguous()
        assert_close(x_hat, formula(x)[0])
        g = torch.randn(x.shape[1:], device=DEVICE).expand(x.shape)
        assert_close(norm_backward_launch(g, strided(x_hat), strided(rstd)), formula_gradient(x, g), 2e-6)


@needs_kernel
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(0, 9), channels=st.integers(1, 300), eps=st.sampled_from([1e-12, 1e-5, 0.1]))
def test_any_shape(rows: int, channels: int, eps: float) -> None:
    x = torch.randn(rows, channels, device=DEVICE) * 0.5 + 0.25
    with nan_filled():
        x_hat, rstd = norm(x, eps, use_triton=True)
    if channels > 2:  # two numbers may lie so close that fp32 cannot tell their variance
        assert_close(x_hat, formula(x, eps)[0], 2e-6)
        assert_close(rstd, formula(x, eps)[1], 2e-6)
    assert x_hat.isfinite().all() and rstd.isfinite().all()


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, sys.modules[norm.__module__])
    x_hat, rstd = norm(torch.randn(2, 16, device=DEVICE), EPS, use_triton=True)
    assert len(started) == LAUNCHES["norm"]
    norm_backward_launch(x_hat, x_hat, rstd)
    assert len(started) == LAUNCHES["norm"] + LAUNCHES["norm_backward"]


def test_gradient_through_the_operator() -> None:
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: OPS.norm(x, EPS), x)
    assert torch.autograd.gradcheck(lambda x: norm(x, EPS), x)
    assert not OPS.norm(x, EPS)[1].requires_grad and not norm(x, EPS)[1].requires_grad
    g, (x_hat, rstd) = torch.randn_like(x), formula(x.detach())
    assert_close(norm_backward_ref(g, x_hat, rstd), formula_gradient(x, g))


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operators_keep_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x = torch.randn(2, 3, 16, dtype=dtype)
    for case in (x.clone().requires_grad_(), strided(x), x.transpose(0, 1), x[:0]):
        torch.library.opcheck(OPS.norm.default, (case, EPS), test_utils=checks)
    x_hat, rstd = norm(x, EPS)
    torch.library.opcheck(OPS.norm_backward.default, (strided(x), x_hat, rstd), test_utils=checks)


def test_compiles_without_a_break() -> None:
    x = torch.randn(2, 5, 16, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return (OPS.norm(x * 2, EPS)[0] ** 3).sum()

    torch.compile(step, fullgraph=True, backend="aot_eager")(x).backward()
    assert x.grad is not None
    wide = x.detach().double().requires_grad_()
    assert_close(x.grad, torch.autograd.grad((formula(wide * 2)[0] ** 3).sum(), wide)[0], 5e-6)


@pytest.mark.parametrize(
    "x,said",
    [
        (torch.ones(()), r"needs at least one channel in its last dimension; its shape is \(\)"),
        (torch.ones(3, 0), r"its shape is \(3, 0\)"),
        (torch.ones(3, 4, dtype=torch.int64), "`x` must be floating point, not torch.int64"),
    ],
)
def test_what_has_no_channels_is_refused(x: Tensor, said: str) -> None:
    for run in (norm, OPS.norm):
        with pytest.raises(ValueError, match=said):
            run(x, EPS)


def test_use_triton_where_it_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="not float64"):
        norm(torch.ones(2, 4, dtype=torch.float64), EPS, use_triton=True)


@needs_kernel
def test_a_bias_is_added_before() -> None:
    x, bias = torch.randn(3, 7, 40, device=DEVICE), torch.randn(40, device=DEVICE)
    exact = formula(x.double() + bias.double(), EPS)
    for use_triton in (True, False):
        with nan_filled():
            found = norm(x, EPS, strided(bias), use_triton=use_triton)
        for a, b in zip(found, exact, strict=True):
            assert_close(a, b)
    assert_close(torch.ops.vtk_kernels.norm(x.cpu().double(), EPS, bias.cpu().double())[0], exact[0].cpu())
    leaves = [t.cpu().double().requires_grad_() for t in (x[:1, :2, :5], bias[:5])]
    assert torch.autograd.gradcheck(lambda x, b: torch.ops.vtk_kernels.norm(x, EPS, b)[0], leaves)
    with pytest.raises(ValueError, match=r"`bias` is \(3,\) torch.float32; it must be \(40,\), floating point"):
        norm(x, EPS, bias[:3])

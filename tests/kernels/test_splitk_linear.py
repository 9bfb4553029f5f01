import sys

import pytest
import torch
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
    nan_filled,
    needs_kernel,
    strided,
)
from vtk_kernels import LAUNCHES
from vtk_kernels.add_norm import add_norm
from vtk_kernels.splitk_linear import splitk_linear, splitk_linear_ref

OPS = torch.ops.vtk_kernels
CASES = [
    (1, 64, 64, 1),
    (2, 128, 70, 2),
    (17, 100, 10, 3),
    (40, 1000, 33, 4),
    (65, 192, 96, 2),
    (3, 7, 5, 4),
    (0, 64, 8, 2),
]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("rows,size,features,splits", CASES)
def test_reference_sums_to_the_product(rows: int, size: int, features: int, splits: int) -> None:
    x, w = torch.randn(rows, size, dtype=torch.float64), torch.randn(features, size, dtype=torch.float64)
    partials = splitk_linear_ref(x, w, splits)
    assert partials.shape == (splits, rows, features) and partials.dtype == torch.float64
    assert_close(partials.sum(0), torch.einsum("tk,fk->tf", x, w))


@needs_kernel
@pytest.mark.parametrize("rows,size,features,splits", CASES)
def test_kernel_sums_to_the_product(rows: int, size: int, features: int, splits: int) -> None:
    x, w = draw(rows, size), draw(features, size)
    with nan_filled():
        partials = splitk_linear(x, w, splits, use_triton=True)
    assert partials.shape == (splits, rows, features) and partials.is_contiguous()
    assert_close(partials, splitk_linear_ref(x.double(), w.double(), splits))
    assert_close(partials.sum(0), torch.einsum("tk,fk->tf", x.double(), w.double()))


@needs_kernel
def test_each_slice_holds_its_own_columns() -> None:
    x, w = draw(5, 384), draw(8, 384)
    for dropped in range(3):
        one = x.clone()
        one[:, 128 * dropped : 128 * (dropped + 1)] = 0
        partials = splitk_linear(one, w, 3, use_triton=True)
        assert [bool((part == 0).all()) for part in partials] == [s == dropped for s in range(3)]


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_keeps_fp32_sums(dtype: torch.dtype) -> None:
    x, w = draw(20, 300, dtype=dtype), draw(50, 300, dtype=dtype)
    partials = splitk_linear(x, w, 3, use_triton=True)
    expected = torch.einsum("tk,fk->tf", x.double(), w.double())
    assert partials.dtype == torch.float32
    assert_close(partials.sum(0), expected, 2e-6)
    assert_no_worse(partials.sum(0).to(dtype), expected, x @ w.T)


@needs_kernel
def test_add_norm_closes_the_product() -> None:
    x, h, w, bias = draw(2, 3, 96), draw(2, 3, 384), draw(96, 384) / 20, draw(96)
    y, x_hat, _ = add_norm(x, None, 1e-6, splitk_linear(h, w, 4, use_triton=True), bias, use_triton=True)
    expected = x.double() + torch.nn.functional.linear(h.double(), w.double(), bias.double())
    assert_close(y, expected, 2e-6)
    assert_close(x_hat, torch.nn.functional.layer_norm(expected, (96,), eps=1e-6), 2e-6)


@needs_kernel
def test_strided_operands() -> None:
    x, w = draw(4, 5, 100), draw(9, 100)
    for a, b in ((x[:, :1], w), (strided(x), strided(w)), (x.transpose(0, 1), draw(100, 9).T)):
        partials = splitk_linear(a, b, 2, use_triton=True)
        assert_close(partials, splitk_linear_ref(a.double(), b.double(), 2))


@needs_kernel
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 70), size=st.integers(1, 260), features=st.integers(1, 80), splits=st.integers(1, 5))
def test_any_shape(rows: int, size: int, features: int, splits: int) -> None:
    x, w = draw(rows, size), draw(features, size)
    with nan_filled():
        partials = splitk_linear(x, w, splits, use_triton=True)
    assert error(partials, splitk_linear_ref(x.double(), w.double(), splits)) < 2e-6


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, sys.modules[splitk_linear.__module__])
    splitk_linear(draw(3, 70), draw(5, 70), 2, use_triton=True)
    assert len(started) == LAUNCHES["splitk_linear"]


@pytest.mark.parametrize("run", [splitk_linear, OPS.splitk_linear], ids=["reference", "operator"])
def test_gradients(run: object) -> None:
    assert callable(run)
    x = torch.randn(2, 3, 70, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 70, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: run(x, w, 3), (x, w))


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operator_keeps_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x, w = torch.randn(2, 3, 70, dtype=dtype), torch.randn(4, 70, dtype=dtype)
    torch.library.opcheck(
        OPS.splitk_linear.default, (x.requires_grad_(), w.clone().requires_grad_(), 2), test_utils=checks
    )
    torch.library.opcheck(OPS.splitk_linear.default, (strided(x.detach()), strided(w), 3), test_utils=checks)


def test_compiles_without_a_break() -> None:
    x, w = torch.randn(5, 100, requires_grad=True), torch.randn(8, 100, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return (OPS.splitk_linear(x * 2, w, 2).sum(0) ** 2).sum()

    torch.compile(step, fullgraph=True, backend="aot_eager")(x, w).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    loss = (torch.einsum("tk,fk->tf", 2 * wide[0], wide[1]) ** 2).sum()
    for found, expected in zip((x, w), torch.autograd.grad(loss, wide), strict=True):
        assert found.grad is not None
        assert_close(found.grad, expected, 5e-6)


@pytest.mark.parametrize(
    "x,w,splits,said",
    [
        (torch.ones(2, 8), torch.ones(3, 7), 2, r"`w` is \(3, 7\) torch.float32; it must be \(F, 8\) torch.float32"),
        (torch.ones(2, 8), torch.ones(8), 2, r"`w` is \(8,\)"),
        (torch.ones(2, 8), torch.ones(3, 8).half(), 2, r"`w` is \(3, 8\) torch.float16; it must be"),
        (torch.ones(2, 8), torch.ones(3, 8), 0, r"`splits` \(0\) must be at least 1"),
        (torch.ones(2, 8).int(), torch.ones(3, 8).int(), 1, "`x` must be floating point"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, w: Tensor, splits: int, said: str) -> None:
    for run in (splitk_linear, OPS.splitk_linear):
        with pytest.raises(ValueError, match=said):
            run(x, w, splits)

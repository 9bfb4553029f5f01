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
from vtk_kernels.add_norm import _add_norm_launch, add_norm, add_norm_backward_ref, add_norm_ref
from vtk_kernels.norm import norm_backward_launch

EPS = 1e-6
OPS = torch.ops.vtk_kernels
SHAPES = [(1, 1, 64), (2, 17, 100), (3, 1, 1), (4, 1000), (0, 5, 48)]


def formula(x: Tensor, r: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor, Tensor]:
    y = x.double() + r.double()
    centred = y - y.sum(-1, keepdim=True) / y.shape[-1]
    rstd = 1 / ((centred**2).sum(-1) / y.shape[-1] + eps).sqrt()
    return y, centred * rstd[..., None], rstd


def formula_gradient(x: Tensor, r: Tensor, gy: Tensor, gh: Tensor) -> Tensor:
    x = x.detach().double().requires_grad_()
    return torch.autograd.grad(formula(x, r)[:2], x, (gy.double(), gh.double()))[0]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * 2 + 0.5).to(dtype)


def like_r(partials: Tensor, bias: Tensor | None) -> Tensor:
    r = partials.double().sum(0)
    return r if bias is None else r + bias.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_is_the_formula(shape: tuple[int, ...]) -> None:
    x, r, gy, gh = (torch.randn(shape, dtype=torch.float64) for _ in range(4))
    for actual, expected in zip(add_norm_ref(x, r, EPS), formula(x, r), strict=True):
        assert_close(actual, expected)
    _, x_hat, rstd = formula(x, r)
    assert_close(add_norm_backward_ref(gy, gh, x_hat, rstd), formula_gradient(x, r, gy, gh), 2e-10)
    partials, bias = torch.randn(3, *shape, dtype=torch.float64), torch.randn(shape[-1], dtype=torch.float64)
    for actual, expected in zip(
        add_norm_ref(x, None, EPS, partials, bias), formula(x, like_r(partials, bias)), strict=True
    ):
        assert_close(actual, expected)


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_formula(shape: tuple[int, ...]) -> None:
    x, r, gy, gh = (draw(*shape) for _ in range(4))
    with nan_filled():
        y, x_hat, rstd = add_norm(x, r, EPS, use_triton=True)
        g = norm_backward_launch(gh, x_hat, rstd, gy)
    for actual, expected in zip((y, x_hat, rstd), formula(x, r), strict=True):
        assert actual.is_contiguous()
        assert_close(actual, expected)
    if shape[-1] > 1:  # one channel has no deviation: rounding of x̂ = 0 meets rstd = 1000
        assert_close(g, formula_gradient(x, r, gy, gh), 2e-6)


@needs_kernel
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_partials_are_summed_in_order(splits: int, with_bias: bool) -> None:
    x, partials = draw(2, 3, 100), draw(splits, 2, 3, 100)
    partials[0] *= 1e4  # the order of additions shows in the bits
    bias = draw(100) if with_bias else None
    with nan_filled():
        found = add_norm(x, None, EPS, partials, bias, use_triton=True)
    for actual, expected in zip(found, formula(x, like_r(partials, bias)), strict=True):
        assert_close(actual, expected, 5e-6)
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    total = total if bias is None else total + bias
    assert torch.equal(found[0], x + total)
    assert torch.equal(found[0], add_norm(x, None, EPS, partials, bias)[0])


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_kernel_in_half_precision_is_as_good_as_torch(dtype: torch.dtype) -> None:
    x, r, gy, gh = (draw(2, 9, 384, dtype=dtype) for _ in range(4))
    y, x_hat, rstd = add_norm(x, r, EPS, use_triton=True)
    assert (y.dtype, x_hat.dtype, rstd.dtype) == (dtype, dtype, torch.float32)
    leaf = x.clone().requires_grad_()
    plain_y = leaf + r
    plain = F.layer_norm(plain_y, (384,), eps=EPS)
    expected = formula(x, r)
    assert_no_worse(y, expected[0], plain_y)
    assert_no_worse(x_hat, expected[1], plain)
    assert_close(rstd, expected[2])
    plain_gradient = torch.autograd.grad((plain_y, plain), leaf, (gy, gh))[0]
    assert_no_worse(norm_backward_launch(gh, x_hat, rstd, gy), formula_gradient(x, r, gy, gh), plain_gradient)
    partials, bias = draw(3, 2, 9, 384), draw(384, dtype=dtype)
    y, x_hat, _ = add_norm(x, None, EPS, partials, bias, use_triton=True)
    expected = formula(x, like_r(partials, bias))
    plain_y = x + (partials.sum(0).to(dtype) + bias)
    assert_no_worse(y, expected[0], plain_y)
    assert_no_worse(x_hat, expected[1], F.layer_norm(plain_y, (384,), eps=EPS))


@needs_kernel
@pytest.mark.parametrize("use_triton", [False, True])
def test_rows_that_cancel_give_zero(use_triton: bool) -> None:
    x = draw(3, 100)
    y, x_hat, rstd = add_norm(x, -x, EPS, use_triton=use_triton)
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(x_hat, torch.zeros_like(y))
    assert_close(rstd, torch.full((3,), EPS**-0.5))


@needs_kernel
def test_strided_rows() -> None:
    tokens = draw(3, 17, 40)
    r = strided(draw(3, 1, 40))
    for x, added in ((tokens[:, :1], r), (tokens[:, 4:5], tokens[:, :1]), (strided(tokens)[:, :1], r)):
        y, x_hat, rstd = add_norm(x, added, EPS, use_triton=True)
        for actual, expected in zip((y, x_hat, rstd), formula(x, added), strict=True):
            assert actual.is_contiguous()
            assert_close(actual, expected)
        gh = draw(40).expand(3, 1, 40)
        gy = tokens[:, 6:7]
        assert_close(norm_backward_launch(gh, x_hat, rstd, gy), formula_gradient(x, added, gy, gh), 2e-6)
    partials = strided(draw(2, 3, 1, 40))
    y = add_norm(tokens[:, :1], None, EPS, partials, strided(draw(40)) * 0, use_triton=True)[0]
    assert_close(y, tokens[:, :1].double() + partials.double().sum(0))


@needs_kernel
@pytest.mark.parametrize("shape", [(4, 3, 40), (2, 1, 64), (3, 100), (0, 5, 48)], ids=str)
def test_a_table_repeats_over_the_batch(shape: tuple[int, ...]) -> None:
    table, r, partials, bias = draw(1, *shape[1:]), draw(*shape), draw(2, *shape), draw(shape[-1])
    for x in (table, strided(table)):
        for one, *parts in ((r,), (None, partials, bias)):
            with nan_filled():
                found = add_norm(x, one, EPS, *parts, use_triton=True)
            added = like_r(partials, bias) if one is None else r
            plain = add_norm(x, one, EPS, *parts, use_triton=False)
            for actual, same, expected in zip(found, plain, formula(x, added), strict=True):
                assert actual.is_contiguous()
                assert_close(actual, expected, 5e-6)
                assert_close(same, expected, 5e-6)


@needs_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_table_in_half_precision_gives_the_bits_of_its_copies(dtype: torch.dtype) -> None:
    table, r = draw(1, 9, 384, dtype=dtype), draw(3, 9, 384, dtype=dtype)
    copies = add_norm(table.expand(3, -1, -1), r, EPS, use_triton=True)
    for found, expected in zip(add_norm(table, r, EPS, use_triton=True), copies, strict=True):
        assert torch.equal(found, expected)


@needs_kernel
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(0, 9), channels=st.integers(4, 300), splits=st.integers(0, 4))
def test_any_shape(rows: int, channels: int, splits: int) -> None:
    x, bias = draw(rows, channels), draw(channels) if splits % 2 else None
    r, partials = (None, draw(splits, rows, channels)) if splits else (draw(rows, channels), None)
    with nan_filled():
        found = _add_norm_launch(x, r, EPS, partials, bias)
    expected = formula(x, r if partials is None else like_r(partials, bias))
    for actual, want in zip(found, expected, strict=True):
        assert_close(actual, want, 5e-6)


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [sys.modules[f.__module__] for f in (add_norm, norm_backward_launch)]
    started = count_launches(monkeypatch, *modules)
    x = draw(2, 16)
    y, x_hat, rstd = add_norm(x, None, EPS, draw(3, 2, 16), draw(16), use_triton=True)
    assert len(started) == LAUNCHES["add_norm"]
    norm_backward_launch(y, x_hat, rstd, y)
    assert len(started) == LAUNCHES["add_norm"] + LAUNCHES["add_norm_backward"]


@pytest.mark.parametrize("run", [add_norm, OPS.add_norm], ids=["reference", "operator"])
def test_gradients(run: object) -> None:
    assert callable(run)
    x, r = (torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, r: run(x, r, EPS), (x, r))
    assert torch.autograd.gradcheck(lambda x, r: run(x, r, EPS)[0], (x, r))
    assert torch.autograd.gradcheck(lambda x, r: run(x, r, EPS)[1], (x, r))
    partials = torch.randn(2, 2, 3, 7, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, p, b: run(x, None, EPS, p, b), (x, partials, bias))
    assert not run(x, r, EPS)[2].requires_grad
    table = torch.randn(1, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, r: run(x, r, EPS), (table, r))
    assert torch.autograd.gradcheck(lambda x, p, b: run(x, None, EPS, p, b), (table, partials, bias))
    assert torch.autograd.gradcheck(lambda r: run(table.detach(), r, EPS), r)


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operators_keep_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    x = torch.randn(2, 3, 16, dtype=dtype)
    op = OPS.add_norm.default
    torch.library.opcheck(op, (x.clone().requires_grad_(), x.clone().requires_grad_(), EPS), test_utils=checks)
    torch.library.opcheck(op, (strided(x), x.transpose(0, 1).reshape(2, 3, 16), EPS), test_utils=checks)
    torch.library.opcheck(
        op, (x.transpose(0, 1), None, EPS, torch.randn(2, 3, 2, 16), torch.randn(16, dtype=dtype)), test_utils=checks
    )
    torch.library.opcheck(op, (x[:1].clone().requires_grad_(), x.clone().requires_grad_(), EPS), test_utils=checks)
    _, x_hat, rstd = add_norm(x, x, EPS)
    torch.library.opcheck(OPS.add_norm_backward.default, (x, strided(x), x_hat, rstd), test_utils=checks)


def test_compiles_without_a_break() -> None:
    x, r = (torch.randn(2, 5, 16, requires_grad=True) for _ in range(2))

    def step(x: Tensor, r: Tensor) -> Tensor:
        y, x_hat, _ = OPS.add_norm(x * 2, r, EPS)
        return (y**2).sum() + (x_hat**3).sum()

    torch.compile(step, fullgraph=True, backend="aot_eager")(x, r).backward()
    wide = [t.detach().double().requires_grad_() for t in (x, r)]
    y, x_hat, _ = formula(2 * wide[0], wide[1])
    for found, expected in zip((x, r), torch.autograd.grad((y**2).sum() + (x_hat**3).sum(), wide), strict=True):
        assert found.grad is not None
        assert_close(found.grad, expected, 5e-6)


X, R, P, B = torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 2, 3, 4), torch.ones(4)


@pytest.mark.parametrize(
    "args,said",
    [
        ((X, None, EPS), "give one of `r` and `partials`, not neither"),
        ((X, R, EPS, P), "give one of `r` and `partials`, not both"),
        ((X, R[:1], EPS), r"`r` is \(1, 3, 4\) torch.float32; it must be like `x`"),
        ((X[:1, :2], R, EPS), r"`r` is \(2, 3, 4\) torch.float32; it must be like `x`, \(1, 2, 4\)"),
        ((X[0, :1], R, EPS), r"it must be like `x`, \(1, 4\)"),
        ((X[:, :1], None, EPS, P), r"must be \(S, \*\(2, 1, 4\)\)"),
        ((X, R.double(), EPS), r"torch.float64; it must be like `x`, \(2, 3, 4\) torch.float32"),
        ((X, None, EPS, P[:, :1]), r"`partials` is \(2, 1, 3, 4\).* must be \(S, \*\(2, 3, 4\)\) torch.float32"),
        ((X, None, EPS, P[:0]), "with S ≥ 1"),
        ((X, None, EPS, P.half()), "`partials` is .* torch.float16"),
        ((X, None, EPS, P, B[:3]), r"`bias` is \(3,\); it must be \(4,\)"),
        ((X, R, EPS, None, B), "stand beside `partials`; add it to `r` otherwise"),
        ((X.long(), R.long(), EPS), "`x` must be floating point"),
    ],
)
def test_what_does_not_fit_is_refused(args: tuple[object, ...], said: str) -> None:
    for run in (add_norm, OPS.add_norm):
        with pytest.raises(ValueError, match=said):
            run(*args)

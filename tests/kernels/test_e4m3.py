"""e4m3 with a scale per row: against an encoder written from the bits of the format, in fp64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels._cases import ALL, DEVICE, HALF, assert_close, count_launches, nan_filled, needs_kernel, strided
from vtk_kernels import LAUNCHES, _e4m3
from vtk_kernels import add_norm_e4m3 as add_norm_module
from vtk_kernels import quantize_rows as quantize_module
from vtk_kernels._triton import tl, triton
from vtk_kernels.add_norm import add_norm
from vtk_kernels.add_norm_e4m3 import add_norm_e4m3
from vtk_kernels.quantize_rows import quantize_rows

EPS = 1e-6
OPS = torch.ops.vtk_kernels


def decoded(code: int) -> float:
    """Return the number of a byte from the layout: sign, four bits of exponent of bias 7, three of mantissa."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


NUMBERS = torch.tensor([decoded(code) for code in range(127)], dtype=torch.float64)
"""Of the bytes 0x00 to 0x7e, ascending."""


def nearest(x: Tensor) -> Tensor:
    """Return the bytes of the numbers nearest to x, of two equally near ones the even; beyond 448 the largest."""
    size = x.double().abs().cpu()
    above = torch.bucketize(size, NUMBERS).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = NUMBERS[above] - size, size - NUMBERS[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | torch.where(x.cpu().signbit(), 0x80, 0)).to(torch.uint8)


def ties() -> Tensor:
    """Return all numbers, all middles of two neighbours, and what lies next to them in fp32."""
    points = torch.cat((NUMBERS, (NUMBERS[1:] + NUMBERS[:-1]) / 2)).float()
    zero, far = torch.zeros(1), torch.tensor(math.inf)
    points = torch.cat((points, points.nextafter(far), points.nextafter(zero)))
    points = points[points <= 448]
    return torch.cat((points, -points))


@triton.jit
def _encode_kernel(code_ptr, v_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(code_ptr + at, _e4m3.encode(tl.load(v_ptr + at), False))


def test_every_byte_is_the_number_of_its_bits() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(_e4m3.E4M3).double()
    expected = torch.tensor([decoded(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(every.nan_to_num(999), expected.nan_to_num(999))
    assert Fraction(every[1].item()) == Fraction(1, 512) and every[126] == _e4m3.LARGEST


@needs_kernel
def test_rounding_is_to_the_nearest_number_and_of_ties_to_the_even_one() -> None:
    points = ties()
    assert torch.equal(points.to(_e4m3.E4M3).view(torch.uint8), nearest(points))  # of the reference
    v = torch.zeros(2048)
    v[: len(points)] = points
    codes = torch.empty(2048, dtype=torch.uint8, device=DEVICE)
    _encode_kernel[(1,)](codes, v.to(DEVICE), BLOCK=2048)
    assert torch.equal(codes.cpu(), nearest(v))


def rows(*, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of sizes from 1e-6 to 1e3, with one of zeros, one with −0, one of one outlier."""
    x = torch.randn(12, 40) * torch.logspace(-6, 3, 12)[:, None]
    x[3], x[4, 7], x[5, 9] = 0, -0.0, 1e4
    return x.to(DEVICE, dtype)


def check_rows(v: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Compare with max|v| / 448 in fp64, and the codes with those nearest to v over that scale, up to fp32's rounding.

    A quotient that is a hair from a tie may fall to either side; it is compared by value.
    """
    largest = v.double().abs().amax(-1)
    assert_close(scale, largest.clamp_min(2.0**-100) / 448, 1.2e-7)
    exact = v.double() / scale.double()[:, None]
    got, size = codes.double(), exact.abs()
    step = torch.where(size < 2.0**-6, 2.0**-9, 2.0 ** (size.clamp_min(2.0**-6).log2().floor() - 3))
    assert ((got - exact).abs() <= step * 0.5 * (1 + 1e-5) + 448 * 2e-7).all()
    assert torch.equal(codes.view(torch.uint8).cpu() >> 7, v.cpu().signbit().to(torch.uint8))


@pytest.mark.parametrize("way", ["reference", pytest.param("kernel", marks=needs_kernel)])
def test_a_row_is_its_codes_times_its_scale(way: str) -> None:
    x = rows()
    with nan_filled():
        codes, scale = quantize_rows(strided(x), use_triton=way == "kernel")
    assert codes.shape == x.shape and codes.is_contiguous() and scale.dtype == torch.float32
    check_rows(x, codes, scale)
    assert not codes[3].float().any() and codes[4].view(torch.uint8)[7] == 0x80  # zeros, and minus zero
    largest = x.abs().argmax(1)
    assert (codes.float().abs().gather(1, largest[:, None])[torch.arange(12) != 3] == 448).all()
    assert codes[5].float().abs().sort().values[-2] < 1  # of a row with an outlier


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@needs_kernel
def test_kernel_and_reference_give_the_same_bytes(dtype: torch.dtype) -> None:
    x, r = rows(dtype=dtype), torch.randn(12, 40).to(DEVICE, dtype)
    for one, other in zip(quantize_rows(x, use_triton=True), quantize_rows(x, use_triton=False), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    y, codes, scale = add_norm_e4m3(x, r, EPS, use_triton=True)
    y_ref, codes_ref, scale_ref = add_norm_e4m3(x, r, EPS, use_triton=False)
    assert torch.equal(y, y_ref)
    assert_close(scale, scale_ref, 1e-6)  # sums of a row in another order
    assert (codes.view(torch.uint8) != codes_ref.view(torch.uint8)).double().mean() <= 1e-3


def test_quotients_are_rounded_once() -> None:
    largest = torch.rand(4000).numpy() + np.float32(0.5)
    factor = np.float32(448) / largest  # numpy divides as IEEE 754 says
    tie = np.float32(17)  # between 16, whose last bit is 0, and 18
    v = tie / factor
    at_tie = (v * factor == tie) & (v * (np.float32(1) / largest * np.float32(448)) > tie)
    assert at_tie.sum() > 20
    x = torch.from_numpy(np.stack((largest, v), 1)[at_tie])
    codes, scale = quantize_rows(x)
    assert torch.equal(scale, torch.from_numpy((largest / np.float32(448))[at_tie]))
    assert (codes.float()[:, 0] == 448).all() and (codes.float()[:, 1] == 16).all()


@pytest.mark.parametrize("way", ["reference", pytest.param("kernel", marks=needs_kernel)])
def test_the_norm_of_the_sum_is_what_is_rounded(way: str) -> None:
    x, r = torch.randn(7, 96, device=DEVICE) * 3 + 1, torch.randn(7, 96, device=DEVICE)
    y, codes, scale = add_norm_e4m3(x, r, EPS, use_triton=way == "kernel")
    total = x.double() + r.double()
    v = F.layer_norm(total, (96,), eps=EPS)
    assert_close(y, total)
    assert_close(scale, v.abs().amax(1) / 448, 1e-6)
    assert (codes.double() * scale.double()[:, None] - v).abs().max() <= 448 / 28 * scale.max()
    assert torch.equal(y, add_norm(x, r, EPS, use_triton=False)[0])


@pytest.mark.parametrize("way", ["reference", pytest.param("kernel", marks=needs_kernel)])
def test_gelu_is_rounded_and_not_what_it_is_of(way: str) -> None:
    x = torch.randn(9, 128, device=DEVICE) * 2
    codes, scale = quantize_rows(x, gelu=True, use_triton=way == "kernel")
    v = x.double() * torch.special.ndtr(x.double())
    assert_close(scale, v.abs().amax(1) / 448, 1e-6)
    exact = v / scale.double()[:, None]
    step = torch.where(exact.abs() < 2.0**-6, 2.0**-9, exact.abs() / 8)
    assert ((codes.double() - exact).abs() <= 0.5 * step + 1e-3).all()


@pytest.mark.parametrize("way", ["reference", pytest.param("kernel", marks=needs_kernel)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_numbers_touches_no_other_row(way: str, bad: float) -> None:
    x = rows()
    x[4, 7] = 0.5
    before = quantize_rows(x, use_triton=way == "kernel"), add_norm_e4m3(x, x, EPS, use_triton=way == "kernel")
    x[11, 5] = bad
    after = quantize_rows(x, use_triton=way == "kernel"), add_norm_e4m3(x, x, EPS, use_triton=way == "kernel")
    others = torch.arange(12) != 11
    for one, other in zip(before, after, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a[others].view(torch.uint8), b[others].view(torch.uint8))
    for *_, scale in after:
        assert scale[11].isnan() and scale[others].isfinite().all()


@pytest.mark.parametrize("way", ["reference", pytest.param("kernel", marks=needs_kernel)])
def test_the_least_and_the_largest_rows_have_finite_scales(way: str) -> None:
    x = torch.zeros(4, 16, device=DEVICE)
    x[0], x[1], x[2, 3], x[3] = 1e-40, 2.0**-99, torch.finfo(torch.float32).max, 1.0
    codes, scale = quantize_rows(x, use_triton=way == "kernel")
    assert scale.isfinite().all() and (scale > 0).all()
    back = codes.float() * scale[:, None]
    assert torch.equal(back[1:, 3], x[1:, 3]) or ((back[1:, 3] / x[1:, 3] - 1).abs() <= 2e-7).all()
    assert not back[0].any()


def test_a_row_does_not_depend_on_the_others_of_its_call() -> None:
    x, r = torch.randn(5, 3, 64).bfloat16(), torch.randn(5, 3, 64).bfloat16()
    whole = (*quantize_rows(x, gelu=True), *add_norm_e4m3(x, r, EPS))
    for i in range(5):
        alone = (*quantize_rows(x[i : i + 1], gelu=True), *add_norm_e4m3(x[i : i + 1], r[i : i + 1], EPS))
        assert all(torch.equal(a[i : i + 1].view(torch.uint8), b.view(torch.uint8))
                   for a, b in zip(whole, alone, strict=True))  # fmt: skip


def test_the_operators_pass_torchs_own_checks() -> None:
    x = torch.randn(2, 5, 48)
    checks = tuple(name for name in ALL if name != "test_autograd_registration")
    torch.library.opcheck(OPS.quantize_rows.default, (x, True), test_utils=checks)
    torch.library.opcheck(OPS.add_norm_e4m3.default, (x, x, EPS), test_utils=checks)


@needs_kernel
def test_one_kernel_is_started_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, quantize_module, add_norm_module)
    x = torch.randn(2, 5, 48, device=DEVICE)
    quantize_rows(x, gelu=True, use_triton=True)
    add_norm_e4m3(x, x, EPS, use_triton=True)
    quantize_rows(x[:0], use_triton=True)
    assert len(started) == 2 == LAUNCHES["quantize_rows"] + LAUNCHES["add_norm_e4m3"]


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="float64"):
        quantize_rows(x.double())
    with pytest.raises(ValueError, match="floating point"):
        quantize_rows(x.int())
    with pytest.raises(ValueError, match="must be like `x`"):
        add_norm_e4m3(x, x[:1], EPS)

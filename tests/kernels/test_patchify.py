import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels._cases import ALL, DEVICE, HALF, assert_close, count_launches, nan_filled, needs_kernel, strided
from vtk_kernels import LAUNCHES
from vtk_kernels.patchify import patchify, patchify_backward_ref

OPS = torch.ops.vtk_kernels
CASES = [
    # batch, chans, height, width, patch, prefix, width of the result past its patches
    (2, 3, 32, 32, (16, 16), 1, 0),
    (1, 3, 28, 42, (14, 14), 5, 4),
    (2, 1, 16, 8, (8, 4), 0, 16),
    (3, 4, 12, 20, (4, 5), 2, 3),
    (1, 2, 7, 300, (7, 3), 0, 0),  # wider than a tile
    (1, 3, 70, 5, (1, 5), 1, 1),
    (1, 1, 1, 1, (1, 1), 0, 0),
    (2, 3, 32, 32, (32, 32), 1, 0),
    (0, 3, 8, 8, (4, 4), 1, 0),
]


def formula(images: Tensor, patch: tuple[int, int], prefix: int, width: int) -> Tensor:
    """Element by element, as the module's text says."""
    batch, chans, height, wide = images.shape
    ph, pw = patch
    across = wide // pw
    rows = images.new_zeros(batch, prefix + height // ph * across, width)
    for c in range(chans):
        for y in range(height):
            for x in range(wide):
                row = prefix + y // ph * across + x // pw
                rows[:, row, (c * ph + y % ph) * pw + x % pw] = images[:, c, y, x]
    return rows


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_formula(case: tuple[int, int, int, int, tuple[int, int], int, int]) -> None:
    *shape, patch, prefix, spare = case
    images = torch.randn(shape, dtype=torch.float64)
    width = shape[1] * patch[0] * patch[1] + spare
    rows = patchify(images, patch, prefix, width)
    assert rows.is_contiguous() and torch.equal(rows, formula(images, patch, prefix, width))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_the_formula(case: tuple[int, int, int, int, tuple[int, int], int, int], dtype: torch.dtype) -> None:
    *shape, patch, prefix, spare = case
    images = torch.randn(shape, device=DEVICE).to(dtype)
    width = shape[1] * patch[0] * patch[1] + spare
    with nan_filled():
        rows = patchify(images, patch, prefix, width, use_triton=True)
    assert rows.dtype == dtype and rows.is_contiguous()
    assert torch.equal(rows, formula(images, patch, prefix, width))


@pytest.mark.parametrize("patch", [(4, 4), (7, 3)])
@pytest.mark.parametrize("use_triton", [False, pytest.param(True, marks=needs_kernel)])
def test_rows_times_the_flat_weight_are_the_convolution(patch: tuple[int, int], use_triton: bool) -> None:
    images = torch.randn(2, 3, 28, 12, device=DEVICE)
    weight = torch.randn(5, 3, *patch, device=DEVICE, dtype=torch.float64)
    rows = patchify(images, patch, use_triton=use_triton)
    tokens = F.conv2d(images.double(), weight, stride=patch).flatten(2).transpose(1, 2)
    assert_close(rows.double() @ weight.flatten(1).T, tokens)


@needs_kernel
def test_any_strides() -> None:
    images = torch.randn(3, 4, 12, 20, device=DEVICE)
    for case in (
        images.contiguous(memory_format=torch.channels_last),
        images[::2, 1:, 4:, :12],
        strided(images),
        images.flip(0).transpose(0, 1)[:2],
        images[:1].expand(3, -1, -1, -1),
        images[:1, :1],
    ):
        with nan_filled():
            rows = patchify(case, (4, 4), 1, use_triton=True)
        assert torch.equal(rows, formula(case, (4, 4), 1, rows.shape[2]))


@needs_kernel
@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)),
    patch=st.tuples(st.integers(1, 17), st.integers(1, 33)),
    prefix=st.integers(0, 3),
    spare=st.integers(0, 20),
)
def test_any_shape(shape: tuple[int, int, int, int], patch: tuple[int, int], prefix: int, spare: int) -> None:
    batch, chans, down, across = shape
    images = torch.randn(batch, chans, down * patch[0], across * patch[1], device=DEVICE)
    width = chans * patch[0] * patch[1] + spare
    with nan_filled():
        rows = patchify(images, patch, prefix, width, use_triton=True)
    assert torch.equal(rows, patchify(images, patch, prefix, width, use_triton=False))


@needs_kernel
def test_launches_are_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, sys.modules[patchify.__module__])
    patchify(torch.randn(2, 3, 8, 8, device=DEVICE), (4, 4), 1, 64, use_triton=True)
    assert len(started) == LAUNCHES["patchify"]


@pytest.mark.parametrize("run", [patchify, OPS.patchify], ids=["reference", "operator"])
def test_gradient_is_the_adjoint(run: object) -> None:
    assert callable(run)
    images = torch.randn(2, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: run(x, (2, 3), 1, 16), images)
    assert torch.autograd.gradgradcheck(lambda x: run(x, (2, 3), 1, 16) ** 2, images)
    rows = run(images, (2, 3), 1, 16)
    g = torch.randn_like(rows)
    found = patchify_backward_ref(g, images.shape, (2, 3), 1)
    assert found.is_contiguous()
    assert_close((found * images).sum(), (g * rows).sum())


@pytest.mark.parametrize(
    "dtype,checks", [(torch.float32, ALL), (torch.bfloat16, "test_faketensor")], ids=["float32", "bfloat16"]
)
def test_operator_keeps_torchs_contract(dtype: torch.dtype, checks: str | tuple[str, ...]) -> None:
    images = torch.randn(2, 3, 8, 12, dtype=dtype)
    for case in (images.clone().requires_grad_(), strided(images), images.to(memory_format=torch.channels_last)):
        torch.library.opcheck(OPS.patchify.default, (case, [4, 6], 1, 80), test_utils=checks)
    torch.library.opcheck(OPS.patchify.default, (images, [1, 1], 0, 3), test_utils=checks)


def test_compiles_without_a_break() -> None:
    images, weight = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(5, 48)

    def step(images: Tensor) -> Tensor:
        return (F.linear(OPS.patchify(images * 2, (4, 4), 1, 48), weight) ** 2).sum()

    torch.compile(step, fullgraph=True, backend="aot_eager")(images).backward()
    wide = images.detach().double().requires_grad_()
    plain = (F.conv2d(wide * 2, weight.double().view(5, 3, 4, 4), stride=4) ** 2).sum()
    assert images.grad is not None
    assert_close(images.grad, torch.autograd.grad(plain, wide)[0], 5e-6)


X = torch.ones(2, 3, 8, 12)


@pytest.mark.parametrize(
    "args,said",
    [
        ((X.long(), (4, 4), 0, 48), "`images` must be floating point, not torch.int64"),
        ((X[0], (4, 4), 0, 48), r"`images` is \(3, 8, 12\); it must be \(B, chans, H, W\)"),
        ((X[:, :0], (4, 4), 0, 48), "with at least one channel"),
        ((X, (0, 4), 0, 48), r"`patch` is \(0, 4\); it must be a height and a width, each at least 1"),
        ((X, (4, 4, 4), 0, 48), r"`patch` is \(4, 4, 4\)"),
        ((X, (4, 5), 0, 60), r"`images` is \(2, 3, 8, 12\); .* multiples of the patch, 4 × 5: resize or pad it"),
        ((X[:, :, :0], (4, 4), 0, 48), "must be multiples of the patch"),
        ((X, (4, 4), -1, 48), r"`prefix` \(-1\) must be at least 0"),
        ((X, (4, 4), 0, 47), r"`width` \(47\) must be at least the elements of a patch, 48"),
    ],
)
def test_what_does_not_fit_is_refused(args: tuple[object, ...], said: str) -> None:
    for run in (patchify, OPS.patchify):
        with pytest.raises(ValueError, match=said):
            run(*args)


def test_use_triton_where_it_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="not float64"):
        patchify(X.double(), (4, 4), use_triton=True)
    with pytest.raises(ValueError, match="it must be"):
        patchify(X[0], (4, 4))

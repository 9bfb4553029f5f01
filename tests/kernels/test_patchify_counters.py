import sys

import pytest
import torch

from tests.kernels._cases import DEVICE, count_launches, needs_kernel
from vtk_kernels._dispatch import LAUNCHES
from vtk_kernels.patchify import patchify
from vtk_kernels.patchify_counters import patchify_counters

OPS = torch.ops.vtk_kernels


@needs_kernel
@pytest.mark.parametrize("batch,prefix,width,counters", [(1, 0, 48, 7), (3, 1, 64, 1), (2, 0, 48, 1500), (0, 1, 48, 5)])
def test_rows_are_those_of_patchify_and_counters_are_zero(batch: int, prefix: int, width: int, counters: int) -> None:
    images = torch.randn(batch, 3, 8, 12, device=DEVICE)
    full = torch.full((4096,), 7, dtype=torch.int32, device=DEVICE)
    del full  # so that what the allocator gives next is no zero by chance
    rows, zeros = patchify_counters(images, (4, 4), prefix, width, counters, use_triton=True)
    assert torch.equal(rows, patchify(images, (4, 4), prefix, width, use_triton=False))
    assert zeros.shape == (counters,) and zeros.dtype == torch.int32 and not zeros.any()


@needs_kernel
def test_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_launches(monkeypatch, sys.modules[patchify.__module__])
    patchify_counters(torch.randn(1, 3, 8, 8, device=DEVICE), (4, 4), 0, 48, 4, use_triton=True)
    assert len(started) == LAUNCHES["patchify_counters"]


def test_the_operator_keeps_torchs_contract() -> None:
    images = torch.randn(2, 3, 8, 8)
    torch.library.opcheck(OPS.patchify_counters.default, (images, [4, 4], 1, 64, 9), test_utils="test_faketensor")
    rows, zeros = OPS.patchify_counters(images, [4, 4], 1, 64, 9)
    assert torch.equal(rows, patchify(images, (4, 4), 1, 64)) and torch.equal(zeros, torch.zeros(9, dtype=torch.int32))


def test_where_a_gradient_is_wanted_torch_computes() -> None:
    images = torch.randn(1, 3, 8, 8, requires_grad=True)
    rows, zeros = patchify_counters(images, (4, 4), 1, 48, 2)
    rows.sum().backward()
    assert images.grad is not None and bool((images.grad == 1).all()) and not zeros.any()


def test_what_does_not_fit_is_refused() -> None:
    for run in (patchify_counters, OPS.patchify_counters):
        with pytest.raises(ValueError, match=r"`counters` \(0\) must be at least 1"):
            run(torch.ones(1, 3, 8, 8), (4, 4), 0, 48, 0)
        with pytest.raises(ValueError, match="must be multiples of the patch"):
            run(torch.ones(1, 3, 8, 9), (4, 4), 0, 48, 4)

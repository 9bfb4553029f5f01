"""Prefetches of the kernels of a chain before they wait: every byte once; and the launches that are in one."""

import pytest
import torch

from tests.kernels._cases import DEVICE, needs_kernel
from vtk_kernels import _device
from vtk_kernels._triton import tl, triton


@triton.jit
def _share_kernel(out_ptr, size, PROGRAMS: tl.constexpr):  # type: ignore[no-untyped-def]
    pid = tl.program_id(0)
    first, part = _device.share(size, pid, PROGRAMS)
    tl.store(out_ptr + 2 * pid, first)
    tl.store(out_ptr + 2 * pid + 1, part)


@needs_kernel
@pytest.mark.parametrize("size", [1, 129, 4096, 2 * 384 * 3072])
@pytest.mark.parametrize("programs", [1, 7, 96])
def test_shares_are_whole_lines_and_every_byte_is_in_one(size: int, programs: int) -> None:
    out = torch.full((programs, 2), -1, dtype=torch.int32, device=DEVICE)
    _share_kernel[(programs,)](out, size, PROGRAMS=programs)
    taken = [(first, part) for first, part in out.tolist() if part]
    assert all(first % 128 == 0 and part > 0 for first, part in taken)
    ends = [0, *(first + part for first, part in taken)]
    assert [first for first, _ in taken] == ends[:-1] and ends[-1] == size  # none twice, none left out
    assert max(part for _, part in taken) < size / programs + 128


def test_a_weight_is_fetched_in_a_chain_of_few_rows_only() -> None:
    w = torch.empty(64, 32, dtype=torch.float16)
    chain, alone = {"PDL": True, "launch_pdl": True}, {"PDL": False}
    for rows in (1, 197, 8 * 261):
        assert _device.ahead(chain, rows, w) is w
        assert _device.ahead(alone, rows, w) is None  # an older card, the interpreter, a large grid
    assert _device.ahead(chain, 8 * 261 + 1, w) is None
    for scattered in (w.T, w[:, :16], w[::2]):
        assert _device.ahead(chain, 1, scattered) is None


@pytest.mark.parametrize("hopper,programs,wanted", [(True, 1536, True), (True, 1537, False), (False, 1, False)])
def test_launches_are_chained_on_hopper_up_to_a_size(
    hopper: bool, programs: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device, "is_hopper", lambda x: hopper)
    found = _device.chained(torch.empty(1), programs)
    assert found == ({"PDL": True, "launch_pdl": True} if wanted else {"PDL": False})

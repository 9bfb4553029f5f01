"""Copies images from host to device through pinned memory without blocking the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLOTS = 3
"""One is copied, one waits in the stream, one is filled."""


@dataclass
class _Slot:
    memory: Tensor  # uint8, pinned
    done: Any  # event: the end of the last copy from here


class PinnedRing:
    """Buffers in pinned host memory that take turns; each is filled again only after the copy from it is done.

    They grow to the largest input. For one caller at a time.

    Args:
        slots: how many copies may be under way.
    """

    def __init__(self, slots: int = SLOTS) -> None:
        self.slots = slots
        self._ring: list[_Slot] = []
        self._next = 0

    def __reduce__(self) -> tuple[type["PinnedRing"], tuple[int]]:
        """Copy and pickle without buffers."""
        return PinnedRing, (self.slots,)

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(slot.memory.nbytes for slot in self._ring)

    def send(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """Write tensors one behind the other into ``out``, on the current stream; return it before they are there.

        Args:
            parts: (n, ...) on the host; cast to the type of ``out`` on the way. They may be changed afterwards.
            out: (Σ n, ...), contiguous, on a CUDA device.
        """
        start = 0
        with torch.inference_mode(False), torch.no_grad():  # the buffer is written in every mode
            slot = self._slot(out.nbytes)
            staged = slot.memory[: out.nbytes].view(out.dtype).view(out.shape)
            for part in parts:
                staged[start : start + len(part)].copy_(part)
                start += len(part)
            out.copy_(staged, non_blocking=True)
        slot.done.record(torch.cuda.current_stream())
        return out

    def _slot(self, nbytes: int) -> _Slot:
        """Return the next slot with so much room, once nothing reads it."""
        if len(self._ring) < self.slots:
            self._ring.append(_Slot(_pinned(nbytes), torch.cuda.Event()))
            return self._ring[-1]
        slot = self._ring[self._next]
        self._next = (self._next + 1) % self.slots
        slot.done.synchronize()
        if slot.memory.nbytes < nbytes:
            slot.memory = _pinned(nbytes)
        return slot


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

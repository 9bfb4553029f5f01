"""Blocks of rows of one tensor on a device: they come and go, and the tensor grows by a sixteenth more than needed."""

import torch
from torch import Tensor

SPARE = 16
"""A full arena grows by 1/16, as the stacks of attention weights: copies are cheap, memory is what a bank saves."""


class RowArena:
    """Rows of one tensor, in blocks; a block is written once. One thread at a time uses it.

    Attributes:
        rows: (capacity, …); replaced when it grows or shrinks.
        generation: changes whenever rows have moved.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(0, *shape, dtype=dtype, device=device)
        self.generation = 0
        self._blocks: dict[int, tuple[int, int]] = {}  # key: first row, number of rows
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def used(self) -> int:
        """Rows of all blocks."""
        return sum(count for _, count in self._blocks.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.rows[:1].nbytes if len(self.rows) else 0

    def add(self, values: Tensor) -> int:
        """Write a block (n, …), and return its key."""
        count, first = len(values), self._place(len(values))
        if first is None:
            used = self.used
            needed = used + count
            spare = needed // SPARE if len(self._blocks) >= 2 * SPARE else 0
            self._resize(needed + spare)
            first = used
        self.rows[first : first + count] = values
        key = self._next
        self._next += 1
        self._blocks[key] = (first, count)
        return key

    def drop(self, key: int) -> None:
        """Free a block; the tensor shrinks when more than half of it is free, so that addresses last."""
        del self._blocks[key]
        if (used := self.used) * 2 < len(self.rows):
            self._resize(used)

    def first(self, key: int) -> int:
        """Return the first row of a block."""
        return self._blocks[key][0]

    def block(self, key: int) -> Tensor:
        """Return the rows of a block."""
        first, count = self._blocks[key]
        return self.rows[first : first + count]

    def _place(self, count: int) -> int | None:
        """Return where so many rows are free, next to each other."""
        end = 0
        for first, rows in sorted(self._blocks.values()):
            if first - end >= count:
                return end
            end = first + rows
        return end if len(self.rows) - end >= count else None

    def _resize(self, capacity: int) -> None:
        """Move all blocks to the front of another tensor."""
        self.generation += 1
        old, end = self.rows, 0
        order = sorted(self._blocks, key=lambda k: self._blocks[k])
        spans = [self._blocks[k] for k in order]
        self.rows = old.new_zeros(capacity, *old.shape[1:])
        if spans:
            index = torch.cat([torch.arange(first, first + count) for first, count in spans])
            self.rows[: len(index)] = old.index_select(0, index.to(old.device))
        for key, (_, count) in zip(order, spans, strict=True):
            self._blocks[key] = (end, count)
            end += count
        if old.is_cuda:  # its memory is perhaps of another stream, which knows nothing of this one
            old.record_stream(torch.cuda.current_stream())

"""Factors of all tasks on a device: of every matrix one arena of rows, of which a task has as many as its rank.

Tasks come and go within an arena's capacity without another address, so that captured CUDA graphs, which read spans on
the device, stay valid. `ArenaRows` says what the rows are.
"""

import torch
from torch import Tensor

from vtk.bank.arena_rows import ArenaRows
from vtk.bank.intervals import Intervals
from vtk.bank.slot_stacks import GENERATIONS, release
from vtk_kernels.grouped_low_rank import UNIT

_SPARE = 16
"""A full arena grows by 1/16, and shrinks when more than half of it is free."""

_LEAST = 16
"""Ranks are bounded in powers of two from this on, so that a rank more seldom changes a graph."""


class Arena:
    """Factors of one matrix (F, K), in the bank's dtype or in int8.

    Args:
        base: (F, K), in the bank's dtype; its values are not read.
        slots: number of slots.
        codes: whether factors are int8.
        device: of the arena; by default that of ``base``.

    Attributes:
        a: (N, K).
        b: (N, F).
        scale: (N,) fp32, in int8; None otherwise.
        x_scale: (K,), shared by all tasks, in int8; None otherwise.
        y_scale: (F,), likewise.
        spans: (slots, 2) int32: first row and rank of each slot; rank 0 where it has nothing here.
        rank: bound of all ranks.
        generation: changes with every address and with ``rank``.
    """

    def __init__(self, base: Tensor, slots: int, *, codes: bool, device: torch.device | None = None) -> None:
        (features, size), device = base.shape, device or base.device
        dtype, wide = torch.int8 if codes else base.dtype, torch.promote_types(base.dtype, torch.float32)
        self.a = torch.zeros(0, size, dtype=dtype, device=device)
        self.b = torch.zeros(0, features, dtype=dtype, device=device)
        self.scale = torch.zeros(0, dtype=wide, device=device) if codes else None
        self.x_scale = torch.ones(size, dtype=wide, device=device) if codes else None
        self.y_scale = torch.ones(features, dtype=wide, device=device) if codes else None
        self._shared = [torch.full((n,), torch.nan) for n in (size, features)] if codes else []  # NaN: not known yet
        self.spans = torch.zeros(slots, 2, dtype=torch.int32, device=device)
        self.rank, self.generation = 0, next(GENERATIONS)
        self._rows = Intervals()

    @property
    def capacity(self) -> int:
        """N."""
        return len(self.a)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a and b and its scale."""
        each = self.a.element_size() * (self.a.shape[1] + self.b.shape[1])
        return each + (0 if self.scale is None else self.scale.element_size())

    @property
    def vector_bytes(self) -> int:
        """Bytes of the vectors that all tasks share."""
        return sum(t.nbytes for t in (self.x_scale, self.y_scale) if t is not None)

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows of all tasks."""
        return self._rows.used * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes on the device, of free rows too."""
        return self.capacity * self.row_bytes + self.vector_bytes + self.spans.nbytes

    def accept(self, rows: ArenaRows) -> bool:
        """Return whether factors are of this arena's type and share its vectors; what they say of these is kept."""
        given = (rows.x_scale, rows.y_scale) if self._shared else ()
        if rows.a.dtype != self.a.dtype or not all(
            new is None or bool((known.isnan() | new.isnan() | (known == new)).all())
            for known, new in zip(self._shared, given, strict=True)
        ):
            return False
        for known, held, new in zip(self._shared, (self.x_scale, self.y_scale), given, strict=False):
            if new is not None and held is not None and bool((known.isnan() & ~new.isnan()).any()):
                known.copy_(torch.where(known.isnan(), new, known))
                held.copy_(known.nan_to_num(1.0))
        return True

    def reserve(self, slot: int, rank: int, *, exact: bool = False) -> None:
        """Find rows for the factors of a slot that has none; what they hold is of no use before `write`.

        Args:
            slot: of the task.
            rank: of its factors.
            exact: whether the arena grows by no more than it must.
        """
        first = self._rows.take(slot, rank)
        if first is None:
            needed = self._rows.used + rank
            self.resize(max(self.capacity, needed if exact or needed <= self.capacity else needed + needed // _SPARE))
            first = self._rows.take(slot, rank)
            assert first is not None
        self.spans[slot].copy_(torch.tensor([first, rank], dtype=torch.int32), non_blocking=True)
        if rank > self.rank:
            self.rank = max(_LEAST, 1 << (rank - 1).bit_length())
            self.generation = next(GENERATIONS)

    def write(self, slot: int, rows: ArenaRows) -> None:
        """Copy the factors of a slot into its rows."""
        first, count = self._rows.spans[slot]
        for held, new in ((self.a, rows.a), (self.b, rows.b), (self.scale, rows.scale)):
            if held is not None and new is not None:
                held[first : first + count].copy_(new, non_blocking=True)

    def drop(self, slot: int, *, shrink: bool = True) -> None:
        """Free a slot's rows; ``shrink`` gives memory back where more than half would be free."""
        if slot not in self._rows.spans:
            return
        self._rows.give(slot)
        self.spans[slot].zero_()
        if shrink and self._rows.used * 2 < self.capacity:
            self.resize(self._rows.used)

    def reserve_slots(self, slots: int, order: Tensor | None = None) -> None:
        """Change how many slots there are.

        Args:
            slots: S.
            order: (≤ S,) int64, the old slot of each new one; None to keep all.
        """
        old = list(range(min(slots, len(self.spans)))) if order is None else order.tolist()
        where = {slot: i for i, slot in enumerate(old)}
        spans = self.spans.new_zeros(slots, 2)
        spans[: len(old)] = self.spans[torch.tensor(old, dtype=torch.int64, device=self.spans.device)]
        release(self.spans)
        self.spans = spans
        self._rows.spans = {where[s]: span for s, span in self._rows.spans.items() if s in where}  # type: ignore[index]
        self.generation = next(GENERATIONS)

    def resize(self, rows: int) -> None:
        """Move all factors together; into new memory if there are to be more or fewer rows."""
        before = self._rows.resize(rows)
        order = sorted((span, self._rows.spans[key][0]) for key, span in before.items() if span[1])
        source = torch.cat([torch.arange(first, first + n) for (first, n), _ in order] or [torch.arange(0)])
        source, used = source.to(self.a.device), sum(n for (_, n), _ in order)
        for name in ("a", "b", "scale"):
            old = getattr(self, name)
            if old is None:
                continue
            new = old if rows == len(old) else old.new_zeros(rows, *old.shape[1:])
            new[:used] = old[source]
            if new is not old:
                release(old)
                setattr(self, name, new)
                self.generation = next(GENERATIONS)
        for slot, span in self._rows.spans.items():
            self.spans[slot].copy_(torch.tensor(span, dtype=torch.int32), non_blocking=True)  # type: ignore[index]

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        vectors = (self.scale, self.x_scale, self.y_scale)
        return [self.a, self.b, self.spans, *(t for t in vectors if t is not None)]

    def rank_of(self, slot: int) -> int:
        """Return the rank of a slot's factors."""
        return self._rows.spans.get(slot, (0, 0))[1]

    def tighten(self) -> None:
        """Give all free rows back."""
        if self._rows.used < self.capacity:
            self.resize(self._rows.used)

    def values(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return a (r, K) and b (r, F) of a slot as numbers, all scales in them; views of the arena if it has none."""
        first, rank = self._rows.spans.get(slot, (0, 0))
        mine = slice(first, first + rank)
        if self.scale is None or self.x_scale is None or self.y_scale is None:
            return self.a[mine], self.b[mine]
        return self.a[mine] * self.x_scale, self.b[mine] * (self.scale[mine, None] / UNIT**2) * self.y_scale

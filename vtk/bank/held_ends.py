"""Tables and classifiers of tasks, each task's own tensors: what loops over tasks read, on a CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vtk.bank.folded import Piece, n_bytes
from vtk.bank.tables import LowRankTable, Table, table_tensors, whole_table
from vtk.bank.task_heads import CallEnds, Ends, Heads
from vtk.models.weights.base import tensor_hash


@dataclass(frozen=True)
class HeldEnds(Ends):
    """Each task's own tensors; immutable.

    Attributes:
        device: of the bank.
        pieces: of each task.
        tables: whole tables by their hash.
        uses: how many tasks have each.
        table_of: hash of each task's table; tasks with a low-rank one have none.
    """

    device: torch.device
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    uses: Mapping[str, int] = field(default_factory=dict)
    table_of: Mapping[str, str] = field(default_factory=dict)
    held: int = 0

    def add(self, name: str, piece: Piece) -> "HeldEnds":
        """Return these and those of a new task."""
        tables, uses, table_of, held = dict(self.tables), dict(self.uses), dict(self.table_of), self.held
        table: Table | None = piece.table
        if isinstance(table, Tensor):
            key = table_of[name] = tensor_hash(table)
            if key not in tables:
                tables[key] = table.to(self.device)
                held += table.nbytes
            table, uses[key] = tables[key], uses.get(key, 0) + 1
        elif table is not None:
            table = table.to(self.device)
            held += n_bytes(table.own())
        w, b = (None if t is None else t.to(self.device) for t in (piece.w_head, piece.b_head))
        held += n_bytes([t for t in (w, b) if t is not None])
        return HeldEnds(self.device, {**self.pieces, name: Piece(table, w, b)}, tables, uses, table_of, held)

    def remove(self, name: str) -> "HeldEnds":
        """Return these without a task's."""
        tables, uses, held = dict(self.tables), dict(self.uses), self.held - self.own_bytes(name)
        if (key := self.table_of.get(name)) is not None:
            uses[key] -= 1
            if not uses[key]:
                del uses[key], tables[key]
        pieces = {n: p for n, p in self.pieces.items() if n != name}
        return replace(
            self, pieces=pieces, tables=tables, uses=uses, held=held,
            table_of={n: k for n, k in self.table_of.items() if n != name},
        )  # fmt: skip

    def piece(self, name: str) -> Piece | None:
        """Return a task's table and classifier; None for no such task."""
        return self.pieces.get(name)

    def of_call(self, names: Sequence[str]) -> CallEnds:
        """Return those of the tasks of a call, tables one after the other, classifiers of one size together."""
        pieces = {name: self.pieces[name] for name in names}
        starts, rows, found = dict[str, int](), 0, list[Tensor]()
        at = dict[object, int]()
        for name, piece in pieces.items():
            if piece.table is None:
                continue
            key = self.table_of.get(name, name)
            if key not in at:
                at[key], rows = rows, rows + len(piece.table)
                found.append(whole_table(piece.table))
            starts[name] = at[key]
        table = None if not found else found[0] if len(found) == 1 else torch.cat(found)
        sizes = {name: len(p.w_head) for name, p in pieces.items() if p.w_head is not None}
        heads, head_at = list[Heads](), dict[str, tuple[int, int]]()
        for size in sorted(set(sizes.values())):
            same = [name for name, n in sizes.items() if n == size]
            head_at |= {name: (len(heads), i) for i, name in enumerate(same)}
            w, b = ([t for n in same if (t := getattr(pieces[n], part)) is not None] for part in ("w_head", "b_head"))
            heads.append(Heads(w, b))
        return CallEnds(table, starts, tuple(heads), head_at, sizes)

    def own_bytes(self, name: str) -> int:
        """Return the bytes of a task's classifier, and of its table where no other task has it."""
        piece, key = self.pieces[name], self.table_of.get(name)
        alone = piece.table is not None and (key is None or self.uses[key] == 1)
        table = table_tensors(piece.table) if alone and piece.table is not None else []
        return n_bytes([*table, *(t for t in (piece.w_head, piece.b_head) if t is not None)])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the base's tables that changes refer to."""
        return self.held

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        low = [t for p in self.pieces.values() if isinstance(p.table, LowRankTable) for t in p.table.own()]
        heads = [t for p in self.pieces.values() for t in (p.w_head, p.b_head) if t is not None]
        return [*self.tables.values(), *low, *heads]

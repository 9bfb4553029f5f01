"""Immutable state of a bank for one call; it is replaced as a whole when tasks are added or removed."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vtk.bank.folded import Folding, Piece, Weights, n_bytes
from vtk.bank.positions import Positions
from vtk.bank.shared_weights import Shared
from vtk.bank.task_entry import Entry
from vtk.bank.task_heads import Ends
from vtk.errors import UsageError

_VERSIONS = itertools.count(1)


@dataclass(frozen=True)
class State:
    """The tasks of a bank at one time.

    Attributes:
        shared: their common part; None before the first task.
        entries: by name.
        held: attention weights by number, of a `HeldStore`.
        ends: concatenated tables and classifiers, of a folded bank.
        positions: rotary tables and biases.
        version: unique to each state.
    """

    shared: Shared | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    held: Mapping[int, Weights] = field(default_factory=dict)
    ends: Ends | None = None
    positions: Positions = field(default_factory=Positions)
    version: int = field(default_factory=_VERSIONS.__next__)

    def fixed_bytes(self) -> int:
        """Return the bytes that are always on the device: the shared part, and the tasks' tables and classifiers."""
        held = [] if self.shared is None else self.shared.held()
        ends = [] if self.ends is None else self.ends.tensors()
        return n_bytes([*held, *ends, *self.positions.tensors()]) + sum(e.end_bytes for e in self.entries.values())

    def own_bytes(self, name: str) -> int:
        """Return the bytes of what only this task has, without attention's weights."""
        ends = 0 if self.ends is None else self.ends.own_bytes(name)
        return self.entries[name].end_bytes + ends + self.positions.own_bytes(name)

    def room(self, max_bytes: int | None, unit: int) -> int | None:
        """Return how many tasks' attention weights of ``unit`` bytes fit on the device; None for any number.

        Raises:
            UsageError: not even one fits.
        """
        if max_bytes is None:
            return None
        fixed = self.fixed_bytes()
        if fixed + unit > max_bytes:
            raise UsageError(
                f"`max_gpu_bytes` is {max_bytes}: the shared weights and the tasks' tables and heads take "
                f"{fixed}, the attention weights of one task {unit}; raise it, or hold fewer tasks"
            )
        return (max_bytes - fixed) // unit

    def ends_of(
        self, names: Mapping[str, object], device: torch.device, name: str | None = None, folding: Folding | None = None
    ) -> Ends | None:
        """Return the ends of these tasks and of a new one; None if the bank is not folded."""
        pieces: dict[str, Piece] = {}
        hashes: dict[str, str] = {}
        if self.ends is not None:
            pieces = {n: self.ends.pieces[n] for n in names}
            hashes = {n: key for n, key in self.ends.table_of.items() if n in names}
        if name is not None and folding is not None:
            pieces[name] = folding.piece
        return Ends.of(pieces, device, hashes) if pieces else None


def find(state: State, name: str) -> Entry:
    """Return a task by its name.

    Raises:
        UsageError: there is no such task; the message lists the tasks.
    """
    if name not in state.entries:
        names = list(state.entries)
        held = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"
        raise UsageError(f"there is no task {name!r} in this bank; it holds {held}; give one of these, or add it")
    return state.entries[name]

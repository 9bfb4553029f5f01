"""Immutable state of a bank for one call; it is replaced as a whole when tasks are added or removed."""

import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from vtk.bank.base_attention import BaseAttention
from vtk.bank.base_model import BaseModel
from vtk.bank.folded import Weights, n_bytes
from vtk.bank.positions import Positions
from vtk.bank.shared_weights import Shared
from vtk.bank.task_entry import Entry
from vtk.bank.task_heads import Ends
from vtk.errors import UsageError

_VERSIONS = itertools.count(1)


def new_version() -> int:
    """Return a version that no state has yet."""
    return next(_VERSIONS)


@dataclass(frozen=True)
class State:
    """The tasks of a bank at one time.

    Attributes:
        shared: their common part; None before the first task.
        entries: by name.
        held: attention weights by number, of a `HeldStore`.
        ends: tables and classifiers, of a folded bank.
        positions: rotary tables and biases.
        models: the base as a model, by `BaseModel.key`, where packs of factors were added.
        attention: the base's own attention weights, there too.
        version: unique to each state.
    """

    shared: Shared | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    held: Mapping[int, Weights] = field(default_factory=dict)
    ends: Ends | None = None
    positions: Positions = field(default_factory=Positions)
    models: Mapping[Hashable, BaseModel] = field(default_factory=dict)
    attention: BaseAttention | None = None
    version: int = field(default_factory=new_version)

    @property
    def is_folded(self) -> bool:
        """Whether calls run the folded model."""
        return self.shared is not None and self.shared.folded is not None and self.ends is not None

    def addresses(self, names: Iterable[str]) -> tuple[object, ...]:
        """Return what decides where a call of these tasks reads all but attention's weights, of a stacked bank."""
        if self.ends is None:
            return (self.version,)
        ends = self.ends.of_call(list(names))
        heads = [t for h in ends.heads for t in (h.w, h.b)]
        factors = None if ends.low_rank is None else ends.low_rank.factors
        low = [] if factors is None else [factors.a, factors.b, factors.spans]
        tensors = [t for t in (ends.table, self.positions.rope, *heads, *low) if isinstance(t, Tensor)]
        shared = None if self.shared is None else self.shared.number
        rank = 0 if factors is None else factors.rank
        return (shared, rank, *((t.data_ptr(), t.shape) for t in tensors))

    def fixed_bytes(self) -> int:
        """Return the bytes that are always on the device: the shared part, and the tasks' tables and classifiers."""
        held = [] if self.shared is None else list(self.shared.held())
        if self.attention is not None and self.attention.resident:
            held += self.attention.tensors()
        tables = self._base_tables() if self.attention is not None and self.attention.resident else []
        ends = 0 if self.ends is None else self.ends.nbytes
        own = sum(e.end_bytes for e in self.entries.values())
        return n_bytes([*held, *tables, *self.positions.tensors()]) + ends + own

    def host_bytes(self) -> int:
        """Return the bytes that adding packs of factors needs on the CPU beside the bank's own."""
        ends = [t for m in self.models.values() for t in m.tensors()]
        found = n_bytes(list({id(t): t for t in ends}.values()))
        if self.attention is not None and not self.attention.resident:
            found += n_bytes([*self.attention.tensors(), *self._base_tables()])
        return found

    def _base_tables(self) -> list[Tensor]:
        return [t for m in self.models.values() for t in (m.table, m.pos_embed) if t is not None]

    def own_bytes(self, name: str) -> int:
        """Return the bytes of what only this task has, without attention's weights."""
        ends = 0 if self.ends is None else self.ends.own_bytes(name)
        return self.entries[name].end_bytes + ends + self.positions.own_bytes(name)

    def room(self, max_bytes: int | None, unit: int, option: str = "max_gpu_bytes") -> int | None:
        """Return the bytes that attention weights may take on the device; None for any number.

        Args:
            max_bytes: of the bank.
            unit: bytes of one task's, which must fit.
            option: that sets ``max_bytes``.

        Raises:
            UsageError: they do not.
        """
        if max_bytes is None:
            return None
        fixed = self.fixed_bytes()
        if fixed + unit > max_bytes:
            raise UsageError(
                f"`{option}` is {max_bytes}: the shared weights and the tasks' tables and heads take "
                f"{fixed}, the attention weights of one task {unit}; raise it, or hold fewer tasks"
            )
        return max_bytes - fixed


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

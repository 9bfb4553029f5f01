"""Position tables and classifiers of the tasks of a folded bank, and those of one call as its products read them.

`vtk.bank.held_ends` keeps each task's own tensors, for loops over tasks; `vtk.bank.stacked_ends` concatenates them, so
that a few kernels serve every mix of tasks. Equal tables are held once: without learned positions (DINOv3) tasks of one
image size have the same.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vtk.bank.folded import Piece
from vtk.bank.stacked_tables import CallTables
from vtk.models.packed.products import Stack


@dataclass(frozen=True)
class Heads:
    """Classifiers of one width: w (E, width, C) and b (E, width)."""

    w: Stack
    b: Stack

    @property
    def width(self) -> int:
        """Columns of their logits."""
        return int(self.b[0].shape[0])


@dataclass(frozen=True)
class CallEnds:
    """Tables and classifiers as one call reads them.

    Attributes:
        table: (rows of all tables, C); None if tasks embed their own images.
        table_at: first row of each task.
        heads: by width, ascending.
        head_at: of each task, the index in ``heads`` and the place in that stack.
        classes: of each task.
        low_rank: where changes of the base's tables are, beside ``table``; None of tables that are whole.
    """

    table: Tensor | None
    table_at: Mapping[str, int]
    heads: tuple[Heads, ...]
    head_at: Mapping[str, tuple[int, int]]
    classes: Mapping[str, int]
    low_rank: CallTables | None = None


class Ends(abc.ABC):
    """Tables and classifiers of all tasks."""

    @abc.abstractmethod
    def add(self, name: str, piece: Piece) -> "Ends":
        """Return these and those of a new task."""

    @abc.abstractmethod
    def remove(self, name: str) -> "Ends":
        """Return these without a task's."""

    @abc.abstractmethod
    def piece(self, name: str) -> Piece | None:
        """Return a task's table and classifier, which later changes leave as they are; None for no such task."""

    @abc.abstractmethod
    def of_call(self, names: Sequence[str]) -> CallEnds:
        """Return those of the tasks of a call."""

    @abc.abstractmethod
    def own_bytes(self, name: str) -> int:
        """Return the bytes of a task's classifier, and of its table where no other task has it."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors, without the base's tables that changes refer to."""

    @abc.abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all tensors."""

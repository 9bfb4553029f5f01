"""Division of a measurement between processes: each computes its part, and sums join the parts."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from vtk.errors import NoResultError, UsageError

Rows = Sequence[Sequence[float]]
"""Numbers of completed steps, all of one length; saved for a resume."""

Save = Callable[[list[list[float]]], None]
"""Saves the rows so far."""


@dataclass(frozen=True)
class Share:
    """A process's part of a measurement.

    Attributes:
        rank: number of this process.
        world: number of processes, each of which calls the same functions with the same arguments.
        total: sum of a tensor over all processes.
    """

    rank: int = 0
    world: int = 1
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def of(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return this process's batches; with fewer batches than processes, its images of each batch."""
        if len(batches) >= self.world:
            return list(batches[self.rank :: self.world])
        parts = [(images[self.rank :: self.world], labels[self.rank :: self.world]) for images, labels in batches]
        return [part for part in parts if len(part[0])]

    def agree(self, rows: Rows, width: int, device: torch.device) -> list[list[float]]:
        """Return the main process's rows of ``width`` numbers, because processes may have read different files.

        Rows of another width were saved by another version, which measured other numbers; they are not taken.
        """
        own = rows if self.rank == 0 and all(len(row) == width for row in rows) else ()
        count = int(self.total(torch.tensor([len(own)], device=device)))
        kept = torch.zeros(count, width, dtype=torch.float64, device=device)
        if own:
            # NaN was saved as None
            plain = [[math.nan if value is None else value for value in row] for row in own]
            kept += torch.tensor(plain, dtype=torch.float64, device=device)
        return self._join(kept)

    def gather(self, row: Sequence[float] | None, width: int, device: torch.device) -> list[list[float]]:
        """Return every process's row of ``width`` numbers in order; zeros of those that have none."""
        kept = torch.zeros(self.world, width, dtype=torch.float64, device=device)
        if row is not None:
            kept[self.rank] = torch.tensor(list(row), dtype=torch.float64, device=device)
        return self._join(kept)

    def rows(
        self,
        count: int,
        width: int,
        device: torch.device,
        step: Callable[[int], Sequence[float]],
        *,
        known: Rows = (),
        save: Save | None = None,
        done: Callable[[int, int], None] = lambda first, after: None,
    ) -> list[list[float]]:
        """Return the row of numbers of every step, the steps divided between processes.

        Args:
            count: number of steps.
            width: numbers in a row.
            device: of the sums between processes.
            step: from a step's index to its row; may raise `UsageError` or `NoResultError`; then all processes
                fail.
            known: rows of the first steps, from an earlier run; they are not computed again.
            save: called with the rows so far after each round of steps.
            done: called with the range of steps that have just been completed.
        """
        rows = self.agree(known, width, device)
        done(0, len(rows))
        for first in range(len(rows), count, self.world):
            row, index = None, first + self.rank
            with self.together(device):
                if index < count:
                    row = step(index)
            rows += self.gather(row, width, device)[: count - first]
            done(first, len(rows))
            if save is not None:
                save(rows)
        return rows

    @contextlib.contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """Let all processes fail if one does, so that none waits for sums that never come.

        Raises:
            UsageError: raised by this process or by another one.
            NoResultError: raised by this process.
        """
        failure: UsageError | NoResultError | None = None
        try:
            yield
        except (UsageError, NoResultError) as error:
            failure = error
        failed = failure is not None
        if self.world > 1:
            failed = float(self.total(torch.tensor([float(failed)], device=device))) > 0
        if failed:
            raise failure or UsageError("another process could not measure its part; see its message")

    def _join(self, rows: Tensor) -> list[list[float]]:
        joined: list[list[float]] = (self.total(rows) if rows.numel() else rows).tolist()
        return joined


ALONE = Share()


class StepOptions(TypedDict, total=False):
    """Keywords of a measure that works in steps.

    Attributes:
        known: rows of the first steps that ``save`` got in an interrupted run; they are not computed again.
        save: called with the rows so far after each step, or each round of steps where processes share them.
        share: this process's part, where several processes measure together.
        show_progress: show a progress bar.
    """

    known: Rows
    save: Save | None
    share: Share
    show_progress: bool


def check_keywords(function: str, given: Mapping[str, object], kind: Any) -> None:
    """Refuse keywords that a function's ``TypedDict`` of keywords lacks, and the lack of those that it requires.

    Raises:
        TypeError: as of a function that lists its keywords.
    """
    for name in given:
        if name not in kind.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    for name in sorted(kind.__required_keys__ - set(given)):
        raise TypeError(f"{function}() missing required keyword-only argument: {name!r}")

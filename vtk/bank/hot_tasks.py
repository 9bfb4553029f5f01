"""Chooses the tasks with factors that are worth a merged copy of their matrices: those used most often of late."""

import math
from collections.abc import Collection, Iterable

HALF_LIFE = 256
"""Calls of the bank after which a use counts half."""
LEAST = 4.0
"""Uses before a copy is made: it costs as much as a few calls save."""
CLEARLY = 2.0
"""How many times more often a task must be used than the one whose copy it takes."""


class HotTasks:
    """Uses of tasks, by the number of their weights, of which old ones count less. One thread at a time uses it."""

    def __init__(self) -> None:
        self._scores: dict[int, tuple[float, int]] = {}  # uses, and the call at which they were so many
        self._calls = 0

    def use(self, numbers: Iterable[int]) -> None:
        """Count one call of these tasks."""
        self._calls += 1
        for number in numbers:
            self._scores[number] = self.score(number) + 1, self._calls

    def score(self, number: int) -> float:
        """Return a task's uses, each halved after every `HALF_LIFE` calls."""
        value, at = self._scores.get(number, (0.0, self._calls))
        return value * math.exp2((at - self._calls) / HALF_LIFE)

    def forget(self, number: int) -> None:
        """Forget a task."""
        self._scores.pop(number, None)

    def choose(self, called: Iterable[int], copies: Collection[int], most: int) -> tuple[int | None, int | None]:
        """Return a task to make a copy for and one whose copy goes for it; None for none.

        Args:
            called: tasks with factors that were just called.
            copies: tasks that have a copy.
            most: copies that fit; below 1 where not even the factors do.
        """
        waiting = [n for n in called if n not in copies and self.score(n) >= LEAST]
        if not waiting or most < 1:
            return None, None
        best = max(waiting, key=self.score)
        if len(copies) < most:
            return best, None
        coldest = min(copies, key=self.score)
        return (best, coldest) if self.score(best) > CLEARLY * self.score(coldest) else (None, None)

"""Tracks which tasks' weights are on the device, and evicts the least recently used."""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vtk.errors import UsageError


@dataclass(frozen=True)
class Change:
    """Numbers of weights that a call moves: ``leave`` the device, then ``enter`` it."""

    leave: tuple[int, ...]
    enter: tuple[int, ...]


class Residency:
    """Numbers of the attention weights on the device, in the order of their last use.

    Attributes:
        size: of all of them; each counts 1, or what it was admitted with.
        option: name of the option in messages that sets the limit.
    """

    def __init__(self, option: str = "max_gpu_bytes") -> None:
        self._used: OrderedDict[int, int] = OrderedDict()
        self.size = 0
        self.option = option

    def __contains__(self, number: int) -> bool:
        return number in self._used

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers, the least recently used first."""
        return iter(list(self._used))

    def admit(self, numbers: Collection[int], limit: int | None, sizes: Mapping[int, int] | None = None) -> Change:
        """Make room for a call, and record it as the latest use.

        Args:
            numbers: distinct, all needed at once.
            limit: of the sum of sizes; None for any.
            sizes: of these numbers; 1 by default.

        Raises:
            UsageError: more are needed than fit; nothing is changed.
        """
        own = {n: 1 if sizes is None else sizes[n] for n in numbers}
        if limit is not None and sum(own.values()) > limit:
            fit = sum(total <= limit for total in itertools.accumulate(sorted(own.values())))
            raise UsageError(
                f"this call needs the weights of {len(numbers)} tasks at once and `{self.option}` leaves room for "
                f"{fit}; split the call, or raise `{self.option}`"
            )
        enter = tuple(n for n in numbers if n not in self._used)
        excess = 0 if limit is None else self.size + sum(own[n] for n in enter) - limit
        leave = []
        if excess > 0:
            for number in [n for n in self._used if n not in own]:
                if excess <= 0:
                    break
                excess -= self._used[number]
                leave.append(number)
        for number in leave:
            self.forget(number)
        for number in numbers:
            self.size += own[number] - self._used.pop(number, 0)
            self._used[number] = own[number]
        return Change(tuple(leave), enter)

    def shrink(self, limit: int) -> Sequence[int]:
        """Evict the least recently used until the sum of sizes is at most ``limit``; return the evicted."""
        leave = []
        for number in list(self._used):
            if self.size <= limit:
                break
            leave.append(number)
            self.forget(number)
        return leave

    def forget(self, number: int) -> None:
        """Forget weights that are no longer in the bank."""
        self.size -= self._used.pop(number, 0)

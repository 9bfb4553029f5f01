"""Tracks which tasks' weights are on the device, and evicts the least recently used."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vtk.errors import UsageError


@dataclass(frozen=True)
class Change:
    """Numbers of weights that a call moves: ``leave`` the device, then ``enter`` it."""

    leave: tuple[int, ...]
    enter: tuple[int, ...]


class Residency:
    """Numbers of the attention weights on the device, in the order of their last use."""

    def __init__(self) -> None:
        self._used: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._used

    def __len__(self) -> int:
        return len(self._used)

    def admit(self, numbers: Collection[int], limit: int | None) -> Change:
        """Make room for a call, and record it as the latest use.

        Args:
            numbers: distinct, all needed at once.
            limit: how many fit; None for any number.

        Raises:
            UsageError: more are needed than fit; nothing is changed.
        """
        if limit is not None and len(numbers) > limit:
            raise UsageError(
                f"this call needs the weights of {len(numbers)} tasks at once and `max_gpu_bytes` leaves room for "
                f"{limit}; split the call, or raise `max_gpu_bytes`"
            )
        enter = tuple(n for n in numbers if n not in self._used)
        needed = set(numbers)
        spare = [n for n in self._used if n not in needed]
        excess = 0 if limit is None else max(0, len(self._used) + len(enter) - limit)
        leave = tuple(spare[:excess])
        for number in leave:
            del self._used[number]
        for number in numbers:
            self._used[number] = None
            self._used.move_to_end(number)
        return Change(leave, enter)

    def shrink(self, limit: int) -> Sequence[int]:
        """Evict the least recently used until ``limit`` are left; return the evicted."""
        leave = list(self._used)[: max(0, len(self._used) - limit)]
        for number in leave:
            del self._used[number]
        return leave

    def forget(self, number: int) -> None:
        """Forget weights that are no longer in the bank."""
        self._used.pop(number, None)

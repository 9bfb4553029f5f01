"""Free intervals of the rows of an arena: which rows the next factors take, and which are free again."""

from collections.abc import Hashable, Mapping


class Intervals:
    """Spans of rows by key, first fit; free neighbours are one interval.

    Attributes:
        size: rows of the arena.
        spans: first row and rows of each key; of no row where there are none.
    """

    def __init__(self) -> None:
        self.size = 0
        self.spans: dict[Hashable, tuple[int, int]] = {}
        self._free: list[tuple[int, int]] = []  # first row and end, ascending, never adjacent

    @property
    def used(self) -> int:
        """Rows of all spans."""
        return sum(count for _, count in self.spans.values())

    def take(self, key: Hashable, count: int) -> int | None:
        """Give a new key a span, and return its first row; None where no interval is long enough."""
        if count == 0:
            self.spans[key] = (0, 0)
            return 0
        for i, (first, last) in enumerate(self._free):
            if last - first >= count:
                self._free[i : i + 1] = [(first + count, last)] if last - first > count else []
                self.spans[key] = (first, count)
                return first
        return None

    def give(self, key: Hashable) -> None:
        """Free a key's span, if it has one."""
        first, count = self.spans.pop(key, (0, 0))
        if count:
            self._free.append((first, first + count))
            self._join()

    def resize(self, size: int) -> Mapping[Hashable, tuple[int, int]]:
        """Move all spans to the beginning of ``size`` rows, in their order; return where they were."""
        before = dict(self.spans)
        end = 0
        for key, (_, count) in sorted(before.items(), key=lambda item: item[1]):
            if count:
                self.spans[key] = (end, count)
                end += count
        if end > size:
            raise ValueError(f"{end} rows are in use and `size` is {size}")
        self.size, self._free = size, [(end, size)] if end < size else []
        return before

    def _join(self) -> None:
        joined: list[tuple[int, int]] = []
        for first, last in sorted(self._free):
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self._free = joined

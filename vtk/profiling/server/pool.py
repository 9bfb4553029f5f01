"""Pool of images, and requests of them of which no two are equal.

A server that keeps answers would look quick if requests came again, so each request has a number of its own, written
into the lowest bits of the first 32 values of its images: at most a rounding, so that the right answer stays known. The
images are not copied: a request is a list of places in memory.
"""

from typing import Any

import numpy as np

MOST = 32
"""Different images; their answers by the reference are computed once."""

LEAST = 4
BUDGET = 256 << 20
"""Bytes of images held."""

MARKED = 32
"""Values that carry a request's number, a bit each."""

_GROUP = 8  # bits that are looked up together


def pool_size(bytes_each: int) -> int:
    """Return how many images a pool has: a power of two, so that an odd step visits all of them."""
    return next((n for n in (32, 16, 8) if n * bytes_each <= BUDGET), LEAST)


class Pool:
    """Images (n, …) of a server's type.

    Attributes:
        images: C-contiguous.
    """

    def __init__(self, images: "np.ndarray[Any, Any]") -> None:
        self.images = np.ascontiguousarray(images)
        flat = self.images.reshape(len(images), -1)
        self.marked = min(MARKED, flat.shape[1]) // _GROUP * _GROUP
        whole = np.dtype(f"u{flat.dtype.itemsize}")
        first = flat[:, : self.marked].copy().view(whole).reshape(len(flat), -1, 1, _GROUP)
        bits = ((np.arange(1 << _GROUP)[:, None] >> np.arange(_GROUP)) & 1).astype(whole)
        # (image, group of bits, their value, 8 numbers)
        self._marks = (first & ~whole.type(1)) | bits
        self._rest = [row[self.marked :].data.cast("B") for row in flat]
        self._rows = np.arange(len(flat))

    def __len__(self) -> int:
        return len(self.images)

    def keep(self, count: int) -> None:
        """Use the first ``count`` images only, a power of two."""
        self.images, self._marks, self._rest = self.images[:count], self._marks[:count], self._rest[:count]
        self._rows = self._rows[:count]

    def rows(self, number: "int | np.ndarray[Any, Any]", batch: int) -> "np.ndarray[Any, Any]":
        """Return which images a request has, (batch,): other ones, or in another order, than its neighbours.

        Args:
            number: of the request; of several, (n,), the result is (n, batch).
            batch: images of each.
        """
        count = len(self.images)
        first: Any = number if isinstance(number, int) else number[:, None]
        turn = first // count
        step = 2 * (turn % max(count // 2, 1)) + 1
        # each turn has another order: a server whose answers are those of the request before would look right in one
        return (step * (first % count + np.arange(batch)) + turn) % count

    def mark(self, row: int, number: int) -> bytes:
        """Return the first values of an image with ``number`` (its lowest 32 bits) in them."""
        marks = self._marks[row]
        return b"".join(marks[i, (number >> (_GROUP * i)) & 255].tobytes() for i in range(len(marks)))

    def parts(self, number: int, batch: int) -> list[bytes | memoryview]:
        """Return the bytes of a request's images, one piece after the other."""
        found: list[bytes | memoryview] = []
        for row in self.rows(number, batch).tolist():
            found += (self.mark(row, number), self._rest[row])
        return found

    def batch(self, number: int, batch: int) -> "np.ndarray[Any, Any]":
        """Return a request's images as an array of its own."""
        rows = self.rows(number, batch)
        made = self.images[rows]
        flat = made.reshape(batch, -1)
        for place, row in enumerate(rows.tolist()):
            flat[place, : self.marked] = np.frombuffer(self.mark(row, number), made.dtype)
        return made

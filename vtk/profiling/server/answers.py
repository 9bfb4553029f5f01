"""Checks answers that were kept while a server was under load.

Keeping one costs nothing; it is decoded and compared when the window is over, so that the check is in no request's
time.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk.profiling.compare import judge_rows, tolerance_of
from vtk.profiling.server.client import RequestFailed

MOST = 2048
MEMORY = 64 << 20
ALL, SHARE = 64, 4
"""So many answers of a window are all compared, of the others a quarter: some 1 % of what a request costs."""

_TOGETHER = 128


def sample_size(bytes_each: int) -> int:
    """Return how many answers are kept of a window, at most."""
    return min(MOST, MEMORY // max(bytes_each, 1))


class Sample:
    """The first `ALL` numbered answers, and of the others a random share, whatever the server's rhythm.

    Attributes:
        kept: (number of the request, answer), at most ``most``; of too many each of the share has the same chance
            (reservoir sampling).
        seen: answers offered.
    """

    def __init__(self, most: int, seed: int = 0) -> None:
        # at least four, and where answers are large half of the room is for later ones
        self.most, self.seen, self._chosen = max(most, 4), 0, 0
        self._all = min(ALL, self.most // 2)
        self.kept: list[tuple[int, Any]] = []
        self._random = random.Random(seed).random

    def offer(self, number: int, answer: Any) -> None:
        """Keep an answer, or not."""
        self.seen += 1
        if self.seen > self._all:
            if self._random() * SHARE >= 1:
                return
            self._chosen += 1
        if len(self.kept) < self.most:
            self.kept.append((number, answer))
        elif (place := self._all + int(self._random() * self._chosen)) < self.most:
            self.kept[place] = (number, answer)


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        checked: answers.
        wrong: of them.
        reason: of the first wrong one.
        max_diff: largest difference of any logit, None where none could be compared.
    """

    checked: int = 0
    wrong: int = 0
    reason: str = ""
    max_diff: float | None = None

    def __str__(self) -> str:
        return f"{self.wrong} of {self.checked} checked answers are wrong, the first {self.reason}"

    def joined(self, other: "Verdict") -> "Verdict":
        """Return both as one."""
        known = [v.max_diff for v in (self, other) if v.max_diff is not None]
        return Verdict(
            self.checked + other.checked,
            self.wrong + other.wrong,
            self.reason or other.reason,
            max(known, default=None),
        )


class Expected:
    """The right answers to every image of a pool.

    Args:
        rows: (n, classes) fp32, CPU.
        kind: key of `vtk.profiling.compare.MIN_COSINE`, or fp32.
    """

    def __init__(self, rows: Tensor, kind: str) -> None:
        self.rows, self.kind = rows, kind
        self.scale = float(rows.abs().max())

    def judge(
        self, kept: Iterable[tuple[int, Any]], decode: Callable[[Any], "np.ndarray[Any, Any]"],
        rows_of: Callable[["np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"],
    ) -> Verdict:  # fmt: skip
        """Compare answers.

        Args:
            kept: number of a request and its answer, as received.
            decode: turns an answer into logits; raises `RequestFailed`.
            rows_of: the images (n, batch) of the requests of these numbers (n,).
        """
        found = Verdict()
        for some in _chunks(kept, _TOGETHER):
            found = found.joined(self._judge(some, decode, rows_of))
        return found

    def _judge(
        self, kept: list[tuple[int, Any]], decode: Callable[[Any], "np.ndarray[Any, Any]"],
        rows_of: Callable[["np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"],
    ) -> Verdict:  # fmt: skip
        reasons: dict[int, str] = {}
        got, places = [], []
        index = rows_of(np.array([number for number, _ in kept]))
        each = index.shape[1]
        wanted = (each, self.rows.shape[1])
        for place, (_, answer) in enumerate(kept):
            try:
                logits = decode(answer)
            except RequestFailed as error:
                reasons[place] = f"cannot be used: {error}"
                continue
            if logits.shape != wanted:
                reasons[place] = f"has shape {logits.shape}, expected {wanted}"
                continue
            got.append(logits)
            places.append(place)
        worst = None
        if got:
            answers = torch.from_numpy(np.concatenate(got).astype(np.float32, copy=False))
            images = torch.from_numpy(index[places].ravel())
            right, differ = judge_rows(answers, self.rows[images], self.kind, self.scale)
            finite = differ[torch.isfinite(differ)]
            worst = float(finite.max()) if len(finite) else None
            for i in (~right.view(-1, each).all(1)).nonzero()[:, 0].tolist():
                mine = slice(i * each, (i + 1) * each)
                reasons[places[i]] = self._reason(answers[mine], images[mine], right[mine], differ[mine])
        first = reasons[min(reasons)] if reasons else ""
        return Verdict(len(kept), len(reasons), first, worst)

    def _reason(self, got: Tensor, index: Tensor, right: Tensor, differ: Tensor) -> str:
        """Say how an answer is wrong, and whose it is where it is another image's."""
        bad = int((~right).nonzero()[0, 0])
        if not torch.isfinite(got).all():
            return f"has {int((~torch.isfinite(got)).sum())} numbers that are NaN or infinite"
        place = f" in row {bad + 1} of {len(got)}" if len(got) > 1 else ""
        text = f"differs by {float(differ[bad]):.3g}{place}, allowed {tolerance_of(self.kind, self.scale)}"
        same, _ = judge_rows(got[bad].expand_as(self.rows), self.rows, self.kind, self.scale)
        if same.any():
            whose = "another image of this request" if same[index].any() else "the image of another request"
            text += f": it is the answer to {whose}"
        return text


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(itertools.islice(rest, size)):
        yield some

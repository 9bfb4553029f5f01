"""Selects the measured load with the highest throughput within a latency budget."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """One measured load.

    Attributes:
        what: in words, for instance ``batch 8 with eager``.
        batch: images per call or request.
        load: name of the back-end, or clients or rate of a server.
        p50_ms: None where there were too few runs, as the next two.
        p90_ms: 90 of 100 are quicker.
        p99_ms: 99 of 100 are quicker.
        images_per_second: of all runs.
        stable: False where its windows differ.
        largest: whether nothing larger of its kind was measured.
    """

    what: str
    batch: int
    load: str
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    images_per_second: float
    stable: bool | None = None
    largest: bool = False

    def judged(self) -> tuple[str, float] | None:
        """Return the highest percentile that is known, and its milliseconds."""
        times = (("p99", self.p99_ms), ("p90", self.p90_ms), ("p50", self.p50_ms))
        return next(((label, value) for label, value in times if value is not None), None)


@dataclass(frozen=True)
class Choice:
    """The load chosen for a budget.

    Attributes:
        meets: whether ``ms`` is within the budget; if not, it is the nearest.
        batch: images per call or request.
        load: name of the back-end, or clients or rate of a server.
        percentile: that was judged: ``p99``, or a lower one where there were too few runs.
        ms: its latency.
        images_per_second: at this load.
        text: one line.
    """

    meets: bool
    batch: int
    load: str
    percentile: str
    ms: float
    images_per_second: float
    text: str


def choose(budget_ms: float, candidates: Sequence[Candidate], *, none: str) -> Choice | None:
    """Pick the candidate within the budget that has the most images per second, else the quickest.

    Args:
        budget_ms: milliseconds.
        candidates: with right outputs and no failures.
        none: what did not meet it, in words, if none does.

    Returns:
        None if no candidate has runs enough for a median.
    """
    judged = [(*known, c) for c in candidates if (known := c.judged()) is not None]
    meets = [entry for entry in judged if entry[1] <= budget_ms]
    if not judged:
        return None
    label, value, best = (
        # of two as quick, the one of which more is known
        max(meets, key=lambda entry: (entry[2].images_per_second, entry[0]))
        if meets
        else min(judged, key=lambda entry: entry[1])
    )
    rate = best.images_per_second
    text = f"budget {budget_ms:g} ms: "
    if meets:
        text += f"{best.what} meets it with the most images/s: {label} {value:.2f} ms, {rate:,.1f} images/s"
        text += " (the largest measured; larger ones may meet it too)" if best.largest else ""
    else:
        text += f"{none} meets it; the nearest is {best.what}: {label} {value:.2f} ms"
    text += "; unstable, measure it again" if best.stable is False else ""
    return Choice(bool(meets), best.batch, best.load, label, value, rate, text)

"""Tunes the choices of a model: each alternative is timed in the whole pass, interleaved, and the fastest is kept.

A choice is judged where it is used: the pass is captured once with each alternative, its output compared with a
reference, and only then timed beside the others. So what surrounds an operation, and how often it runs, counts as it
does in use, and an operation that this module has never heard of is tuned like any other.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vtk.fused import tuning_store
from vtk.fused.tuning_result import Tuning
from vtk_kernels import choices
from vtk_kernels.choices import ALLOWED, Entry, Question

SECONDS = 60.0
MIN_ROUNDS, MAX_ROUNDS = 7, 25
WORTH = 0.995
"""Median ratio of times below which an alternative may replace what is chosen now, if it wins most rounds too."""

_SHARE = 3.0
"""Most seconds for the rounds of one choice."""

Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""Runs each pass some times, one after the other; returns microseconds of one run of each."""

Key = tuple[Any, ...]


class Pass(Protocol):
    """A forward pass that is ready to be repeated with the choices that were in force when it was made."""

    def __call__(self) -> object:
        """Run once, without waiting for the device."""

    def wrong(self) -> str | None:
        """Return in what its output is wrong, None where it is right."""


class Subject(Protocol):
    """What is tuned: a model at one batch size.

    Attributes:
        label: in words, with the card.
        card: name of the device.
        torch, triton: versions as entries have them.
    """

    label: str
    card: str
    torch: str
    triton: str

    def ask(self) -> Sequence[Question]:
        """Return what a pass asks with the choices in force."""

    def ready(self) -> Pass:
        """Make a pass with the choices in force."""


def tune(
    subject: Subject,
    timer: Timer,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Measure every choice of a subject that was not measured on this card with these versions, and keep the results.

    The table is written whole after each choice, so that what is measured outlives a stop. Ctrl-C ends it early and is
    no error here: the result says so.

    Args:
        subject: what is tuned.
        timer: of passes.
        seconds: after which no further alternative is begun.
        clock: in seconds.

    Raises:
        DataError: the table cannot be written.
    """
    work = _Work(subject, timer, clock, clock() + seconds)
    began = clock()
    try:
        work.run()
    except KeyboardInterrupt:
        work.result.stopped = True
    finally:
        work.result.seconds = clock() - began
        choices.use(work.table.values())
        tuning_store.load(subject.card)
    return work.result


class _Work:
    def __init__(self, subject: Subject, timer: Timer, clock: Callable[[], float], end: float) -> None:
        self.subject, self.timer, self.clock, self.end = subject, timer, clock, end
        self.table: dict[Key, Entry] = tuning_store.read(subject.card)
        self.result = Tuning(subject.label, str(tuning_store.path(subject.card)))
        self.random = random.Random(0)

    def run(self) -> None:
        choices.use(self.table.values())
        seen: set[Question] = set()
        queue = self.new(seen)
        if not queue:
            return
        first = current = self.subject.ready()
        if why := current.wrong():
            self.result.left_out.append(f"nothing is timed, as the pass is wrong: {why}")
            return
        before: dict[Key, Entry] = {}
        while queue:
            if self.clock() >= self.end:
                self.result.cut = True
                break
            question = queue.pop(0)
            current = self.one(question, current, len(queue), before)
            queue += self.new(seen)
        if self.result.changed and current is not first:
            self.confirm(first, current, before)

    def new(self, seen: set[Question]) -> list[Question]:
        """Return the questions that a pass asks now and that are still to be measured; whole forms come first."""
        asked = [q for q in dict.fromkeys(self.subject.ask()) if q not in seen and len(ALLOWED[q.op]) > 1]
        seen.update(asked)
        self.result.asked += len(asked)
        found = []
        for q in asked:
            answer = choices.explain(*q, self.subject.card)
            exact = answer.entry is not None and not answer.differs
            if not (exact and answer.table is not None and answer.table != "package"):
                found.append(q)  # neither tuned here, nor named by the user
        return sorted(found, key=lambda q: q.op != "ln_folded")

    def one(self, question: Question, current: Pass, others: int, before: dict[Key, Entry]) -> Pass:
        """Measure one choice, keep the quickest, and return the pass with it."""
        held = choices.choose(*question, self.subject.card)
        ready = {held: current}
        for choice in ALLOWED[question.op]:
            if choice == held:
                continue
            choices.use((self.table | self.entry(question, choice)).values())
            if choices.choose(*question, self.subject.card) != choice:
                continue
            try:
                made = self.subject.ready()
                why = made.wrong()
            except Exception as error:  # out of memory, a compiler's: what held goes on
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            if why:
                self.result.left_out.append(f"{question.op} {choice}: {why}")
            else:
                ready[choice] = made
        times = self.rounds(ready, (self.end - self.clock()) / (others + 2))
        if times is None:
            self.result.cut = True
            choices.use(self.table.values())
            return current
        best = min(times, key=lambda name: statistics.median(times[name]))
        if best != held and not _quicker(times[best], times[held]):
            best = held
        us = {name: round(statistics.median(found), 2) for name, found in times.items()}
        before |= self.entry(question, held, us)
        if best != held:
            self.result.changed[question] = held, best
        self.keep(self.entry(question, best, us))
        self.result.measured += 1
        return ready[best]

    def rounds(self, ready: dict[str, Pass], seconds: float, *, last: bool = False) -> dict[str, list[float]] | None:
        """Return each alternative's times, all in every round, in another order each; None where time ran out.

        The ``last`` comparison is finished even so.
        """
        end = self.clock() + min(max(seconds, 0.0), _SHARE)
        times: dict[str, list[float]] = {name: [] for name in ready}
        if len(ready) == 1:
            return {name: [math.nan] for name in ready}
        for i in range(MAX_ROUNDS):
            now = self.clock()
            if not last and i and now >= self.end and i < MIN_ROUNDS:
                return None
            if i >= MIN_ROUNDS and now >= end:
                break
            order = self.random.sample(sorted(ready), len(ready))
            for name, us in zip(order, self.timer([ready[name] for name in order]), strict=True):
                times[name].append(us)
        return times

    def confirm(self, first: Pass, last: Pass, before: dict[Key, Entry]) -> None:
        """Measure what all changes gain together; where that is nothing, take them back."""
        times = self.rounds({"before": first, "after": last}, self.end - self.clock(), last=True)
        assert times is not None
        if not _quicker(times["after"], times["before"]):
            self.result.changed.clear()
            self.keep(before)
            return
        self.result.before_us, self.result.after_us = (statistics.median(times[n]) for n in ("before", "after"))

    def keep(self, entries: dict[Key, Entry]) -> None:
        if entries:
            self.table = tuning_store.write(self.subject.card, entries.values())
            choices.use(self.table.values())

    def entry(self, question: Question, choice: str, us: dict[str, float] | None = None) -> dict[Key, Entry]:
        entry: Entry = {
            "device": self.subject.card, "torch": self.subject.torch, "triton": self.subject.triton, "op": question.op,
            "dtype": str(question.dtype).removeprefix("torch."), "rows": question.rows, "n": question.n,
            "k": question.k, "choice": choice,
        }  # fmt: skip
        if us is not None and not any(map(math.isnan, us.values())):
            entry["us"] = us  # of the whole pass
        return {tuning_store.key(entry): entry}


def _quicker(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether a beats b by more than noise: of 7 rounds it wins all, of 25 nineteen, by chance once in 130 times."""
    wins = sum(x < y for x, y in zip(a, b, strict=True))
    return _ratio(a, b) < WORTH and wins >= len(a) / 2 + 1.25 * math.sqrt(len(a))


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))

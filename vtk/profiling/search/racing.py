"""The search: short looks at the setups, longer ones at those that may be best, until no other can be.

It has the form of successive halving (Jamieson and Talwalkar 2016): each round doubles the windows of the better half.
A setup leaves it as soon as smaller ones show that it cannot win: a larger batch, or more instances beside it, take no
less time for a call, and instances on the same cores do not speed one another up. One that was left behind comes back
when those that looked better turn out to miss the budget.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vtk.profiling.search.setup import FULL, Reading, Setup

SLACK = 1.15
"""What a bound may be off: one window's noise."""

TWICE = 2.5
"""A first window that is over the budget by less than this factor is followed by a second."""

FEW = 2
"""One window may have met a busy moment; so many are evidence."""

CONFIRMED = 2
"""Setups that are measured completely when the time is up, at most."""

NOISE = 0.2
"""Relative error of one window's throughput; that of n windows is taken to be less by their square root."""

SHARE = 5
"""The search takes at most this part of an exhaustive one's windows."""

Measure = Callable[[Sequence[tuple[Setup, int]]], None]
"""Adds windows to the readings of setups, in turns: (setup, windows) each. A setup that fails gets none."""
Why = Literal["late", "slow", "failed"]


@dataclass
class Race:
    """All setups and what is known of them.

    Attributes:
        budget_ms: milliseconds.
        q: percentile that is held against it.
        setups: all of them.
        readings: of those that were measured.
        out: setups that are not in the race any more: ``late``: over the budget, ``slow``: other setups bound their
            throughput below another's, ``failed``: they could not be measured.
        cut: it ended because its time was up.
    """

    budget_ms: float
    q: int
    setups: tuple[Setup, ...]
    readings: dict[Setup, Reading] = field(default_factory=dict)
    out: dict[Setup, Why] = field(default_factory=dict)
    cut: bool = False

    def windows(self, setup: Setup) -> int:
        """Return how many windows of a setup were measured."""
        return len(self.readings[setup].windows) if setup in self.readings else 0

    def rate(self, setup: Setup) -> float:
        """Return its images per second, 0 before it was measured."""
        return setup.images_per_second(self.readings[setup].mean_ms) if self.windows(setup) else 0.0

    def latency(self, setup: Setup) -> float:
        """Return the judged percentile of its latency in milliseconds."""
        return self.readings[setup].latency_ms(self.q) if self.windows(setup) else math.inf

    def meets(self, setup: Setup) -> bool:
        """Return whether it was measured and is within the budget."""
        return self.latency(setup) <= self.budget_ms and self.out.get(setup) != "failed"

    @property
    def measured(self) -> list[Setup]:
        """The setups of which anything is known."""
        return [s for s in self.setups if self.windows(s) and self.out.get(s) != "failed"]

    @property
    def best(self) -> Setup | None:
        """The setup with the most images per second within the budget; else the one nearest to it.

        A short measurement counts for less than a complete one, by its noise.
        """
        known = self.measured
        if meeting := [s for s in known if self.meets(s)]:
            # of two as quick the one with fewer processes
            return max(meeting, key=lambda s: (self.rate(s) / _error(self, s), -s.instances, -s.batch))
        return min(known, key=self.latency, default=None)


def exhaustive(race: Race, measure: Measure) -> None:
    """Measure every setup completely."""
    for group in _groups(race.setups):
        measure([(setup, FULL) for setup in group])
        for setup in group:
            if not race.windows(setup):
                race.out[setup] = "failed"


def search(race: Race, measure: Measure) -> None:
    """Find the best setup with at most a fifth of the windows of `exhaustive`; the answer is ``race.best``.

    Args:
        race: with all setups; what is measured is put there.
        measure: adds windows to ``race.readings``.
    """
    allowed = FULL * len(race.setups) // SHARE
    for group in _groups(race.setups):
        _scout(race, group, measure)
    while True:
        _reconsider(race, measure)
        waiting, best = _contenders(race), race.best
        if not waiting or best is None:
            return
        rest = FULL - race.windows(best)
        room = allowed - sum(map(race.windows, race.setups)) - rest
        if room <= 0:
            race.cut = True
            return _confirm(race, measure)
        chosen = []
        for setup in waiting[: max(2, math.ceil(len(waiting) / 2))]:
            more = min(race.windows(setup), FULL - race.windows(setup), room)
            if more > 0:
                chosen.append((setup, more))
                room -= more
        before = {setup: race.windows(setup) for setup, _ in chosen}
        measure(chosen)
        for setup, _ in chosen:
            if race.windows(setup) == before[setup]:
                race.out[setup] = "failed"
            elif _is_late(race, setup):
                race.out[setup] = "late"


def _confirm(race: Race, measure: Measure) -> None:
    """Measure what is recommended completely; where that makes another one the best, that one too."""
    for _ in range(CONFIRMED):
        best = race.best
        if best is None or race.readings[best].complete:
            return
        done = race.windows(best)
        measure([(best, FULL - done)])
        if race.windows(best) == done:
            race.out[best] = "failed"


def _is_late(race: Race, setup: Setup) -> bool:
    """Return whether the percentile is over the budget by more than so few windows may be off."""
    share = race.q / 100
    off = 0.0 if race.readings[setup].complete else math.sqrt(share * (1 - share) / race.windows(setup))
    return race.readings[setup].latency_ms(max(100 * (share - off), 0.0)) > race.budget_ms


def _groups(setups: Iterable[Setup]) -> list[list[Setup]]:
    """Return the setups by variant and threads, few instances first; batch sizes ascending."""
    found: dict[object, list[Setup]] = {}
    for setup in sorted(setups):
        found.setdefault(_group(setup), []).append(setup)
    return list(found.values())


def _group(setup: Setup) -> tuple[object, ...]:
    return *setup.variant, setup.threads, setup.instances


def _scout(race: Race, group: Sequence[Setup], measure: Measure) -> None:
    """Take one window of each batch size, ascending, of those that may be best."""
    for setup in group:
        if (why := _bound(race, setup)) is not None:
            race.out[setup] = why
            continue
        if not race.windows(setup):
            measure([(setup, 1)])
        if not race.windows(setup):
            race.out[setup] = "failed"
            continue
        if SLACK < race.readings[setup].quickest_ms / race.budget_ms < TWICE:
            measure([(setup, 1)])  # before it speaks for all that are larger
        if race.readings[setup].quickest_ms > race.budget_ms * SLACK:
            race.out[setup] = "late"


def _reconsider(race: Race, measure: Measure) -> None:
    """Look at setups that were too slow beside one that has turned out to miss the budget."""
    for group in _groups(setup for setup, why in race.out.items() if why == "slow"):
        back = [setup for setup in group if _bound(race, setup) is None]
        for setup in back:
            del race.out[setup]
        _scout(race, back, measure)


def _bound(race: Race, setup: Setup) -> Why | None:
    """Return why a setup cannot be the best, judging by smaller ones of its variant and threads; None if it may be."""
    best = max((race.rate(s) for s in race.measured if race.meets(s)), default=0.0)
    evidence = 0
    for other in race.setups:
        if other.variant != setup.variant or other.threads != setup.threads:
            continue
        smaller = other.batch <= setup.batch and other.instances <= setup.instances
        if not smaller or other == setup:
            continue
        if race.out.get(other) == "late":
            return "late"
        if not race.windows(other):
            continue
        # a call takes no less time than that of the smaller one
        most = 1000 * setup.batch * setup.instances / race.readings[other].quickest_ms
        if other.batch == setup.batch:
            most = min(most, race.rate(other) * setup.instances / other.instances)
        evidence += race.windows(other) if most * SLACK < best else 0
    return "slow" if evidence >= FEW else None


def _contenders(race: Race) -> list[Setup]:
    """Return the setups that more windows may show to be the best, the most promising first."""
    inside = [s for s in race.measured if s not in race.out]
    complete = [s for s in inside if race.readings[s].complete and race.meets(s)]
    if not any(map(race.meets, race.measured)):
        return _nearest(race)
    best = max(map(race.rate, complete), default=0.0)
    waiting = [s for s in inside if not race.readings[s].complete]
    promise = {s: _promise(race, s) for s in waiting}
    return sorted((s for s in waiting if promise[s] > best), key=lambda s: -promise[s])


def _promise(race: Race, setup: Setup) -> float:
    """Return the throughput that a setup may have: that of its quickest window, and some noise more.

    A single window may have met a busy moment; then it is not below both its neighbours, of the next batch sizes.
    """
    own = setup.images_per_second(race.readings[setup].least_mean_ms)
    if race.windows(setup) <= FEW:
        group = [s for s in race.measured if _group(s) == _group(setup)]
        near = [max((s for s in group if s.batch < setup.batch), default=None),
                min((s for s in group if s.batch > setup.batch), default=None)]  # fmt: skip
        own = max(own, min((race.rate(s) for s in near if s is not None), default=own))
    return own * _error(race, setup)


def _nearest(race: Race) -> list[Setup]:
    """Return the quickest setups that are not complete, where none meets the budget."""
    known = race.measured
    complete = [race.latency(s) for s in known if race.readings[s].complete]
    waiting = [s for s in known if not race.readings[s].complete]
    optimistic = {s: race.latency(s) / _error(race, s) for s in waiting}
    return sorted((s for s in waiting if optimistic[s] < min(complete, default=math.inf)), key=race.latency)


def _error(race: Race, setup: Setup) -> float:
    """Return the factor that a setup's throughput may be off; a complete measurement is what counts."""
    return 1.0 if race.readings[setup].complete else 1 + NOISE / math.sqrt(race.windows(setup))

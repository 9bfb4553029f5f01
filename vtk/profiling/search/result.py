"""The result of a search: plain values that survive JSON."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vtk.profiling.budget import Choice
from vtk.profiling.search.accuracy import Verdict
from vtk.profiling.search.racing import Race
from vtk.profiling.search.setup import Setup
from vtk.profiling.stats import runs_needed

SCHEMA = 1
Status = Literal["complete", "short", "late", "slow", "failed"]
WHY: dict[Status, str] = {
    "complete": "measured for the whole --duration",
    "short": "measured until it could not be the best",
    "late": "over the budget, or larger than one that is",
    "slow": "not measured: smaller setups bound its throughput below another's",
    "failed": "not run",
}


@dataclass(frozen=True)
class SetupResult:
    """One setup.

    Attributes:
        backend: as on the command line.
        precision: ``fp32``, ``bf16``, ``int8``, or ``int8-dynamic``.
        batch: images per call.
        threads: of one instance.
        instances: that ran at the same time.
        status: a key of `WHY`.
        reason: of one that failed.
        runs: timed calls of all instances; 0 where it was not measured.
        judged_ms: the search's percentile, however few the runs.
        p50_ms: None below 20 runs.
        p90_ms: None below 100 runs.
        p99_ms: None below 1,000 runs.
        images_per_second: of all instances.
        seconds: spent on it.
        meets: whether `judged_ms` is within the budget.
        frontier: no other setup has more images per second at no more latency.
    """

    backend: str
    precision: str
    batch: int
    threads: int
    instances: int
    status: Status
    reason: str = ""
    runs: int = 0
    judged_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    images_per_second: float | None = None
    seconds: float = 0.0
    meets: bool = False
    frontier: bool = False

    @property
    def setup(self) -> Setup:
        """What was measured."""
        return Setup(self.backend, self.precision, self.threads, self.instances, self.batch)


@dataclass(frozen=True)
class SearchResult:
    """A whole search; `to_dict` is ``search.json``.

    Attributes:
        source: as given.
        kind: of the source.
        model: name of the model.
        input_shape: (channels, height, width).
        device_name: the processor.
        cpus: that the process may use.
        budget_ms: milliseconds.
        percentile: that every setup was judged by.
        duration_s: of a complete measurement of one setup.
        exhaustive: every setup was measured completely.
        cut: a fifth of an exhaustive search's windows was used up before nothing else could be the best.
        stopped: somebody stopped it (Ctrl-C).
        reference: what outputs were compared with.
        inputs: which images the calls took.
        accuracy: of each back-end and precision.
        setups: all of them.
        choice: the recommendation; None if nothing could be measured.
        best: its setup.
        faster: a setup without a file that has more images per second, in words.
        command: what exports the recommendation, as typed; empty if nothing has to be exported.
        note: how the file is to be run.
        search_s: seconds of the measurements, without exports and the accuracy gate.
        exhaustive_s: seconds that measuring every setup for `duration_s` takes, without loading.
        versions: of Python and the packages that matter.
        ran: the command line.
        date: UTC, ISO 8601.
        schema: version of this layout.
    """

    source: str
    kind: str
    model: str
    input_shape: tuple[int, ...]
    device_name: str
    cpus: int
    budget_ms: float
    percentile: int
    duration_s: float
    exhaustive: bool
    cut: bool
    stopped: bool
    reference: str
    inputs: str
    accuracy: tuple[Verdict, ...]
    setups: tuple[SetupResult, ...]
    choice: Choice | None
    best: SetupResult | None
    faster: str
    command: str
    note: str
    search_s: float
    exhaustive_s: float
    versions: dict[str, str] = field(default_factory=dict)
    ran: str = ""
    date: str = ""
    schema: int = SCHEMA
    wrong: bool = False

    @property
    def exit_code(self) -> int:
        """4 when an output was wrong while it was timed, 130 when stopped, 1 when nothing was measured, else 0."""
        return 4 if self.wrong else 130 if self.stopped else 1 if self.choice is None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**dataclasses.asdict(self), "exit_code": self.exit_code}


def rows_of(race: Race, reasons: dict[Setup, str]) -> tuple[SetupResult, ...]:
    """Return every setup of a race as plain values."""
    edge = frontier([(race.latency(s), race.rate(s), s) for s in race.measured])
    return tuple(_row(race, setup, reasons.get(setup, ""), setup in edge) for setup in race.setups)


def frontier(points: Sequence[tuple[float, float, Setup]]) -> set[Setup]:
    """Return the setups that no other one beats in latency and throughput: (ms, images per second, setup) each."""
    found, most = set(), 0.0
    for _, rate, setup in sorted(points, key=lambda point: (point[0], -point[1])):
        if rate > most:
            found.add(setup)
            most = rate
    return found


def choice_of(race: Race, setup: Setup) -> Choice:
    """Return the recommendation in the words of ``--budget-ms``."""
    meets, ms, rate = race.meets(setup), race.latency(setup), race.rate(setup)
    text = f"budget {race.budget_ms:g} ms: "
    if meets:
        text += f"{setup.text} meets it with the most images/s: p{race.q} {ms:.2f} ms, {rate:,.1f} images/s"
        edge = max(s.batch for s in race.setups)
        text += " (the largest batch measured; larger ones may meet it too)" if setup.batch == edge > 1 else ""
    else:
        text += f"no setup meets it; the nearest is {setup.text}: p{race.q} {ms:.2f} ms"
    return Choice(meets, setup.batch, f"{setup.backend} {setup.precision}", f"p{race.q}", ms, rate, text)


def _row(race: Race, setup: Setup, reason: str, edge: bool) -> SetupResult:
    out = race.out.get(setup)
    place = setup.backend, setup.precision, setup.batch, setup.threads, setup.instances
    if not race.windows(setup) or out == "failed":
        return SetupResult(*place, out or "slow", reason)
    reading = race.readings[setup]

    def known(q: int) -> float | None:
        return reading.latency_ms(q) if reading.runs >= runs_needed(q) else None

    status: Status = "complete" if reading.complete else out or "short"
    return SetupResult(
        *place, status, reason, reading.runs, race.latency(setup), known(50), known(90), known(99),
        race.rate(setup), reading.seconds, race.meets(setup), edge,
    )  # fmt: skip

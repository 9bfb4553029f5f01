"""The search over recorded tables of setups, against measuring every one of them."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from vtk.profiling.search import racing
from vtk.profiling.search.setup import FULL, Setup, judged_percentile, shapes

Table = Mapping[Setup, Sequence[Sequence[float]]]
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
"""Exhaustive runs of `vtk profile --on cpu --exhaustive`: of each window five percentiles of its calls."""


def read(path: Path) -> Table:
    return {Setup(b, p, t, n, size): windows for b, p, t, n, size, windows in json.loads(path.read_text())}


def drawn(seed: int, cpus: int, noise: float, busy: float) -> Table:
    """Return a table by Amdahl's law, shared memory, noise, and windows that met a busy machine."""
    rng = random.Random(seed)
    base, table = 10 ** rng.uniform(0, 2.3), {}
    for variant in (("ort-cpu", "fp32"), ("openvino", "fp32"), ("openvino", "bf16"), ("openvino", "int8")):
        speed, serial, shared = base * rng.uniform(0.3, 1.5), rng.uniform(0.02, 0.3), rng.uniform(0, 0.6)
        fixed, tail = rng.uniform(0, 0.5), rng.uniform(0.02, 0.2)
        for threads, instances in shapes(cpus):
            for batch in (1, 2, 4, 8, 16, 32):
                ms = speed * (fixed + batch) * (serial + (1 - serial) / threads)
                ms *= 1 + shared * (threads * instances - 1) / cpus
                factors = [
                    (1 + abs(rng.gauss(0, noise))) * (rng.uniform(1.2, 2.2) if rng.random() < busy else 1.0)
                    for _ in range(FULL)
                ]
                table[Setup(*variant, threads, instances, batch)] = [
                    [ms * factor * (1 + abs(rng.gauss(0, tail))) for _ in range(4)] for factor in factors
                ]
    return table


def replayed(table: Table, budget_ms: float, q: int, *, whole: bool = False) -> racing.Race:
    race = racing.Race(budget_ms, q, tuple(table))

    def measure(wanted: Sequence[tuple[Setup, int]]) -> None:
        for setup, count in wanted:
            done = race.windows(setup)
            windows = table[setup][done : done + count]
            if windows:
                race.readings.setdefault(setup, racing.Reading()).add(*windows)

    (racing.exhaustive if whole else racing.search)(race, measure)
    return race


def loss(table: Table, budget_ms: float, q: int) -> tuple[float, float]:
    """Return how far the found setup is from the best by the whole table, and the share of the windows it took."""
    whole, race = replayed(table, budget_ms, q, whole=True), replayed(table, budget_ms, q)
    best, found = whole.best, race.best
    assert best is not None and found is not None and race.readings[found].complete
    share = sum(map(race.windows, race.setups)) / sum(map(whole.windows, whole.setups))
    if not whole.meets(best):
        return whole.latency(found) / whole.latency(best) - 1, share
    assert whole.meets(found), f"{found.text} takes {whole.latency(found):.1f} ms of {budget_ms:.1f}"
    return 1 - whole.rate(found) / whole.rate(best), share


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("q", [50, 90])
def test_recorded_tables_within_five_percent_in_a_fifth_of_the_windows(path: Path, q: int) -> None:
    table = read(path)
    whole = replayed(table, 1.0, q, whole=True)
    latencies = sorted(map(whole.latency, whole.setups))
    # from none within the budget to all of them
    for at in (0.0, 0.05, 0.2, 0.4, 0.7, 1.0):
        budget = latencies[int(at * (len(latencies) - 1))] * (0.9 if at == 0.0 else 1.01)
        lost, share = loss(table, budget, q)
        assert lost <= 0.05, (budget, lost)
        assert share <= 0.2 + 1 / len(table)


@pytest.mark.parametrize(("cpus", "noise", "busy"), [
    (2, 0.02, 0.0), (2, 0.05, 0.05), pytest.param(8, 0.05, 0.0, marks=pytest.mark.slow),
])  # fmt: skip
def test_drawn_tables_within_five_percent_in_a_fifth_of_the_windows(cpus: int, noise: float, busy: float) -> None:
    for seed in range(3):
        lost, share = loss(drawn(seed, cpus, noise, busy), 10 ** random.Random(seed).uniform(1, 2.5), 90)
        assert lost <= 0.05, (seed, lost)
        assert share <= 0.201


def flat(ms: float, **busy: float) -> list[list[float]]:
    """Return windows of equal calls; ``first`` and ``later`` scale the first window and the others."""
    return [[ms * busy.get("first", 1.0)] * 4, *[[ms * busy.get("later", 1.0)] * 4] * (FULL - 1)]


def of(batch: int, precision: str = "fp32", threads: int = 1, instances: int = 1) -> Setup:
    return Setup("ort-cpu", precision, threads, instances, batch)


def test_one_that_looked_better_and_misses_the_budget_makes_way_for_those_that_it_held_off() -> None:
    table = {of(1, "bf16"): flat(5.0, later=3.0)} | {of(b): flat(9.0 * b) for b in (1, 2, 4)}
    table |= {of(b, "int8"): flat(40.0 + b) for b in (1, 2, 4)}
    race = replayed(table, 10.0, 90)
    assert race.best == of(1)
    assert race.out[of(1, "bf16")] == "late"


def test_those_that_were_not_measured_beside_it_are_measured_then() -> None:
    # while bf16 seems to take 1 ms, batch 4 in fp32 cannot win, whatever it is
    table = {Setup("a", "bf16", 1, 1, 1): flat(20.0, first=0.05)}
    table |= {Setup("b", "fp32", 1, 1, b): flat(ms) for b, ms in ((1, 9.0), (2, 9.5), (4, 9.8))}
    table |= {Setup("c", "int8", threads, 1, 1): flat(40.0) for threads in range(1, 17)}
    race = replayed(table, 10.0, 90)
    assert race.best == Setup("b", "fp32", 1, 1, 4)


def test_a_window_below_both_its_neighbours_is_doubted() -> None:
    table = {of(b): flat(ms, first=f) for b, ms, f in ((1, 4.0, 1.0), (2, 6.2, 1.0), (4, 9.0, 1.8), (8, 24.0, 1.0))}
    table |= {of(b, "bf16"): flat(b / 0.34) for b in (1, 2, 4, 8)}
    table |= {of(1, "int8", threads): flat(400.0) for threads in range(1, 17)}
    assert replayed(table, 50.0, 90).best == of(4)


def test_a_busy_first_window_rules_nothing_out() -> None:
    # batch 4 is the best; its first window and that of batch 2 took 1.8 times as long
    table = {of(1): flat(4.0), of(2): flat(7.0, first=1.8), of(4): flat(9.0, first=1.8), of(8): flat(30.0)}
    table |= {of(b, "bf16"): flat(6.0 * b) for b in (1, 2, 4, 8)}
    table |= {of(1, "int8", threads): flat(40.0) for threads in range(1, 9)}
    assert replayed(table, 12.0, 90).best == of(4)


def test_larger_setups_than_one_over_the_budget_are_not_measured() -> None:
    table = {of(b, threads=1, instances=n): flat(10.0 * b * n**0.5) for b in (1, 2, 4, 8) for n in (1, 2, 4)}
    race = replayed(table, 25.0, 50)
    assert race.best == of(1, instances=4)
    assert [race.windows(of(8, instances=n)) for n in (1, 2, 4)] == [0, 0, 0]
    assert {race.out[of(8, instances=n)] for n in (1, 2, 4)} == {"late"}


def test_where_none_meets_the_budget_the_quickest_is_measured_completely() -> None:
    table = {
        of(b, p): flat(10.0 * b**0.8 * f) for b in (1, 2, 4) for p, f in (("fp32", 2.0), ("bf16", 1.0), ("int8", 1.1))
    }
    race = replayed(table, 1.0, 50)
    assert race.best == of(1, "bf16") and not race.meets(of(1, "bf16"))


def test_a_setup_that_fails_is_out_and_the_next_one_is_found() -> None:
    table = {of(1, "int8"): [], of(1): flat(5.0), of(1, "bf16"): flat(8.0)}
    race = replayed(table, 10.0, 50)
    assert race.best == of(1) and race.out[of(1, "int8")] == "failed"
    assert replayed({of(1): []}, 10.0, 50).best is None


def test_a_setup_that_fails_in_its_second_window_is_out() -> None:
    table = {of(1, "int8"): flat(3.0)[:1], of(1): flat(5.0), of(1, "bf16"): flat(8.0)}
    race = replayed(table, 10.0, 50)
    assert race.best == of(1) and race.out[of(1, "int8")] == "failed"


def test_of_two_as_quick_the_one_with_fewer_processes_is_taken() -> None:
    table = {of(1, threads=2): flat(5.0), of(1, instances=2): flat(10.0), of(2, threads=2): flat(10.0)}
    assert replayed(table, 20.0, 50, whole=True).best == of(1, threads=2)


@pytest.mark.parametrize(("budget_ms", "duration_s", "q"), [(5, 10, 99), (20, 10, 90), (200, 10, 50), (9000, 1, 50)])
def test_every_setup_within_the_budget_has_runs_enough_for_the_percentile(
    budget_ms: float, duration_s: float, q: int
) -> None:
    assert judged_percentile(budget_ms, duration_s) == q


def test_shapes_use_no_more_than_the_cpus_and_all_of_them_too() -> None:
    assert shapes(2) == [(1, 1), (1, 2), (2, 1)]
    found = shapes(6)
    assert all(threads * instances <= 6 for threads, instances in found)
    assert {(1, 6), (2, 3), (6, 1)} <= set(found) and len(found) == len(set(found))
    assert shapes(6, 4) == [(4, 1)] and shapes(2, 4) == [(4, 1)]
    assert math.prod(max(shapes(64))) == 64

"""Time planning of `gpu.sh all`, on a clock that only steps move: the order, and that it ends in time."""

import itertools
import random

import _plan
import correct
import e2e
import pytest
from _plan import FIRST, RESERVE, ROW_S, START, STEPS, TOTAL, Step, allowance, exit_code, run_plan


class Clock:
    """Steps that need so many seconds and stop when theirs are over."""

    def __init__(self, needs, codes=()):
        self.now, self.needs, self.codes, self.given = 100.0, dict(needs), dict(codes), {}

    def launch(self, step, seconds):
        self.given[step.name] = seconds
        need = self.needs[step.name]
        self.now += min(need, seconds)
        self.needs[step.name] = max(need - seconds, 0.0)
        return self.codes.get(step.name, 3 if need > seconds else 0)

    def run(self, total=TOTAL, done=()):
        return run_plan(STEPS, total, self.launch, lambda: self.now, lambda step: step.name in done)


def test_what_decides_choices_then_every_test_then_batch_1_come_first():
    assert [(step.name, step.stage) for step in STEPS[:3]] == [
        ("choices", "kernels"), ("tests", "correct"), ("batch 1", "e2e"),
    ]  # fmt: skip
    assert [step.first for step in STEPS] == [True] * 3 + [False] * (len(STEPS) - 3)
    assert TOTAL == 540 and FIRST == 420 and sum(step.seconds for step in STEPS) + RESERVE == TOTAL
    assert sum(step.seconds for step in STEPS if step.first) <= FIRST
    assert {step.stage for step in STEPS} == {"kernels", "correct", "e2e", "breakdown", "train", "bank"}


def test_steps_that_need_more_than_there_is_are_cut_and_the_call_ends_in_time():
    clock = Clock(dict.fromkeys([step.name for step in STEPS], 1e4))
    found = clock.run()
    assert clock.now - 100 <= TOTAL - RESERVE and exit_code(found) == 3
    assert clock.given == {step.name: pytest.approx(step.seconds) for step in STEPS if step.seconds}
    assert sum(o.seconds for o in found if o.step.first) <= FIRST


@pytest.mark.parametrize("seed", range(50))
def test_no_call_is_late_and_calls_that_go_on_come_to_an_end(seed):
    made = random.Random(seed)
    clock = Clock({step.name: made.choice((1.0, 30.0, 200.0, 900.0)) * made.random() for step in STEPS})
    done, total = set(), made.choice((540.0, 300.0, 120.0))
    for call in itertools.count():
        before, owed = clock.now, sum(clock.needs.values())
        found = clock.run(total, done)
        assert clock.now - before <= total - min(RESERVE, total / 10) + 1e-6
        if total == TOTAL:
            assert sum(o.seconds for o in found if o.step.first) <= FIRST or done
        done |= {o.step.name for o in found if o.code == 0}
        if exit_code(found) == 0:
            break
        assert sum(clock.needs.values()) < owed and call < 60
    assert not sum(clock.needs.values())


def test_time_that_a_step_does_not_use_goes_to_the_next():
    clock = Clock({step.name: 1e4 for step in STEPS} | {"choices": 20.0})
    clock.run()
    assert clock.given["tests"] == pytest.approx(STEPS[1].seconds + STEPS[0].seconds - 20)
    assert clock.given["batch 1"] == pytest.approx(STEPS[2].seconds)


def test_a_call_that_goes_on_spends_its_time_on_what_is_missing():
    clock = Clock(dict.fromkeys([step.name for step in STEPS], 1e4))
    found = clock.run(done={step.name for step in STEPS if step.first})
    assert not set(clock.given) & {step.name for step in STEPS if step.first}
    assert [o.code for o in found[:3]] == [0, 0, 0] and found[0].seconds == 0
    assert clock.given["models"] > 400
    clock = Clock(dict.fromkeys([step.name for step in STEPS], 1e4))
    clock.run(done={step.name for step in STEPS[:-1]})
    assert clock.given == {"bank": pytest.approx(TOTAL - RESERVE)}


def test_a_step_that_fails_or_hangs_does_not_end_the_run():
    needs = dict.fromkeys([step.name for step in STEPS], 5.0)
    clock = Clock(needs | {"tests": 1e6}, {"tests": 124, "bank": 1})
    found = clock.run()
    assert [o.step for o in found] == list(STEPS) and exit_code(found) == 1
    assert {o.step.name: o.code for o in found if o.code} == {"tests": 124, "bank": 1}
    assert [o.says for o in found if o.code] == ["ended with 124", "something failed"]


def test_steps_for_which_no_time_is_left_are_not_begun():
    clock = Clock(dict.fromkeys([step.name for step in STEPS], 1e4))
    found = clock.run(total=60.0)
    assert set(clock.given) < {step.name for step in STEPS} and clock.given
    assert all(clock.given[s.name] >= s.least for s in STEPS if s.name in clock.given) and clock.now - 100 <= 60
    assert {o.code for o in found} == {3}


def test_shares_shrink_together():
    a, b = Step("a", "a", 60), Step("b", "b", 30)
    assert allowance(90, a, [b]) == 60 and allowance(45, a, [b]) == pytest.approx(30) and allowance(-1, a, [b]) == 0
    assert allowance(100, a, [b]) == 70 and allowance(100, b, []) == 100


def test_the_rows_that_decide_choices_are_those_of_the_benches_and_fit_into_their_share(kernels_stage):
    benches = correct.benches()
    rows = kernels_stage.deciding(benches)
    wanted = {
        (op, case.label, name) for op, bench in benches.items() for case in bench.cases for name in bench.answers
        if case.mode == "forward" and bench.choice(case) is not None and name in bench.names(case)
    }  # fmt: skip
    assert {(bench.op, case.label, provider) for bench, case, provider in rows} == wanted and len(rows) == len(wanted)
    shapes = [key for key, _ in itertools.groupby((bench.op, case.label) for bench, case, _ in rows)]
    assert len(shapes) == len(set(shapes))  # all of a shape together: cut anywhere, all but one shape are decided
    assert [case.flops for _, case, _ in rows] == sorted(case.flops for _, case, _ in rows)
    seconds = START + sum(kernels_stage.cost_of(bench, provider) for bench, _, provider in rows)
    assert seconds <= STEPS[0].seconds


def test_ways_to_call_an_operation_that_nobody_may_choose_are_not_measured(kernels_stage):
    benches = correct.benches()
    rows = [(bench.op, provider) for bench, _, provider in kernels_stage.cells(benches, False)]
    for op, bench in benches.items():
        named = set(bench.answers) | {"eager"} if bench.answers else set(bench.providers)
        assert {provider for name, provider in rows if name == op} - {"compile"} == named
    assert {"split2", "split4", "split8"} <= set(benches["splitk_linear"].providers)
    assert not {provider for _, provider in rows} & {"split2", "split4", "split8"}


def test_batch_1_of_every_model_fits_into_its_share():
    plan = [
        c
        for c in itertools.takewhile(lambda c: c.batch == 1, e2e.cells(False, True))
        if e2e.MAX_GRAPH not in c.providers
    ]
    assert len(plan) == 10
    seconds = START + sum(ROW_S["cell"] * len(c.providers) + 2.5 for c in plan)  # and a model is built
    assert seconds <= STEPS[2].seconds and sum(s.seconds for s in _plan.STEPS[:2]) + seconds <= FIRST


def test_a_bench_that_somebody_adds_joins(tmp_path, monkeypatch):
    (tmp_path / "bench_zoom.py").write_text(
        "from dataclasses import replace\nfrom bench_linear_gelu import BENCH\n"
        "ZOOM = replace(BENCH, op='zoom')\ndel BENCH\n"
    )
    real = correct.Path.glob
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(correct.Path, "glob", lambda self, pattern: [*real(self, pattern), *real(tmp_path, pattern)])
    found = correct.benches()
    assert found["zoom"].answers == found["linear_gelu"].answers != {}

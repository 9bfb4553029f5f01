"""The choice of the load that meets a latency budget."""

from dataclasses import asdict
from typing import Any

import pytest

from vtk.profiling.budget import Candidate, choose


def load(batch: int, p50: float | None, p90: float | None, p99: float | None, rate: float, **more: Any) -> Candidate:
    return Candidate(f"batch {batch}", batch, "eager", p50, p90, p99, rate, **more)


SLOW_TAIL = load(1, 5.0, 6.0, 50.0, 100.0)
STEADY = load(2, 9.0, 10.0, 11.0, 150.0)
FEW_RUNS = load(8, 19.0, None, None, 400.0, largest=True)


def test_the_highest_known_percentile_is_judged_and_the_most_images_win() -> None:
    choice = choose(20.0, [SLOW_TAIL, STEADY, FEW_RUNS], none="nothing")
    assert choice is not None
    assert asdict(choice) == {
        "meets": True, "batch": 8, "load": "eager", "percentile": "p50", "ms": 19.0, "images_per_second": 400.0,
        "text": "budget 20 ms: batch 8 meets it with the most images/s: p50 19.00 ms, 400.0 images/s (the largest "
                "measured; larger ones may meet it too)",
    }  # fmt: skip
    assert choose(12.0, [SLOW_TAIL, STEADY, FEW_RUNS], none="nothing").batch == 2  # type: ignore[union-attr]


def test_of_two_as_quick_the_better_known_one_wins() -> None:
    choice = choose(20.0, [FEW_RUNS, load(4, 8.0, 9.0, 10.0, 400.0)], none="nothing")
    assert choice is not None and (choice.batch, choice.percentile) == (4, "p99")


def test_none_meets_it_or_none_can_be_judged() -> None:
    choice = choose(1.0, [SLOW_TAIL, STEADY], none="no batch")
    assert choice is not None and not choice.meets and choice.batch == 2
    assert choice.text == "budget 1 ms: no batch meets it; the nearest is batch 2: p99 11.00 ms"
    assert choose(1.0, [load(1, None, None, None, 5.0)], none="no batch") is None


@pytest.mark.parametrize(("stable", "said"), [(None, False), (True, False), (False, True)])
def test_an_unstable_choice_says_so(stable: bool | None, said: bool) -> None:
    choice = choose(20.0, [load(1, 5.0, None, None, 9.0, stable=stable)], none="")
    assert choice is not None and ("measure it again" in choice.text) is said

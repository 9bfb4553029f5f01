"""Servers that die in the middle, answer slowly or are stopped by the user, and the search on a real loop."""

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from vtk.errors import UsageError
from vtk.profiling.server import drive, load, traffic
from vtk.profiling.server.config import ServerConfig
from vtk.profiling.server.drive import profile_server
from vtk.profiling.server.result import ServerLevel, ServerResult


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "WARMUP_S", 0.05)
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *_: None)  # it would print what is raised below


def run(url: str, **options: Any) -> ServerResult:
    values = {"concurrency": (1,), "duration": 0.3, "stability": 500.0, **options}
    return profile_server(ServerConfig(server=url, **values), show_progress=False)


def test_a_server_that_dies_ends_its_loads_and_keeps_the_earlier_ones(model, http_url: str) -> None:
    """It closes every connection without a word, statistics too, as a killed process does."""
    stats = model.stats

    def dying(number: int, logits: np.ndarray) -> np.ndarray:
        if number > 150:
            model.stats = lambda: 1 / 0
            raise OSError("killed")
        return logits

    model.fault, model.service_s = dying, 0.001
    begin = time.perf_counter()
    result = run(http_url, concurrency=(1, 2, 8, 16), duration=2.0)
    # what is left of a load ends after so many failures in a row; of two seconds each it would have been eight
    assert time.perf_counter() - begin < 6
    statuses = [(level.status, level.failed > 0) for level in result.levels]
    assert len(statuses) == 4 and statuses[0] == ("ok", True) and statuses[-1] == ("failed", True)
    assert result.levels[0].requests > 50 and load.GIVE_UP <= result.levels[0].failed < 2 * load.GIVE_UP
    assert result.levels[0].queue_ms is None and "Remote" in result.levels[0].reason
    assert result.exit_code == 1 and any("requests failed" in text for text in result.warnings)
    model.stats = stats


def test_a_slow_answer_is_a_failure_after_the_timeout(model, http_url: str) -> None:
    model.service_s = 0.5
    (level,) = run(http_url, timeout=0.1).levels
    assert level.status == "failed" and "timed out" in level.reason
    assert level.p50_ms is None


def test_few_answers_have_no_percentile_and_no_place_in_the_budget(model, http_url: str) -> None:
    model.service_s = 0.05
    result = run(http_url, duration=0.2, budget_ms=1000.0)
    assert [level.concurrency for level in result.levels] == [1]
    assert result.levels[0].status == "ok" and result.levels[0].p50_ms is None and result.levels[0].mean_ms >= 50
    assert result.budget == "budget 1000 ms: no load could be judged" and result.to_dict()["choice"] is None


def test_with_a_budget_alone_the_concurrency_is_found(model, http_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_at_a_time(self: Any, level: ServerLevel) -> ServerLevel:
        """What n clients see of a server that takes 5 ms, without the noise of a busy machine."""
        clients = level.concurrency or 0
        times = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "mean_ms"), 5.0 * clients)
        return dataclasses.replace(level, requests=1000, images_per_second=200.0, stable=True, **times)

    monkeypatch.setattr(drive.Traffic, "measure", one_at_a_time)
    result = run(http_url, concurrency=None, budget_ms=500.0)
    # two doublings that bring nothing end it
    assert [level.concurrency for level in result.levels] == [1, 2, 4]
    assert result.choice is not None and result.choice.meets
    short = run(http_url, concurrency=None, budget_ms=1.0)
    assert [level.concurrency for level in short.levels] == [1] and "no load meets it" in short.budget


def test_the_search_measures_real_loads(model, http_url: str) -> None:
    model.service_s = 0.005  # one at a time: n clients wait 5 n ms
    result = run(http_url, concurrency=None, budget_ms=5000.0)
    tried = [level.concurrency for level in result.levels]
    assert tried and tried == [2**i for i in range(len(tried))]
    assert all(level.mean_ms is not None and level.mean_ms >= 5 for level in result.levels)


def test_ctrl_c_keeps_the_loads_that_were_measured(model, http_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = drive.Traffic.measure

    def stopping(self: Any, level: Any) -> Any:
        if level.concurrency == 4:
            raise KeyboardInterrupt
        return measure(self, level)

    monkeypatch.setattr(drive.Traffic, "measure", stopping)
    result = run(http_url, concurrency=(1, 4, 8), duration=0.1)
    assert [level.concurrency for level in result.levels] == [1]
    assert result.stopped and result.exit_code == 130 and "stopped" in result.warnings[0]
    with pytest.raises(KeyboardInterrupt):
        run(http_url, concurrency=(4,))


@pytest.mark.parametrize(("options", "clients", "searches"), [
    ({}, (1, 4, 16), False), ({"rate": (5.0,)}, (), False), ({"budget_ms": 9.0}, (), True),
    ({"budget_ms": 9.0, "rate": (5.0,)}, (), False), ({"budget_ms": 9.0, "concurrency": (2,)}, (2,), False),
    ({"concurrency": (3,), "rate": (5.0,)}, (3,), False),
])  # fmt: skip
def test_which_loops_are_measured(options: dict[str, Any], clients: tuple[int, ...], searches: bool) -> None:
    config = ServerConfig(server="h:1", **options)
    assert (config.clients, config.searches) == (clients, searches)


@pytest.mark.parametrize(("options", "said"), [
    ({"concurrency": (5000,)}, "at most 1024"), ({"seed": -1}, "seed"), ({"seed": 1 << 64}, "seed"),
])  # fmt: skip
def test_numbers_that_no_machine_takes_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ServerConfig(server="h:1", **options)

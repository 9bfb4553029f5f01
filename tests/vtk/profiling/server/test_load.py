"""Loops against a service whose times are known, without a network."""

import statistics
import threading
import time

import numpy as np
import pytest

from vtk.profiling.server.client import Counters, RequestFailed, read_counters
from vtk.profiling.server.load import Run, arrivals, closed_loop, open_loop


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(arrivals(200.0, 50.0, seed=1))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, rel=0.04)
    assert gaps.mean() == pytest.approx(gaps.std(), rel=0.04)  # exponential: its deviation is its mean
    counts = np.histogram(times, bins=50, range=(0, 50))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.5)  # Poisson: variance is the mean
    assert list(arrivals(200.0, 1.0, seed=1)) == list(times[times < 1.0])


def test_closed_loop_keeps_its_number_under_way() -> None:
    under_way, most, lock = 0, 0, threading.Lock()

    def send(number: int) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)
        with lock:
            under_way -= 1

    run = closed_loop(send, 4, 0.3)
    assert most == 4 and min(run.latencies) >= 0.01
    assert 40 <= len(run.latencies) <= 124  # at most 4 × 31


def test_a_stall_counts_for_all_who_would_have_come_meanwhile() -> None:
    def server():
        turn, served = threading.Lock(), iter(range(10**9))

        def send(number: int) -> None:
            with turn:  # one request at a time, and the tenth takes half a second
                time.sleep(0.5 if next(served) == 10 else 0.0005)

        return send

    closed, opened = closed_loop(server(), 1, 1.0), open_loop(server(), 100.0, 1.0, seed=3)
    assert statistics.quantiles(closed.latencies, n=10)[-1] < 0.1  # one request in hundreds saw it
    waited = [s for s in opened.latencies if s > 0.05]
    assert 30 <= len(waited) <= 70  # about 100/s × 0.5 s
    assert statistics.quantiles(opened.latencies, n=10)[-1] > 0.3
    assert max(opened.latencies) >= 0.45


def test_waiting_for_a_free_sender_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtk.profiling.server.load.MAX_IN_FLIGHT", 1)
    run = open_loop(lambda number: time.sleep(0.02), 200.0, 0.3, seed=0)
    # 60 requests of 20 ms one after the other: the last is about 60 × 20 − 300 = 900 ms late
    assert max(run.latencies) > 0.5 and max(run.service) < 0.2
    assert run.late > 0.8 * len(run.latencies)


def test_failures_are_counted_and_have_no_time() -> None:
    def send(number: int) -> None:
        if number % 2:
            raise RequestFailed("503 busy")
        time.sleep(0.001)

    run = closed_loop(send, 1, 0.1)
    assert abs(len(run.failed) - len(run.latencies)) <= 1 and run.failed[0] == "503 busy"


def test_an_error_of_ours_is_not_a_failed_request() -> None:
    def send(number: int) -> None:
        raise TypeError("bug")

    with pytest.raises(TypeError, match="bug"):
        closed_loop(send, 2, 0.05)


def test_windows_by_time() -> None:
    run = Run([1.0, 2.0, 3.0, 9.0], [0.1, 0.3, 0.5, 0.99], seconds=1.0)
    assert run.windows() == [[1.0], [2.0], [3.0], [9.0]]
    assert run.spread() == pytest.approx(3.5)


def test_counters_of_triton_also_as_text() -> None:
    stats = {
        "model_stats": [
            {"name": "m", "version": "1"},
            {"name": "m", "version": "2", "inference_count": "80", "execution_count": "10", "inference_stats": {
                "success": {"count": "20", "ns": "9"}, "queue": {"count": "20", "ns": "1000"},
                "compute_input": {"ns": "1"}, "compute_infer": {"ns": "20"}, "compute_output": {"ns": "300"}}},
        ]
    }  # fmt: skip
    found = read_counters(stats, "2")
    assert found == Counters(20, 80, 10, 1000, 321)
    assert found.since(Counters(10, 40, 5, 400, 21)) == Counters(10, 40, 5, 600, 300)
    assert read_counters({"model_stats": []}, "2") is None

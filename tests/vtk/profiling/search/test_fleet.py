"""Instances of a setup: what is timed, what is compared, and what becomes of one that fails."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vtk
from vtk.profiling.inputs import make_inputs
from vtk.profiling.search import instance
from vtk.profiling.search.fleet import Calls, Fleet
from vtk.profiling.search.instance import Instance
from vtk.profiling.search.setup import Reading, Setup
from vtk.profiling.search.variants import Variant
from vtk.runtime.backends.base import load_backend


class Toy(nn.Module):
    """Maps images to five logits that depend on each of them."""

    img_size = 8

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).flatten(1)


@pytest.fixture(scope="module")
def source() -> Any:
    return vtk.open_source(Toy(), img_size=8)


@pytest.fixture(scope="module")
def calls(source: Any) -> Calls:
    images = make_inputs(source, 4, seed=0).images
    with torch.inference_mode():
        logits = source.model()(images)
    return Calls({"pixel_values": images}, logits, False, duration_s=0.04, budget_ms=50.0)


def eager(batch: int, instances: int = 1) -> Setup:
    return Setup("eager", "fp32", 1, instances, batch)


@pytest.fixture
def build(source: Any, calls: Calls, local: list[str]) -> Callable[..., Fleet]:
    def make(weights: int = 1000, **more: Any) -> Fleet:
        variant = Variant("eager", "fp32", source)
        return Fleet({variant.key: variant}, more.pop("calls", calls), weights, {}, **more)

    return make


def test_windows_take_turns_and_hold_the_calls_of_every_instance(build: Callable[..., Fleet], local: list[str]) -> None:
    told: list[Setup] = []
    fleet = build(tell=told.append)
    fleet.measure([(eager(1), 2), (eager(2, instances=2), 1)])
    assert {s: len(r.windows) for s, r in fleet.readings.items()} == {eager(1): 2, eager(2, 2): 1}
    assert all(len(w) >= instance.LEAST_CALLS * s.instances for s, r in fleet.readings.items() for w in r.windows)
    assert told == [eager(2, 2), eager(1)] and not fleet.reasons
    # the second instance was loaded beside the first, nothing was loaded twice
    assert [name for name in local if name in ("begin", "load")] == ["begin", "load"] * 2


def test_wrong_answers_are_no_latency(build: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(*arguments: Any, **options: Any) -> Any:
        backend = load_backend(*arguments, **options)
        right = backend.run
        backend.run = lambda inputs: {"logits": right(inputs)["logits"].flip(0)}  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(instance, "load_backend", swapped)
    fleet = build()
    fleet.measure([(eager(1), 1), (eager(2), 1)])
    assert list(fleet.readings) == [eager(1)]  # of one image there is nothing to swap
    assert fleet.wrong == {eager(2)} and "wrong output" in fleet.reasons[eager(2)]


def test_first_calls_far_beyond_the_budget_end_a_setup_of_a_search_only(
    build: Callable[..., Fleet], calls: Calls, local: list[str]
) -> None:
    for hasty, requests in ((True, 1), (False, 2)):
        local.clear()
        fleet = build(calls=replace(calls, budget_ms=1e-6, hasty=hasty))
        fleet.measure([(eager(1), 1)])
        assert local.count("calls") == requests and fleet.readings[eager(1)].windows


def test_instances_that_do_not_fit_into_memory_are_not_tried(build: Callable[..., Fleet]) -> None:
    fleet = build(weights=10**15)
    fleet.measure([(eager(1, instances=2), 1)])
    assert not fleet.readings and "would take about" in fleet.reasons[eager(1, 2)]


def test_an_instance_that_fails_to_load_says_why(build: Callable[..., Fleet]) -> None:
    fleet = build()
    broken = Variant("ort-cpu", "fp32", fleet.variants["eager", "fp32"].source)
    fleet.variants = {broken.key: broken}
    setup = Setup("ort-cpu", "fp32", 1, 1, 1)
    fleet.measure([(setup, 3)])
    assert setup not in fleet.readings and "runs .onnx files" in fleet.reasons[setup]


def test_calls_that_end_after_the_others_count_only_where_there_are_few(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(instance, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=wait))
    one = Instance(dict(calls.inputs), calls.reference, False)
    one.call = lambda: wait(0.01)  # type: ignore[method-assign]
    assert one.calls(1.0, 1.045, 2) == pytest.approx([10.0] * 4)
    assert one.calls(2.0, 2.0, 2) == pytest.approx([10.0] * 2)


@pytest.mark.slow
def test_two_real_processes_run_at_the_same_time_and_one_that_dies_is_replaced(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: dict[Setup, Reading] = {}
    # a module of a test cannot be unpickled elsewhere
    plain = vtk.open_source(nn.Sequential(nn.Conv2d(3, 5, 8), nn.Flatten()), img_size=8)
    with torch.inference_mode():
        logits = plain.model()(calls.inputs["pixel_values"])
    variant = Variant("eager", "fp32", plain)
    with Fleet({variant.key: variant}, replace(calls, reference=logits), 1000, readings) as fleet:
        fleet.measure([(eager(2, instances=2), 2)])
        assert not fleet.reasons and len(readings[eager(2, 2)].windows) == 2
        first, second = (process.process for process in fleet._running)
        second.kill()
        second.wait()
        fleet.measure([(eager(2, instances=2), 1)])
        assert not fleet.reasons and len(readings[eager(2, 2)].windows) == 3
        assert fleet._running[0].process is first and fleet._running[1].process is not second
        # a module that the other process cannot import is a reason, and the process goes on
        monkeypatch.setitem(sys.modules, "only_here", SimpleNamespace(Local=type("Local", (Toy,), {})))
        sys.modules["only_here"].Local.__module__ = "only_here"
        local = vtk.open_source(sys.modules["only_here"].Local(), img_size=8)
        fleet.variants = {("eager", "bf16"): Variant("eager", "bf16", local, "bf16")}
        fleet.measure([(Setup("eager", "bf16", 1, 1, 1), 1)])
        assert "only_here" in fleet.reasons[Setup("eager", "bf16", 1, 1, 1)]
        assert fleet._running[0].process is first and first.poll() is None
    assert first.poll() is not None

"""Timing of calls on a simulated CUDA: contents of a graph, and recovery from a capture that fails."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import _runner
import _timing
import correct
import pytest
import torch

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
US = 5.0
"""Microseconds of a call on the pretended device."""


class Device:
    """The parts of `torch.cuda` that a graph needs, with a clock that only replays move."""

    def __init__(self, cache=1000):
        self.now, self.stream, self.capturing, self.cache, self.ended = 0.0, "main", None, cache, []
        self.replays = []

    def patch(self, monkeypatch):
        device = self

        class Graph:
            calls = 0

            def replay(self):
                assert device.stream == "side"
                device.now += US * self.calls
                device.replays.append(self.calls)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def elapsed_time(self, other):
                return 1e-3 * (other.at - self.at)

        @contextlib.contextmanager
        def stream(which):
            before, device.stream = device.stream, which.name
            yield
            device.stream = before

        @contextlib.contextmanager
        def capture(graph, pool, stream, capture_error_mode):
            assert (stream.name, device.stream, pool, capture_error_mode) == ("side", "side", (0, 1), "thread_local")
            device.capturing = graph
            try:
                yield
            finally:
                device.capturing = None

        def named(name):
            return SimpleNamespace(name=name, wait_stream=lambda other: None)

        fakes = {
            "CUDAGraph": Graph, "Event": Event, "stream": stream, "graph": capture, "Stream": lambda: named("side"),
            "current_stream": lambda: named(device.stream), "graph_pool_handle": lambda: (0, 1),
            "synchronize": lambda: None, "current_device": lambda: 0,
            "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=device.cache),
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, lambda *args, n=name: self.ended.append((n, *args)), raising=False)
        monkeypatch.setattr(_timing, "_broken", [])
        _timing.side_stream.cache_clear()

    def call(self):
        """What a kernel does: it becomes part of the graph that is being captured."""
        if self.capturing is not None:
            self.capturing.calls += 1


@pytest.fixture
def device(monkeypatch):
    found = Device()
    found.patch(monkeypatch)
    yield found
    _timing.side_stream.cache_clear()


@pytest.mark.parametrize(("size", "sets"), [(1, 32), (63, 32), (100, 20), (999, 3), (1000, 2), (2000, 1), (9000, 1)])
def test_operands_are_cloned_until_they_are_twice_the_cache(size, sets):
    assert _timing.sets_for(size, 1000) == sets


def test_graphs_last_long_enough_and_hold_not_too_many_calls():
    assert _timing.rounds_for(32 * 1.5, 32) == 12  # 384 calls; 400 would not be whole rounds
    assert _timing.rounds_for(100.0, 1) == 10 and _timing.rounds_for(5000.0, 1) == 1 and _timing.rounds_for(0, 1) == 400
    assert [_timing.replays_for(us) for us in (0, 1000, 5000, 50_000)] == [20, 20, 12, 7]


def test_a_copy_keeps_strides_and_gaps():
    for x in (torch.arange(24.0).view(4, 6)[:, :3], torch.arange(6).view(2, 3).T, torch.tensor(3.0)):
        copy = _timing.twin(x)
        assert copy.stride() == x.stride() and torch.equal(copy, x) and copy.data_ptr() != x.data_ptr()


def test_the_calls_of_a_graph_take_turns_on_their_own_operands(device):
    sets = []

    def bind(operands):
        assert device.stream == "side"
        sets.append(operands["x"])
        return device.call

    x = torch.arange(100, dtype=torch.float32)  # 400 bytes: five sets are twice the cache
    assert _timing.time_in_graph(bind, {"x": x}, CPU) == pytest.approx((US, US, US))
    assert len({t.data_ptr() for t in (x, *sets)}) == 6 and all(torch.equal(t, x) for t in sets)
    # one round to see how long it takes, then enough of them for a millisecond
    assert device.replays == [5] * _timing.WARM + [200] * (_timing.WARM + _timing.MOST)
    assert device.stream == "main"


def test_a_long_call_is_captured_once(device):
    device.cache = 1
    _timing.time_in_graph(lambda operands: lambda: [device.call() for _ in range(1000)], {"x": torch.zeros(9)}, CPU)
    assert device.replays == [1000] * (_timing.WARM + 12)


def test_a_capture_that_fails_is_closed(device):
    def call():
        if device.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        _timing.time_in_graph(lambda operands: call, {"x": torch.zeros(9)}, CPU)
    assert device.ended == [("_cuda_endAllocateToPool", 0, (0, 1)), ("_cuda_releasePool", 0, (0, 1))]
    assert len(_timing._broken) == 1


@pytest.mark.parametrize("uncapturable", [False, True])
def test_what_cannot_be_captured_is_timed_with_its_launches(monkeypatch, capsys, uncapturable):
    asked = []

    def refuse(*args):
        asked.append("graph")
        raise RuntimeError("operation not\npermitted when stream is capturing")

    monkeypatch.setattr(_runner, "time_in_graph", refuse)
    monkeypatch.setattr(_runner, "recover", lambda: asked.append("recover"))
    monkeypatch.setattr(_runner, "time_call", lambda *args, **kwargs: (3.0, 2.0, 4.0))
    bench = replace(correct.benches()["norm"], uncapturable=("eager",) if uncapturable else ())
    case = replace(bench.checks[0], dtype="fp32")
    args = (bench, case, "eager", bench.providers["eager"], bench.make(case, CPU), torch.device("cuda"), True)
    assert _runner.timed(*args) == ("launch", (3.0, 2.0, 4.0))
    assert asked == ([] if uncapturable else ["graph", "recover"])
    text = capsys.readouterr().out
    assert ("not captured, RuntimeError: operation not permitted" in text) != uncapturable


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("index", [0, -1])
def test_on_a_gpu_a_graph_is_quicker_than_launches(index):
    bench = correct.benches()["norm"]
    case = replace(bench.checks[index], dtype="bf16")
    row = _runner.measure(bench, case, "vtk", torch.device("cuda"), None)
    assert row["timer"] == "graph" and 0 < row["p20_us"] <= row["p50_us"] <= row["p80_us"] < 30


@pytest.mark.gpu
@CUDA
def test_on_a_gpu_a_broken_capture_is_survived():
    def bind(operands):
        return lambda: operands["x"].sum().item()

    with pytest.raises(RuntimeError):
        _timing.time_in_graph(bind, {"x": torch.ones(9, device="cuda")}, torch.device("cuda"))
    _timing.recover()
    torch.cuda.empty_cache()
    x = torch.randn(9, device="cuda")
    assert _timing.time_in_graph(lambda operands: lambda: operands["x"] + 1, {"x": x}, x.device)[0] < 30

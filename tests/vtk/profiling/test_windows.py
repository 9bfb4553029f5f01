"""Stability windows, turns, and what is flagged while something is timed."""

import itertools
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vtk.profiling import measure, memory
from vtk.profiling.calls import MIN_RUNS
from vtk.profiling.inputs import Inputs
from vtk.profiling.measure import WINDOW_RUNS, WINDOWS, Plan
from vtk.profiling.report import print_result
from vtk.profiling.rows import values
from vtk.profiling.stats import spread

Fault = Callable[[int, Tensor, int], Tensor]


def sleeping(seconds: Callable[[int, int], float]) -> Fault:
    """A fault that takes ``seconds(batch, call)``."""

    def fault(batch: int, logits: Tensor, call: int) -> Tensor:
        time.sleep(seconds(batch, call))
        return logits

    return fault


def test_spread_of_the_last_windows() -> None:
    windows = [[9.0], [1.0, 2.0, 99.0], [2.2], [2.1, 2.1]]
    assert spread(windows) == pytest.approx(0.1)  # medians 2, 2.2, 2.1; the first window is forgotten
    assert spread(windows[:2]) is None


def test_a_steady_backend_is_stable_and_ends_before_its_duration(fakes) -> None:
    steady = fakes.Backend("eager", sleeping(lambda batch, call: 0.005))
    result = fakes.run({"eager": steady}, batch_sizes=(1,), duration=4.0, stability=100.0)
    (cell,) = result.backends[0].cells
    assert cell.stable and cell.spread < 1 and cell.windows >= WINDOWS
    assert cell.runs >= 100 and cell.p90_ms is not None  # 4 s have room for p90's 100 runs, not for p99's 1,000
    assert cell.runs * cell.mean_ms < 3500
    assert not any("unstable" in text for text in result.warnings)


def test_a_backend_that_becomes_slower_is_unstable_and_takes_its_whole_duration(
    fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = fakes.Backend("eager", sleeping(lambda batch, call: 0.001 * 1.05**call if call < 120 else 0.001))
    result = fakes.run({"eager": worse}, batch_sizes=(1,), duration=0.3, stability=5.0)
    (cell,) = result.backends[0].cells
    assert cell.stable is False and cell.spread > 0.05
    (warning,) = result.warnings
    assert warning.startswith("eager: unstable at batch 1: ") and "allowed 5 %" in warning
    assert values(result.backends[0], cell)[1] == f"~{cell.runs}"
    print_result(result)
    assert "~ runs: unstable" in capsys.readouterr().out


def test_a_cell_has_at_least_three_windows_however_short_the_duration(fakes) -> None:
    (cell,) = fakes.run({"eager": fakes.Backend("eager")}, batch_sizes=(1,), duration=1e-6).backends[0].cells
    assert cell.windows == WINDOWS and cell.runs >= max(MIN_RUNS, WINDOWS * WINDOW_RUNS)


@pytest.mark.parametrize("each_s,runs,enough", [
    (0.3, 12, True), (0.3, 9, False),  # 10 s have no room for 20 runs... 33 of them: p50 fits
    (0.05, 99, False), (0.05, 100, True), (0.001, 999, False), (0.001, 1000, True),
])  # fmt: skip
def test_a_stable_cell_still_gets_the_percentile_that_fits(each_s: float, runs: int, enough: bool) -> None:
    plan = Plan(Inputs(torch.zeros(1), "zeros"), torch.zeros(1), "fp32", duration_s=10.0 if each_s < 0.3 else 5.0)
    assert plan.enough(runs, runs * each_s) is enough


def test_backends_take_turns_at_each_batch_size(fakes) -> None:
    log: list[tuple[str, int]] = []

    def logged(name: str) -> Fault:
        def fault(batch: int, logits: Tensor, call: int) -> Tensor:
            log.append((name, batch))
            time.sleep(0.001)
            return logits

        return fault

    backends = {name: fakes.Backend(name, logged(name)) for name in ("eager", "compile", "fused")}
    fakes.run(backends, batch_sizes=(1, 2), duration=0.1, stability=1e-9)
    batches = [batch for batch, _ in itertools.groupby(batch for _, batch in log)]
    assert batches == [1, 2]
    turns = [name for name, _ in itertools.groupby(name for name, batch in log if batch == 2)]
    # one stretch each of first call and warm-up, one of each window, one of the comparison after
    assert len(turns) > 3 * 4
    middle = turns[3:-3]
    assert {len(set(middle[i : i + 3])) for i in range(0, len(middle) - 3, 3)} <= {2, 3}
    assert len({tuple(middle[i : i + 3]) for i in range(0, len(middle) - 3, 3)}) > 1  # not always in one order


def test_in_sequence_each_backend_is_done_before_the_next(fakes) -> None:
    log: list[str] = []
    backends = {
        name: fakes.Backend(name, lambda batch, logits, call, name=name: (log.append(name), logits)[1])
        for name in ("eager", "compile")
    }
    result = fakes.run(backends, batch_sizes=(1, 2), order="sequential")
    assert [name for name, _ in itertools.groupby(log)] == ["eager", "compile"]
    assert result.order.startswith("one back-end after the other")


def test_a_call_of_another_backend_does_not_count(fakes) -> None:
    slow = fakes.Backend("eager", sleeping(lambda batch, call: 0.02))
    result = fakes.run({"eager": slow, "compile": fakes.Backend("compile")}, batch_sizes=(1,), duration=0.2)
    a, b = (backend.cells[0] for backend in result.backends)
    assert a.min_ms >= 20 and b.mean_ms < 15


def test_a_recompilation_while_timed_is_flagged(fakes, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

    def recompiling(batch: int, logits: Tensor, call: int) -> Tensor:
        double(torch.zeros(1 + (call == 9)))  # another shape once; 4 calls go before the timed ones
        return logits

    result = fakes.run({"eager": fakes.Backend("eager", recompiling)}, batch_sizes=(1,), duration=1e-6)
    (cell,) = result.backends[0].cells
    assert cell.status == "ok" and cell.recompiles == 1
    assert any("batch 1 compiled once while timed" in text for text in result.warnings)
    print_result(result)
    assert "compiled once" in " ".join(capsys.readouterr().err.split())


def test_a_kernel_that_triton_builds_while_timed_is_flagged(fakes) -> None:
    knobs = pytest.importorskip("triton.knobs")

    def building(batch: int, logits: Tensor, call: int) -> Tensor:
        if call == 9 and knobs.runtime.jit_post_compile_hook is not None:
            knobs.runtime.jit_post_compile_hook(key="", repr="", fn=None, compile={}, is_manual_warmup=False)
        return logits

    before = knobs.runtime.jit_post_compile_hook
    result = fakes.run({"eager": fakes.Backend("eager", building)}, batch_sizes=(1,), duration=1e-6)
    assert result.backends[0].cells[0].recompiles == 1
    assert knobs.runtime.jit_post_compile_hook is before


def test_a_compilation_before_the_timed_calls_is_not(fakes) -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    steady = fakes.Backend("eager", lambda batch, logits, call: (double(torch.zeros(3)), logits)[1])
    result = fakes.run({"eager": steady}, batch_sizes=(1,), duration=0.001)
    assert result.backends[0].cells[0].recompiles == 0


def test_latency_that_falls_with_the_batch_is_flagged_end_to_end(fakes) -> None:
    odd = fakes.Backend("eager", sleeping(lambda batch, call: 0.02 if batch == 1 else 0.005))
    result = fakes.run({"eager": odd}, batch_sizes=(1, 2), duration=0.1)
    assert any("batch 2 took" in text and "less than batch 1" in text for text in result.warnings)


def test_host_copies_are_said_and_the_same_for_all(fakes) -> None:
    places = []

    def seen(batch: int, logits: Tensor, call: int) -> Tensor:
        places.append(logits.device.type)
        return logits

    backends = {name: fakes.Backend(name, seen) for name in ("eager", "compile")}
    with_copies = fakes.run(backends, batch_sizes=(1,), h2d="in")
    assert with_copies.h2d == "in" and "are in the times of every back-end" in with_copies.inputs
    assert [b.cells[0].status for b in with_copies.backends] == ["ok", "ok"]
    without = fakes.run(backends, batch_sizes=(1,))
    assert without.h2d == "out" and "not in the times, for any back-end" in without.inputs


@pytest.mark.gpu
def test_copies_from_the_host_take_time(fakes) -> None:
    pytest.skip("needs a CUDA device") if not torch.cuda.is_available() else None
    from vtk.profiling.measure import CellRun

    device = torch.device("cuda", 0)
    images = torch.randn(64, 3, 224, 224)
    times = {}
    for h2d in ("out", "in"):
        backend = fakes.Backend("eager", device=device)
        backend.model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()).to(device)
        backend.synchronize = torch.cuda.synchronize
        run = CellRun(backend, 64, Plan(Inputs(images, "noise"), images.mean((2, 3)), "fp32", 0.5, h2d=h2d))  # type: ignore[arg-type]
        run.prepare()
        while not run.over:
            run.window()
        times[h2d] = run.finish().p50_ms
    assert times["in"] > times["out"]


@pytest.mark.timing
@pytest.mark.slow
def test_medians_are_within_3_percent_of_a_hand_written_loop() -> None:
    from vtk.profiling.measure import CellRun
    from vtk.runtime.backends.base import load_backend
    from vtk.runtime.opening import open_source

    backend = load_backend("eager", open_source("test_vit", pretrained=False), threads=1)
    images = torch.randn(1, 3, 160, 160)
    reference = backend.run({"pixel_values": images})["logits"]
    run = CellRun(backend, 1, Plan(Inputs(images, "noise"), reference, "fp32", duration_s=1.0))
    run.prepare()
    by_hand = []
    for _ in range(150):  # taken in short turns, so that a busy machine hurts both
        run.window()
        for _ in range(len(run._windows[-1])):
            start = time.perf_counter()
            backend.run({"pixel_values": images})["logits"]
            by_hand.append(time.perf_counter() - start)
    seconds = [s for window in run._windows for s in window]
    ratio = statistics.median(seconds) / statistics.median(by_hand)
    print(f"{ratio:.4f} over {len(seconds)} runs")
    assert ratio == pytest.approx(1, abs=0.03)


def test_a_refusal_while_timed_is_a_row_of_the_default_set_and_ends_a_named_run(
    fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtk.errors import UnavailableError, VerificationError
    from vtk.profiling.session import Session

    monkeypatch.setattr(Session, "_export", lambda self, kind: VerificationError("not exported here"))

    def refuses(batch: int, logits: Tensor, call: int) -> Tensor:
        if call == 7:
            raise UnavailableError("the card is gone")
        return logits

    backends = {name: fakes.Backend(name) for name in ("compile", "fused")}
    found = fakes.run({"eager": fakes.Backend("eager", refuses), **backends}, names=(), batch_sizes=(1,))
    assert found.backends[0].status == "unavailable" and found.backends[0].cells == ()
    assert found.backends[1].cells[0].status == "ok"
    with pytest.raises(UnavailableError, match="card is gone"):
        fakes.run({"eager": fakes.Backend("eager", refuses)}, batch_sizes=(1,))


def test_what_other_backends_hold_of_the_allocator_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [100 << 20]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[0])
    holdings = memory.Holdings(torch.device("cuda", 0))
    for name, size in (("a", 96 << 20), ("b", 48 << 20)):
        with holdings.charge(name):
            held[0] += size
    assert (holdings.of_others("a"), holdings.of_others("b")) == (48 << 20, 96 << 20)
    with pytest.raises(KeyError), holdings.charge("a"):
        held[0] -= 90 << 20
        raise KeyError("what was given back counts, whatever ended the block")
    assert holdings.of_others("b") == 6 << 20
    with holdings.charge("a"):
        held[0] -= 20 << 20
    assert holdings.of_others("b") == 0  # never less than nothing


def test_no_difference_of_the_process_is_taken_for_a_backends_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.psutil, "Process", lambda *_: pytest.fail("the process was read"))
    holdings = memory.Holdings(torch.device("cpu"))
    with holdings.charge("a"):
        block = torch.ones(1 << 20)
    assert holdings.of_others("b") == 0 and len(block)


@pytest.mark.parametrize("fault", ["stale", "same images", "buffer"])
def test_a_backend_that_is_right_only_while_the_images_stay_is_found_out(fakes, fault: str) -> None:
    """Its first answer is right: what comes later belongs to the call before, or to the first images."""
    seen: list[Tensor] = []

    def wrong(batch: int, logits: Tensor, call: int) -> Tensor:
        seen.append(logits.clone())
        kept = {"stale": seen[max(call - 2, 0)], "same images": seen[0]}
        return kept[fault] if fault in kept else logits if call < 40 else logits * float("nan")

    result = fakes.run({"eager": fakes.Backend("eager", wrong)}, batch_sizes=(1,))
    (cell,) = result.backends[0].cells
    assert cell.status == "mismatch" and "right at first" in cell.reason and cell.p50_ms is None
    assert result.exit_code == 4


def test_a_window_with_a_wrong_last_answer_is_the_last_one(fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARMUP_S", 0.0)

    def wrong(batch: int, logits: Tensor, call: int) -> Tensor:
        time.sleep(0.001)
        return logits + (call > 12)

    backend = fakes.Backend("eager", wrong)
    (cell,) = fakes.run({"eager": backend}, batch_sizes=(1,), duration=2.0).backends[0].cells
    assert cell.status == "mismatch" and "in the timed runs" in cell.reason
    assert backend.calls < 150  # a window of a tenth of a second

import statistics
import subprocess
import sys
import time

import pytest
import torch

from vtk.profiling import memory, rounds
from vtk.profiling.calls import MIN_RUNS, time_calls
from vtk.profiling.cells import Cell
from vtk.profiling.compare import batch_of, compare, remarks, torch_reference
from vtk.profiling.rounds import predicted_shortage


def nothing() -> None:
    """A device that is always done."""


def test_at_least_ten_runs_however_short_the_duration() -> None:
    assert len(time_calls(nothing, nothing, duration_s=1e-9)) == MIN_RUNS


def test_stops_after_the_duration() -> None:
    start = time.perf_counter()
    runs = time_calls(lambda: time.sleep(0.005), nothing, duration_s=0.2)
    assert 0.2 <= time.perf_counter() - start < 0.4
    assert 10 <= len(runs) <= 40


def test_time_of_work_that_only_the_synchronisation_waits_for_is_counted() -> None:
    assert min(time_calls(nothing, lambda: time.sleep(0.02), duration_s=0.01)) >= 0.02


def test_loop_adds_less_than_3_percent_to_a_call_of_a_fifth_of_a_millisecond() -> None:
    # what lies between the two clock readings when the call itself takes no time; robust on a busy machine, unlike two
    # medians of real work. Beside a hand-written loop: `test_loop_agrees_with_a_hand_written_one`
    assert statistics.median(time_calls(nothing, nothing, duration_s=0.05)) < 0.03 * 0.2e-3


@pytest.mark.timing
@pytest.mark.slow
def test_loop_agrees_with_a_hand_written_one() -> None:
    x = torch.randn(256, 256)
    loop, by_hand = [], []
    for _ in range(50):  # taken in turn, so that a busy machine hurts both
        loop += time_calls(lambda: x @ x, nothing, duration_s=0.0)
        for _ in range(10):
            start = time.perf_counter()
            x @ x
            by_hand.append(time.perf_counter() - start)
    assert statistics.median(loop) / statistics.median(by_hand) == pytest.approx(1, abs=0.03)


def test_equal_outputs_pass_and_the_difference_is_reported() -> None:
    reference = torch.randn(4, 10)
    found = compare(reference + 1e-5, reference, "fp32")
    assert found.ok and found.max_diff == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize("precision,error,ok", [
    ("fp32", 0.9e-4, True), ("fp32", 1.1e-4, False),  # of the largest |logit|, here 1
    ("fp16", 1e-2, True), ("fp16", 2e-2, False),  # cosine 1 - error²/2
    ("bf16", 4e-2, True), ("bf16", 5e-2, False),
])  # fmt: skip
def test_tolerance_of_each_precision(precision: str, error: float, ok: bool) -> None:
    reference = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    output = reference.clone()
    output[1, 1] = error  # at a right angle: the cosine is cos(atan(error))
    assert compare(output, reference, precision).ok is ok


@pytest.mark.parametrize("spoil,said", [
    (lambda x: x.flip(0), "differs by"),
    (lambda x: x[:1].expand_as(x), "differs by"),
    (lambda x: torch.full_like(x, float("nan")), "40 outputs are NaN"),
    (lambda x: x[:, :-1], "shape (4, 9), expected (4, 10)"),
    (lambda x: x.unsqueeze(0), "shape (1, 4, 10)"),
    (lambda x: x.sum(), "shape ()"),
], ids=["rows swapped", "first row repeated", "nan", "class missing", "extra axis", "scalar"])  # fmt: skip
def test_wrong_outputs_are_told_apart(spoil, said: str) -> None:
    reference = torch.randn(4, 10)
    found = compare(spoil(reference.clone()), reference, "fp32")
    assert not found.ok and said in found.reason


def test_every_row_of_a_batch_larger_than_the_set_of_images_is_compared() -> None:
    reference = torch.randn(3, 5)
    output = batch_of(reference, 8)
    assert compare(output, reference, "fp32").ok
    output[7] += 1  # image 7 is image 1 again
    assert not compare(output, reference, "fp32").ok


def test_reference_does_not_depend_on_how_images_are_cut() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)).train()
    images = torch.randn(19, 3, 2, 2)
    with torch.no_grad():
        assert torch.allclose(torch_reference(model, images), model.eval()(images), atol=1e-6)


def test_a_comparison_that_proves_little_is_said() -> None:
    assert "all zero" in remarks(torch.zeros(4, 3))[0]
    assert "hardly depend" in remarks(torch.ones(4, 3))[0]
    assert remarks(torch.randn(4, 3)) == ()


# in a process of its own: in one that has run other tests the block may come from memory that is there already
PEAK = """
import torch
from vtk.profiling import memory

size = 96 << 20
peak = memory.PeakMemory(torch.device("cpu"), torch_allocator=True)
peak.start()
before = peak.stop()
peak.start()
block = bytearray(size)
block[::4096] = b"x" * len(block[::4096])
used = peak.stop()
del block
memory.release(torch.device("cpu"))
peak.start()
after = peak.stop()
print("cannot" if before is None else used - before > 0.9 * size and used - after > 0.9 * size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the process peak is read from /proc")
def test_peak_memory_sees_what_was_used_and_forgets_it() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "cannot":
        pytest.skip("clear_refs cannot be written here")
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("error", [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    Exception("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 9"),
    Exception("[ONNXRuntimeError] : 6 : std::bad_alloc"),
])  # fmt: skip
def test_ways_to_say_out_of_memory(error: Exception) -> None:
    assert memory.is_out_of_memory(error)


def test_torch_really_says_so_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert memory.is_out_of_memory(caught.value)
    assert not memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_batch_that_would_get_the_process_killed_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell(8, activation_bytes=1_000_000_000), Cell(16, activation_bytes=2_000_000_000)]
    cpu = torch.device("cpu")
    monkeypatch.setattr(rounds, "available_bytes", lambda _: 1_500_000_000)
    assert "would take about 4.0 GB, 1.5 GB are free" in predicted_shortage(cells, 32, cpu)
    assert "3.0 GB" in predicted_shortage(cells, 24, cpu)
    monkeypatch.setattr(rounds, "available_bytes", lambda _: 4_000_000_000)
    assert predicted_shortage(cells, 32, cpu) == ""
    assert predicted_shortage(cells[:1], 32, cpu) == ""

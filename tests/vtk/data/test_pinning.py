import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from vtk.data import pinning
from vtk.data.pinning import parse_cores, pinned, show_cores
from vtk.errors import UnavailableError, UsageError
from vtk.evaluation.config import EvalConfig

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")


def everywhere() -> list[set[int]]:
    return [os.sched_getaffinity(task) for task in pinning._tasks()]


@pytest.mark.parametrize("text,cores", [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("5,1,1-2", (1, 2, 5))])
def test_cores_are_read_and_shown(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores
    assert parse_cores(show_cores(cores)) == cores


@pytest.mark.parametrize("text", ["3-1", "0-999999"])
def test_ranges_that_name_no_cores_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"`--cpus` {text}"):
        parse_cores(text)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0 1", "1-2-3"])
def test_other_words_are_refused_by_the_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"`--cpus` is .*; allowed is cores such as 0-3 or 0,2"):
        EvalConfig(data=Path("photos"), cpus=text)


def test_all_threads_move_and_go_back_also_after_an_error() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    ready, leave = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), leave.wait()))
    other.start()
    ready.wait()
    found: list[set[int]] = []
    try:
        with pytest.raises(ZeroDivisionError), pinned(str(core), None) as threads:
            assert threads == 1 and all(cores == {core} for cores in everywhere())
            later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            later.start()
            later.join()
            assert 1 / 0
        assert found == [{core}] and os.sched_getaffinity(other.native_id or 0) == before
    finally:
        leave.set()
        other.join()
    assert os.sched_getaffinity(0) == before


def test_the_number_of_threads_follows_the_cores() -> None:
    usable = sorted(os.sched_getaffinity(0))
    with pinned(None, 7) as threads:
        assert threads == 7 and os.sched_getaffinity(0) == set(usable)
    with pinned(show_cores(usable), None) as threads:
        assert threads == len(usable)
    with pytest.raises(UsageError, match=r"`--threads` 2 is more than the cores of `--cpus` \d+, 1"):
        pinned(str(usable[0]), 2).__enter__()


def test_cores_of_others_and_systems_without_pinning_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = show_cores(os.sched_getaffinity(0))
    with pytest.raises(UsageError, match=f"may use the cores {usable}, not 4000"):
        pinned(f"{usable},4000", None).__enter__()
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(UnavailableError, match="leave it out"):
        pinned("0", None).__enter__()


# in a process of its own: libraries count the cores once. Which core each thread ran on last, and what it may use
RUN = """
import os, sys, torch
from vtk.data.pinning import pinned, _tasks
from vtk.runtime import load_backend, open_source
torch.set_num_threads(2)
torch.randn(400, 400) @ torch.randn(400, 400)  # a pool of threads from before
with pinned(sys.argv[2], None) as threads:
    backend = load_backend(sys.argv[1], open_source(sys.argv[3]), threads=threads)
    for _ in range(20):
        backend.run({"pixel_values": torch.randn(64, 3, 4, 6)})
    cores = [os.sched_getaffinity(task) for task in _tasks()]
    print(all(found == {int(sys.argv[2])} for found in cores), threads)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_the_threads_of_run_times_stay_on_the_cores(backend: str, tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(torch.randn(72, 3).numpy(), "w")
    nodes = [helper.make_node("Flatten", ["pixel_values"], ["flat"]),
             helper.make_node("MatMul", ["flat", "w"], ["logits"])]  # fmt: skip
    images = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, 4, 6])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "g", [images], [logits], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    core = str(max(os.sched_getaffinity(0)))
    call = [sys.executable, "-c", RUN, backend, core, str(tmp_path / "m.onnx")]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "1"], done.stdout + done.stderr

"""Counts of requests and images by task, and what an export that comes between two reads does to them."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.export._fake_server import Load, request

ARGS = {"model_name": "m", "model_version": "1", "model_instance_name": "m_0_0"}


class Page:
    """What a server's page of metrics shows: increments by family and labels."""

    COUNTER, GAUGE = 1, 2

    def __init__(self) -> None:
        self.shown: Counter[tuple[str, ...]] = Counter()
        self.messages = 0

    def MetricFamily(self, name: str, description: str, kind: int) -> Any:
        page = self

        class Value:
            def __init__(self, labels: dict[str, str]) -> None:
                assert "".join(labels.values()).isprintable()
                self.key = (name, labels["model"], labels.get("task", ""))

            def increment(self, value: float) -> None:
                page.shown[self.key] += value
                page.messages += 1

        class Family:
            def Metric(self, labels: dict[str, str]) -> Value:
                return Value(labels)

        return Family()


@pytest.fixture
def page(load: Load, monkeypatch: pytest.MonkeyPatch) -> Page:
    found = Page()
    family = type("MetricFamily", (), {"COUNTER": 1, "GAUGE": 2, "__new__": lambda cls, **k: found.MetricFamily(**k)})
    monkeypatch.setattr(sys.modules["triton_python_backend_utils"], "MetricFamily", family, raising=False)
    monkeypatch.setattr(sys.modules["vtk_counters"], "FLUSH_S", 60.0)
    return found


def images(*values: float) -> np.ndarray:
    return np.stack([np.full((1, 2, 2), value, np.float32) for value in values])


def test_requests_and_images_are_counted_by_task_and_what_failed_apart(page: Page) -> None:
    rows, counters = sys.modules["vtk_rows"], sys.modules["vtk_counters"].Counters(ARGS)
    tasks = {name: rows.Task(("x", "y"), (1, 2, 2)) for name in ("a", "b\n\udcff")}

    def run(batches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if any((x == 13).any() for x in batches.values()):
            raise MemoryError
        return {name: np.where(x == 7, np.inf, x).reshape(len(x), -1)[:, :2] for name, x in batches.items()}

    odd = "b\n\udcff"
    sent = [
        request(images(1, 2, 3), ["a", "a", "a"]), request(images(1), ["a"]), request(images(np.nan), ["a"]),
        request(images(13), ["a"]), request(images(1), ["who"]), request(images(1, 2), ["a", "who"]),
        request(images(7), ["a"]), {},
    ]  # fmt: skip
    both = request(images(4, 5), ["a", "a"])
    both["task"]._value[1, 0] = odd.encode("utf-8", "surrogateescape")
    for _ in range(2):
        rows.answer([*sent, both], tasks, run, count=counters.count)
    assert not page.shown, "a call sends no messages"
    counters.flush()
    wanted = {
        ("vtk_task_requests", "m", "a"): 6, ("vtk_task_images", "m", "a"): 10, ("vtk_task_failures", "m", "a"): 8,
        ("vtk_task_requests", "m", r"b\n\udcff"): 2, ("vtk_task_images", "m", r"b\n\udcff"): 2,
        ("vtk_unknown_tasks", "m", ""): 4,
    }  # fmt: skip
    assert page.shown == wanted and page.messages == len(wanted)
    counters.flush()
    assert page.messages == len(wanted), "what has not changed is not sent again"
    rows.answer(sent[:1], tasks, run, count=counters.count)
    counters.close()
    assert page.shown == {**wanted, ("vtk_task_requests", "m", "a"): 7, ("vtk_task_images", "m", "a"): 13}


def test_a_server_without_metrics_is_no_obstacle(load: Load) -> None:
    counters, rows = sys.modules["vtk_counters"].Counters(ARGS), sys.modules["vtk_rows"]
    counts = rows.Counts()
    counts.add(["a"], {"a": rows.Task(("x",), (1, 2, 2))}, True)
    counters.count(counts)
    counters.close()
    assert counters.totals["vtk_task_images", "a"] == 1


def test_an_export_between_index_and_files_is_no_failure(load: Load, tmp_path: Path) -> None:
    """The folder is exchanged after its index was read: file and digest are not of one another, and the next are."""
    said = sys.modules["triton_python_backend_utils"].Logger.said
    watch, rows = sys.modules["vtk_watch"], sys.modules["vtk_rows"]
    for name, content in (("old", b"1"), ("new", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(content)
        entry = {"digest": watch._digest(tmp_path / name / "file", ()), "file": "file"}
        (tmp_path / name / "tasks.json").write_text(json.dumps({"tasks": {"t": entry}}))
    here, taken = tmp_path / "here", []

    def add(key: str, path: Path, entry: Any) -> Any:
        taken.append(path.read_bytes())
        return rows.Task(("x",), (1, 2, 2))

    shutil.copytree(tmp_path / "old", here)
    found = watch.Watch(here / "tasks.json", ARGS, "file", (), add, lambda key: None)
    read = found.index.read

    def read_and_exchange() -> Any:
        tasks = read()
        if not (tmp_path / "gone").exists():
            here.rename(tmp_path / "gone")
            (tmp_path / "new").rename(here)
        return tasks

    found.index.read = read_and_exchange
    found.begin()
    found.end()
    assert taken == [b"2"] and said == [] and found.index.failures == 0

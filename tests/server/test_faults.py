"""Faults put into the bank of a real server while it serves: it goes on, says so, and takes the next good index."""

import json
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

pytestmark = pytest.mark.server

CLASSES = {"pets": 3, "cars": 7, "dogs": 5, "cats": 4}
LARGE = {"depth": 4, "embed_dim": 384, "num_heads": 6, "patch_size": 16}
"""Of which a pack needs more memory than what is left below."""

LEFT = 16 << 20
PATIENCE_S = 60


@dataclass
class Bank:
    """A served bank of `pets` and `cars`; packs of `dogs` and `cats` lie ready, and clients ask all the time.

    Attributes:
        version: its folder.
        good: the index of two tasks, and that of three.
    """

    server: Any
    tools: Any
    version: Path
    good: tuple[dict[str, Any], dict[str, Any]]
    images: np.ndarray
    logits: dict[str, np.ndarray]
    failed: list[str] = field(default_factory=list)
    done: int = 0
    served: int = 2

    def write(self, index: object) -> None:
        """Replace the index as an export does."""
        new = self.version / "tasks.new"
        new.write_text(index if isinstance(index, str) else json.dumps(index))
        new.replace(self.version / "tasks.json")

    def check(self, client: Any, task: str, at: int) -> None:
        found = self.tools.infer(client, "bank", self.images[at : at + 1], [task])["logits"][0]
        wanted = self.logits[task][at]
        if not np.abs(found[: len(wanted)] - wanted).max() <= 1e-4 * np.abs(wanted).max():
            self.failed.append(f"{task} {at}: {found.tolist()}")
        self.done += 1

    def ask(self, stop: threading.Event) -> None:
        with self.server.client() as client:
            while not stop.is_set():
                for task in ("pets", "cars"):
                    try:
                        self.check(client, task, self.done % len(self.images))
                    except InferenceServerException as error:
                        self.failed.append(str(error))

    def until(self, right: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not right():
            assert time.monotonic() < limit, f"{what}\n{self.measures()}\n{self.server.tail()}"
            time.sleep(0.1)

    def measures(self) -> dict[str, float]:
        found: dict[str, float] = self.server.measures("bank")
        return found

    def errors(self) -> list[str]:
        lines = self.server.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith("E") and "bank: " in line]

    def has(self, task: str) -> bool:
        with self.server.client() as client:
            try:
                self.check(client, task, 1)
            except InferenceServerException:
                return False
        return True


@pytest.fixture(scope="module")
def bank(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    root = tmp_path_factory.mktemp("faults")
    lab = tools.Lab(root, LARGE, 32, noise=0.02)
    packs = {name: lab.pack(name, classes, seed) for seed, (name, classes) in enumerate(CLASSES.items())}
    config = TritonConfig(out=root / "models", backend="vtk", name="bank", max_batch_size=8, server_threads=1)
    export_triton(packs, config, show=False)
    version = root / "models" / "bank" / "1"
    index = json.loads((version / "tasks.json").read_text())
    good = tuple(
        {**index, "tasks": {name: index["tasks"][name] for name in names}}
        for names in (("pets", "cars"), ("pets", "cars", "dogs"))
    )
    images = lab.images(6)
    logits = {name: lab.logits(path, images) for name, path in packs.items()}
    (version / "tasks.json").write_text(json.dumps(good[0]))
    server, stop = tools.Server(root / "models", root, polls=False, metrics=True), threading.Event()
    try:
        server.wait("bank")
        made = Bank(server, tools, version, good, images.numpy(), logits)  # type: ignore[arg-type]
        thread = threading.Thread(target=made.ask, args=(stop,))
        thread.start()
        yield made
        stop.set()
        thread.join()
    finally:
        stop.set()
        server.stop()


def entry(bank: Bank, **change: object) -> dict[str, Any]:
    """The index of three tasks, the third changed."""
    index = json.loads(json.dumps(bank.good[1]))
    index["tasks"]["dogs"] |= change
    return index


def spoil(bank: Bank, change: Callable[[Path], object]) -> dict[str, Any]:
    """An index whose third task is a damaged copy of a pack."""
    pack = bank.version / "packs" / "spoilt"
    shutil.rmtree(pack, ignore_errors=True)
    shutil.copytree(bank.version / "packs" / "dogs", pack)
    change(pack)
    return entry(bank, pack="packs/spoilt", digest=f"spoilt {time.monotonic_ns()}")


def truncate(path: Path, part: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])


FAULTS: dict[str, Callable[[Bank], object]] = {
    "no JSON": lambda bank: "{",
    "half written": lambda bank: json.dumps(bank.good[1])[: len(json.dumps(bank.good[1])) // 2],
    "nested": lambda bank: "[" * 5000,
    "a list": lambda bank: [],
    "no tasks": lambda bank: {"tasks": {}},
    "tasks in a list": lambda bank: {"tasks": ["pets"]},
    "entry of another kind": lambda bank: {"tasks": {"pets": 1}},
    "entry without digest": lambda bank: {"tasks": {**bank.good[0]["tasks"], "dogs": {"pack": "packs/dogs"}}},
    "digest of another type": lambda bank: entry(bank, digest=[1]),
    "pack that is not there": lambda bank: entry(bank, pack="packs/nowhere", digest="n"),
    "null in a path": lambda bank: entry(bank, pack="packs/\0", digest="z"),
    "truncated weights": lambda bank: spoil(bank, lambda pack: truncate(pack / "task.safetensors", 0.6)),
    "truncated card": lambda bank: spoil(bank, lambda pack: truncate(pack / "task.json", 0.5)),
    "missing weights": lambda bank: spoil(bank, lambda pack: (pack / "task.safetensors").unlink()),
    "weights that are a folder": lambda bank: spoil(
        bank, lambda pack: ((pack / "task.safetensors").unlink(), (pack / "task.safetensors").mkdir())
    ),
}


@pytest.fixture(autouse=True)
def _clients_are_answered_right(bank: Bank) -> Iterator[None]:
    """They ask for `pets` and `cars` all the time."""
    bank.failed.clear()
    before = bank.done
    yield
    assert bank.failed == [] and bank.done > before


def recovers(bank: Bank) -> None:
    """A good index comes, and is followed: with a task more or a task less than what is served."""
    bank.served = 5 - bank.served
    bank.write(bank.good[bank.served - 2])
    bank.until(lambda: bank.measures()["vtk_tasks"] == bank.served, "a good index after a fault was not taken up")
    assert bank.measures()["vtk_tasks_wrong"] == 0
    assert bank.has("dogs") == (bank.served == 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_said_changes_nothing_and_does_not_end_the_watch(bank: Bank, fault: str) -> None:
    said = len(bank.errors())
    bank.write(FAULTS[fault](bank))
    bank.until(lambda: len(bank.errors()) > said, "nothing was said at the level of errors")
    line = bank.errors()[said]
    assert (
        "tasks.json cannot be read" in line or "task 'dogs': " in line
    ) and f"{bank.served} tasks are served" in line
    assert bank.measures()["vtk_tasks_wrong"] == 1 and bank.measures()["vtk_tasks"] == bank.served
    assert time.time() - bank.measures()["vtk_index_looked_seconds"] < 10
    recovers(bank)


@pytest.mark.parametrize("kind", ["missing", "a folder"])
def test_an_index_that_cannot_be_opened(bank: Bank, kind: str) -> None:
    said, index = len(bank.errors()), bank.version / "tasks.json"
    index.unlink()
    if kind == "a folder":
        index.mkdir()
    bank.until(lambda: len(bank.errors()) > said, "nothing was said")
    if kind == "a folder":
        index.rmdir()
    recovers(bank)


def test_a_pack_that_comes_late_is_tried_again_and_the_others_are_not_kept_waiting(bank: Bank) -> None:
    """The index stays the same: only another attempt finds the pack."""
    if bank.served == 3:
        recovers(bank)
    said, late = len(bank.errors()), bank.version / "packs" / "late"
    index = entry(bank, pack="packs/late", digest="late")
    index["tasks"]["cats"] = {"pack": "packs/cats", "digest": "cats"}
    bank.write(index)
    bank.until(lambda: bank.has("cats"), "a good task behind a bad one was not taken up")
    bank.until(lambda: len(bank.errors()) >= said + 2, "it was not tried again")
    shutil.copytree(bank.version / "packs" / "dogs", late)
    bank.until(lambda: bank.has("dogs"), "it was not tried again")
    waits = [line.rpartition("in ")[2] for line in bank.errors()[said:]]
    assert waits[:2] == ['1 s"', '2 s"'], waits
    bank.served = 3
    recovers(bank)


def test_out_of_memory_is_said_and_tried_again(bank: Bank) -> None:
    """The process may take no more than it has, so the pack cannot be loaded; then it may again."""
    if bank.served == 3:
        recovers(bank)
    children = psutil.Process(bank.server.process.pid).children(recursive=True)
    (process,) = [c for c in children if any("/bank/" in part for part in c.cmdline())]
    said, before = len(bank.errors()), resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms + LEFT, before[1]))
    try:
        bank.write(bank.good[1])
        bank.until(lambda: len(bank.errors()) > said, "nothing was said")
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_AS, before)
    assert "task 'dogs': " in bank.errors()[said] and not bank.failed
    print(f"out of memory: {bank.errors()[said]}")
    bank.until(lambda: bank.has("dogs"), "it was not tried again")
    bank.served = 3


def test_an_export_after_a_fault_repairs_the_model_that_serves(bank: Bank) -> None:
    bank.write("{")
    packs = {name: bank.version.parents[2] / "packs" / name for name in ("pets", "cars", "cats")}
    config = TritonConfig(out=bank.version.parents[1], backend="vtk", name="bank", max_batch_size=8, server_threads=1)
    base = bank.version.parents[2] / "base.safetensors"
    made = export_triton(packs, config, show=False, base=base).models[0]
    assert (made.version, made.updated) == (1, True)
    bank.until(lambda: bank.has("cats"), "the export was not taken up")
    assert not bank.has("dogs") and bank.measures()["vtk_tasks"] == 3

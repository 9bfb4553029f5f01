from collections.abc import Callable
from pathlib import Path

import pytest

from vtk.data.probing import pool
from vtk.data.probing.probe import probe_all

Tree = Callable[..., Path]


@pytest.fixture
def paths(tree: Tree) -> list[str]:
    root = tree({"a": 70})
    (root / "a" / "33.png").write_bytes(b"broken")
    return sorted(map(str, root.rglob("*.png")))


def test_worker_processes_give_what_this_process_gives(paths: list[str]) -> None:
    counts: list[int] = []
    results = pool.probe_many(paths, 0, workers=2, on_done=counts.append)
    assert results == probe_all(paths) == pool.probe_many(paths, 0, workers=0)
    assert sum(counts) == 70
    assert [Path(path).name for path, probe in zip(paths, results, strict=True) if probe.bad] == ["33.png"]


def test_a_file_that_kills_its_decoder_is_found(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dies = "p.probe = lambda f, *o: os._exit(9) if '/7.' in f else q(f, *o); "
    deadly = "import os, vtk.data.probing.probe as p; q = p.probe; " + dies
    monkeypatch.setattr(
        pool, "_CODE", pool._CODE.replace("from vtk.data.probing.probe", deadly + "from vtk.data.probing.probe")
    )
    results = dict(zip(paths, pool.probe_many(paths, 0, workers=2), strict=True))
    bad = {Path(path).name: probe.bad for path, probe in results.items() if probe.bad}
    assert bad.keys() == {"33.png", "7.png"} and "decoder crashed" in bad["7.png"]


def test_without_workers_this_process_does_the_work(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.sys, "executable", "/nowhere/python")
    assert pool.probe_many(paths, 0, workers=2) == probe_all(paths)
    monkeypatch.undo()
    monkeypatch.setattr(pool, "_CODE", "import nonsense{path!r}")
    assert pool.probe_many(paths, 0, workers=2) == probe_all(paths)


def test_an_interruption_leaves_no_process(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    crew: list[pool._Worker] = []
    monkeypatch.setattr(pool, "_CHUNK", 1)
    original = pool._Worker.__init__

    def remember(self: pool._Worker, *options: int) -> None:
        original(self, *options)
        crew.append(self)

    monkeypatch.setattr(pool._Worker, "__init__", remember)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.probe_many(paths, 0, workers=2, on_done=interrupt)
    assert len(crew) == 2 and all(worker.process is None for worker in crew)

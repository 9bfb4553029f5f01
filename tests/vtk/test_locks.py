"""One writer at a time: who comes second is told who holds the folder, and what a killed process left is taken over."""

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vtk import locks
from vtk.errors import DataError
from vtk.training.runs.outputs import hold_run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals")

HELD = r"is being written by `vtk trial A`, process {pid}{here} on {host}, since \d{{4}}-\d\d-\d\d [\d:]{{8}} UTC; wait"


def held_by(pid: int) -> str:
    here = re.escape(" (this process)") if pid == os.getpid() else ""
    return HELD.format(pid=pid, here=here, host=re.escape(socket.gethostname()))


class Other:
    """A process of its own that holds a folder until it is killed."""

    def __init__(self, out: Path, then: Callable[[], object] = lambda: None) -> None:
        ready, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with locks.hold_folder(out, "vtk trial A"):
                then()
                os.write(tell, b".")
                time.sleep(60)
            os._exit(0)
        os.read(ready, 1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_the_second_process_is_told_who_holds_the_folder_and_takes_over_from_the_dead(tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    link.symlink_to(out)
    other = Other(out)
    try:
        for name in (out, link, out / ".." / "out"):
            with pytest.raises(DataError, match=held_by(other.pid)) as caught, locks.hold_folder(name, "vtk trial B"):
                pytest.fail("both hold it")
            assert "\n" not in str(caught.value)
        told = json.loads((out / locks.LOCK).read_text())
        assert (told["command"], told["pid"], told["host"]) == ("vtk trial A", other.pid, socket.gethostname())
    finally:
        other.kill()
    assert (out / locks.LOCK).exists()  # left by the dead
    with locks.hold_folder(link, "vtk trial B"):
        assert json.loads((out / locks.LOCK).read_text())["pid"] == os.getpid()
    assert os.listdir(out) == []


def test_a_process_forked_by_the_dead_one_holds_nothing(tmp_path: Path) -> None:
    """As a worker that loads images, which may live on for seconds."""
    children = tmp_path / "child"

    def fork() -> None:
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        children.write_text(str(child))

    other = Other(tmp_path / "out", fork)
    other.kill()
    child = int(children.read_text())
    try:
        with locks.hold_folder(tmp_path / "out", "vtk trial B"):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_threads_of_one_process_are_told_apart(tmp_path: Path) -> None:
    found: list[str] = []

    def second() -> None:
        try:
            with locks.hold_folder(tmp_path / "out", "vtk trial B"):
                found.append("held")
        except DataError as error:
            found.append(str(error))

    with locks.hold_folder(tmp_path / "out", "vtk trial A"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert re.search(held_by(os.getpid()), found[0])
    second()
    assert found[1:] == ["held"]


def test_of_many_at_once_one_holds_it_at_a_time(tmp_path: Path) -> None:
    out, inside = tmp_path / "out", tmp_path / "inside"
    children = []
    for _ in range(6):
        if (child := os.fork()) == 0:
            code, won, end = 0, 0, time.monotonic() + 20
            while won < 15 and time.monotonic() < end:
                try:
                    with locks.hold_folder(out, "vtk trial"):
                        descriptor = os.open(inside, os.O_CREAT | os.O_EXCL)  # fails where another one is inside
                        os.close(descriptor)
                        inside.unlink()
                        won += 1
                except DataError as error:
                    code = code if "is being written by" in str(error) or "cannot" in str(error) else 2
                except OSError:
                    code = 3
            os._exit(code if won == 15 else code or 4)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6


def test_folders_that_were_made_and_left_empty_go(tmp_path: Path) -> None:
    with locks.hold_folder(tmp_path / "a" / "b", "vtk trial"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not list(tmp_path.iterdir())
    with locks.hold_folder(tmp_path / "a" / "b", "vtk trial"):
        (tmp_path / "a" / "b" / "result").touch()
    assert os.listdir(tmp_path / "a" / "b") == ["result"]


def test_a_folder_that_is_replaced_is_held_beside_it(tmp_path: Path) -> None:
    out = tmp_path / "pack"
    with locks.hold_name(out, "vtk trial A"):
        with pytest.raises(DataError, match=held_by(os.getpid())), locks.hold_name(out, "vtk trial B"):
            pytest.fail("both hold it")
        with locks.hold_name(tmp_path / "other", "vtk trial B"):
            pass
    assert not list(tmp_path.iterdir())


def test_only_the_main_process_of_a_run_holds_it_and_its_tasks_folders_too(tmp_path: Path) -> None:
    with hold_run([tmp_path / "run", tmp_path / "run" / "pets"], "vtk trial A", main=True):
        with hold_run([tmp_path / "run"], "vtk trial A", main=False):  # another rank
            pass
        for name in ("run", "run/pets"):
            with pytest.raises(DataError, match=held_by(os.getpid())), hold_run([tmp_path / name], "B", main=True):
                pytest.fail("both hold it")


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as some shared ones are mounted."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_of_the_system_the_contents_tell(tmp_path: Path) -> None:
    other = Other(tmp_path / "out")
    try:
        with pytest.raises(DataError, match=held_by(other.pid)), locks.hold_folder(tmp_path / "out", "vtk trial B"):
            pytest.fail("both hold it")
    finally:
        other.kill()
    with locks.hold_folder(tmp_path / "out", "vtk trial B"):
        pass
    told = {"command": "vtk trial A", "pid": 1, "host": "elsewhere", "since": "2026-01-01 00:00:00 UTC"}
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / locks.LOCK).write_text(json.dumps(told))
    with pytest.raises(DataError, match="process 1 on elsewhere, since 2026"), locks.hold_folder(tmp_path / "out", "B"):
        pytest.fail("nobody knows whether it lives")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": []}', "null", '{"pid": 1e999}'])
def test_a_lock_file_that_tells_nothing_stops_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / locks.LOCK).write_text(text)
    with locks.hold_folder(tmp_path, "vtk trial"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_takes_nobodys_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with locks.hold_folder(tmp_path / "out", "vtk trial A"):
        with pytest.raises(DataError, match="is being written by another process; wait"):
            with locks.hold_folder(tmp_path / "out", "vtk trial B"):
                pytest.fail("both hold it")

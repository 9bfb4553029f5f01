"""Writers that die, or whose disk fails, at each of their file operations: old or new, never half."""

import errno
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.vtk._faults import failing_at, files_below, killed_at, tree
from vtk import files, formats
from vtk.errors import DataError
from vtk.training.engine.result import FitState
from vtk.training.runs import resume_state as checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, signals and limits of Linux")

Write = Callable[[Path, int], None]


def write_text(path: Path, version: int) -> None:
    files.write_text(path / "a", str(version) * 5000)


def write_dir(path: Path, version: int) -> None:
    with files.replace_dir(path) as tmp:
        (tmp / "a").write_text(str(version) * 5000)
        (tmp / f"only-in-{version}").write_text("")
        formats.save_tensors(tmp / "t", {"x": torch.full((1500,), float(version))})


def write_state(path: Path, version: int) -> None:
    value = torch.full((1500,), float(version))
    fit = FitState(version, {"state": {0: value}}, {"last_epoch": version}, [{"epoch": 1.0}] * version)
    saved = checkpoint.Saved(
        {"x": value}, fit, {"confusion": value}, {"flags": {"epochs": 99}, "base": "b", "data": "d"}
    )
    checkpoint.save_state(path, saved)


WRITERS = {"a file": write_text, "a folder": write_dir, "the state of a run": write_state}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Write:
    return WRITERS[request.param]


@pytest.fixture
def two_renames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that cannot swap two names in one step."""
    monkeypatch.setattr(files, "exchange", lambda a, b: False)


def versions(write: Write, tmp_path: Path, count: int) -> list[dict[str, bytes]]:
    """What the folder holds after each version was written in peace."""
    found = []
    for version in range(count):
        write(tmp_path / "peace", version)
        found.append(tree(tmp_path / "peace"))
    return found


def whole(path: Path, own: list[dict[str, bytes]]) -> int:
    """Return which version the readers find, which is exactly one of them."""
    found = {name: data for name, data in tree(files.existing_dir(path)).items() if ".tmp-" not in name}
    assert found in own, sorted(found)
    return own.index(found)


@pytest.mark.parametrize(
    "write", [write_text, write_dir, pytest.param(write_state, marks=pytest.mark.slow)], ids=list(WRITERS)
)
def test_killed_at_any_file_operation_it_is_old_or_new(write: Write, tmp_path: Path) -> None:
    own = versions(write, tmp_path, 2)
    target, deaths, seen = tmp_path / "run" / "x", 0, set()
    write(target, 0)
    while killed_at(deaths, lambda: write(target, 1), tmp_path / "run"):
        seen.add(whole(target, own))
        deaths += 1
        write(target, 0)  # whatever was left lying about does not stop the next one
        assert whole(target, own) == 0
    assert whole(target, own) == 1
    assert deaths >= 3 and 0 in seen


@pytest.mark.slow
@pytest.mark.usefixtures("two_renames")
def test_killed_between_two_renames_it_is_old_or_new(tmp_path: Path) -> None:
    test_killed_at_any_file_operation_it_is_old_or_new(write_dir, tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=lambda n: errno.errorcode[n])
def test_a_disk_that_fails_at_any_operation_is_one_line(write: Write, number: int, tmp_path: Path) -> None:
    own = versions(write, tmp_path, 2)
    target, operation, refused = tmp_path / "run" / "x", 0, 0
    while True:
        write(target, 0)
        with failing_at(operation, OSError(number, os.strerror(number)), tmp_path / "run") as met:
            try:
                write(target, 1)
            except DataError as error:
                assert str(error).startswith("cannot write ") and os.strerror(number) in str(error)
                assert "\n" not in str(error) and str(error).endswith("choose another folder")
                refused += 1
        whole(target, own)
        if not met:
            break
        operation += 1
    assert whole(target, own) == 1 and refused >= 3
    assert not list((tmp_path / "run").rglob("*.tmp-*"))


@pytest.mark.usefixtures("two_renames")
def test_a_disk_that_fails_between_two_renames(tmp_path: Path) -> None:
    test_a_disk_that_fails_at_any_operation_is_one_line(write_dir, errno.ENOSPC, tmp_path)


@pytest.mark.parametrize("size", [0, 7, 1000, 4000])
def test_a_disk_that_is_full_is_one_line_whoever_writes(write: Write, size: int, tmp_path: Path) -> None:
    own = versions(write, tmp_path, 2)
    target = tmp_path / "run" / "x"
    write(target, 0)
    with (
        files_below(size),
        pytest.raises(DataError, match=r"^cannot write .*; free some space or choose another folder$"),
    ):
        write(target, 1)
    assert whole(target, own) == 0
    assert not list((tmp_path / "run").rglob("*.tmp-*"))


def test_a_folder_that_is_read_only_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the system's answer is put in its mouth; a read-only disk is tried for real below."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(DataError, match=r"cannot write .*out: the folder or its disk is read-only; choose another"):
        files.prepare_output(tmp_path / "out")


def test_a_simulated_full_disk_cuts_no_compiled_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python writes compiled modules without looking at what fitted; a cut one would break every later import."""
    monkeypatch.setattr("sys.pycache_prefix", None)
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "long_module_here.py").write_text("\n".join(f"name_{i} = {i}.5" for i in range(500)))
    (tmp_path / "short_module_here.py").write_text("name = 1")
    with files_below(1000):
        importlib.import_module("long_module_here")
        child = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import long_module_here"]
        subprocess.run(child, check=True)
    assert not list(tmp_path.rglob("*.pyc"))
    importlib.import_module("short_module_here")
    assert len(list(tmp_path.rglob("*.pyc"))) == 1

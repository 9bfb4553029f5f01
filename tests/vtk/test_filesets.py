"""Sets of files: all new or all old after an error or a kill at any operation, and nobody else's file is touched."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from tests.vtk._faults import failing_at, killed_at
from vtk import filesets, marks
from vtk.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and signals of Linux")

MARKS = {"a.json": marks.json_with("ours"), "b.csv": marks.begins("ours,"), "sub/c.json": marks.json_with("ours")}


def write(folder: Path, version: int) -> None:
    folder.mkdir(exist_ok=True)
    with (
        filesets.open_folder(folder, MARKS, "vtk trial", overwrite=True),
        filesets.replace_set(folder, MARKS, "vtk trial") as staged,
    ):
        (staged / "sub").mkdir()
        (staged / "a.json").write_text(f'{{"ours": {version}}}')
        if version != 2:  # a file that the next set lacks
            (staged / "b.csv").write_text(f"ours,{version}\n")
        (staged / "sub" / "c.json").write_text(f'{{"ours": {version}}}')


def found(folder: Path) -> dict[str, str]:
    names = [p for p in folder.rglob("*") if p.is_file() and not p.relative_to(folder).parts[0].startswith(".vtk-")]
    return {p.relative_to(folder).as_posix(): p.read_text() for p in names}


def of(version: int) -> dict[str, str]:
    text = {"a.json": f'{{"ours": {version}}}', "sub/c.json": f'{{"ours": {version}}}'}
    return text if version == 2 else {**text, "b.csv": f"ours,{version}\n"}


@pytest.fixture(params=["alone", "with other files"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The results' folder, in one case with somebody's notes in it, so that it cannot be exchanged as a whole."""
    (out := tmp_path / "run" / "out").mkdir(parents=True)
    write(out, 1)
    if request.param != "alone":
        (out / "notes.txt").write_text("mine")
    return out


def others(folder: Path) -> dict[str, str]:
    return {name: text for name, text in found(folder).items() if name != "notes.txt"}


@pytest.mark.parametrize(
    ("next_version", "step"), [(2, 3), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (2, 3))]
)
def test_killed_at_any_operation_the_set_is_never_mixed(folder: Path, next_version: int, step: int) -> None:
    alone, deaths, seen = not (folder / "notes.txt").exists(), 0, []
    while killed_at(deaths, lambda: write(folder, next_version), folder.parent):
        now = others(folder)
        if alone:  # exchanged in one step
            assert now in (of(1), of(next_version)), deaths
        else:  # moved one by one: a part of one set, never of two
            assert now.items() <= of(1).items() or now.items() <= of(next_version).items(), deaths
        with filesets.open_folder(folder, MARKS, "vtk trial", overwrite=True):
            now = others(folder)  # the next command puts it right
        assert now in (of(1), of(next_version)), deaths
        seen.append(now == of(next_version))
        assert (folder / "notes.txt").exists() is not alone
        deaths += step
        write(folder, 1)
    assert others(folder) == of(next_version)
    assert deaths > 10 and {False, True} == set(seen)
    assert [p.name for p in folder.parent.iterdir()] == ["out"] and not list(folder.glob(".vtk-*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=lambda n: errno.errorcode[n])
def test_a_disk_that_fails_at_any_operation_leaves_one_set(folder: Path, number: int) -> None:
    operation, refused = 0, 0
    while True:
        with failing_at(operation, OSError(number, os.strerror(number)), folder.parent) as met:
            try:
                write(folder, 2)
            except DataError as error:
                assert "\n" not in str(error) and os.strerror(number) in str(error)
                refused += 1
        assert others(folder) in (of(1), of(2)), operation
        if not met:
            break
        write(folder, 1)
        operation += 1
    assert others(folder) == of(2) and refused > 5


def test_the_folder_itself_stays_the_one_that_people_stand_in(folder: Path) -> None:
    before = folder.stat().st_ino
    write(folder, 2)
    assert folder.stat().st_ino == before and others(folder) == of(2)


def test_without_exchange_or_links_the_set_is_still_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesets, "exchange", lambda a, b: False)
    write(folder, 2)
    assert others(folder) == of(2)
    monkeypatch.undo()
    monkeypatch.setattr(os, "link", lambda *a, **k: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    write(folder, 3)
    assert others(folder) == of(3)


def test_a_folder_above_that_cannot_be_written_does_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(target).parent == folder.parent:
            raise PermissionError(errno.EACCES, "not yours")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    write(folder, 2)
    assert others(folder) == of(2)


@pytest.mark.parametrize("name", list(MARKS))
@pytest.mark.parametrize("text", ["mine", "", "{}"])
def test_a_file_of_somebody_else_is_never_replaced(tmp_path: Path, name: str, text: str) -> None:
    (file := tmp_path / "out" / name).parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(
        DataError, match=rf"holds {name}, a file that `vtk trial` did not write; move it away"
    ) as caught:
        write(tmp_path / "out", 1)
    assert "\n" not in str(caught.value) and file.read_text() == text and list(found(tmp_path / "out")) == [name]


def test_what_somebody_puts_there_meanwhile_is_kept_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with filesets.open_folder(out, MARKS, "vtk trial"):
        with pytest.raises(DataError, match=r"holds a\.json"), filesets.replace_set(out, MARKS, "vtk trial") as staged:
            (staged / "a.json").write_text('{"ours": 1}')
            (out / "a.json").write_text("mine")
    assert found(out) == {"a.json": "mine"}


def test_folders_and_links_in_the_place_of_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "real", 1)
    for make in (lambda p: p.mkdir(), lambda p: p.symlink_to(tmp_path / "real" / "a.json"), lambda p: os.mkfifo(p)):
        (out := tmp_path / "out").mkdir(exist_ok=True)
        make(out / "a.json")
        with pytest.raises(DataError, match=r"holds a\.json"):
            write(out, 2)
        if (out / "a.json").is_dir():
            (out / "a.json").rmdir()
        else:
            (out / "a.json").unlink()
    assert found(tmp_path / "real") == of(1)


@pytest.mark.parametrize("name", ["../victim", "{root}/victim"])
def test_a_journal_from_elsewhere_reaches_nothing_outside(tmp_path: Path, name: str) -> None:
    (victim := tmp_path / "victim").write_text("mine")
    (waiting := tmp_path / "out" / ".vtk-next").mkdir(parents=True)
    (waiting / ".vtk-journal.json").write_text(json.dumps({"new": [], "old": [name.format(root=tmp_path)]}))
    with filesets.open_folder(tmp_path / "out", MARKS, "vtk trial", overwrite=True):
        pass
    assert victim.read_text() == "mine"

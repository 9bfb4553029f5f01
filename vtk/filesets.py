"""Sets of files: the files that one command writes replace the earlier ones all at once, or not at all.

They are written to a hidden folder first, so that a full disk or an error leaves everything as it was. Then, where the
folder holds nothing but the set and the system can exchange two names (Linux), the new set appears in one step.
Elsewhere the old files are moved aside before the new ones are moved in: new numbers never lie beside an old report,
and what a kill in between leaves is put right by the next command that writes there.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path, PurePath

from vtk.errors import DataError
from vtk.files import as_data_error, exchange, flush, flush_names, remove_tree, sweep, temporary
from vtk.formats import read_json, write_json
from vtk.locks import LOCK, hold_folder
from vtk.marks import Marks, find_own, others
from vtk.nodes import HIDDEN

_STAGED = ".vtk-set"
_NEXT, _OLD = ".vtk-next", ".vtk-old"
_JOURNAL = ".vtk-journal.json"


@contextlib.contextmanager
def open_folder(
    out: Path, marks: Marks, command: str, *, overwrite: bool = False, resume: bool = False, option: str = "`--out`"
) -> Iterator[None]:
    """Hold a folder for the results of a command, after a look at what is there, before any work is done.

    Args:
        out: the folder; made if absent, and removed again if nothing was put there.
        marks: the files that the command writes, and how its earlier ones are recognised.
        command: for those who are refused meanwhile.
        overwrite: let it hold other files, and replace those of ``marks``.
        resume: the same, of a command that goes on.
        option: that named the folder.

    Raises:
        DataError: it is a file or a device, is being written by another process, is not empty without a flag, holds
            somebody else's file under a name of ``marks``, or cannot be written.
    """
    with hold_folder(out, command, option):
        recover(out)
        if not (overwrite or resume) and not is_empty(out):
            raise DataError(f"{option} {out} is not empty; give another folder, or --overwrite")
        find_own(out, marks, command, option)
        yield


def is_empty(folder: Path) -> bool:
    """Return whether a folder is empty but for locks and what killed writers left."""
    return all(name.startswith(HIDDEN) for name in os.listdir(folder))


@contextlib.contextmanager
def replace_set(folder: Path, marks: Marks, command: str, kept: Collection[str] = ()) -> Iterator[Path]:
    """Yield an empty folder; on success what was put there takes the place of the files of ``marks``, as a set.

    Args:
        folder: where the set goes; it is there, and held by the caller.
        marks: names of the set, all of them, and how its files are recognised. Those not written anew are removed.
        command: that writes, for messages.
        kept: names of the set that stay as they are where they are not written anew.

    Raises:
        DataError: the folder cannot be written, the disk is full, or somebody else's file has one of the names. The
            folder is then as it was.
    """
    staged = folder / temporary(_STAGED)
    with as_data_error(folder):
        try:
            staged.mkdir()
            yield staged
            publish(staged, folder, marks, command, kept)
        finally:
            remove_tree(staged)


def publish(staged: Path, folder: Path, marks: Marks, command: str, kept: Collection[str] = ()) -> None:
    """Put the files of ``staged``, which is inside of ``folder``, in place of those of ``marks``.

    Raises:
        DataError: as `replace_set` says.
    """
    new = _files(staged)
    flush(staged)
    old = find_own(folder, marks, command)
    for name in new:
        if name not in old and os.path.lexists(folder / name):
            raise DataError(f"{folder} holds {name}, which `{command}` did not write; move it away")
    stay = [name for name in old if name in kept and name not in new]
    for name in stay:  # without copying: the whole set is to be exchanged
        with contextlib.suppress(OSError):
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(folder / name, staged / name)
    linked = all((staged / name).exists() for name in stay)
    if not others(folder, marks) and linked and _exchange_folder(staged, folder, old):
        return
    for name in stay:
        (staged / name).unlink(missing_ok=True)
    _move(staged, folder, new, [name for name in old if name not in stay])


def recover(folder: Path) -> None:
    """Finish, or undo, what a writer that was killed left half done; the folder is held by the caller."""
    place = folder.resolve()
    sweep(place.parent, lambda name: name == f".{place.name}{_STAGED}")
    sweep(folder, lambda name: name == _STAGED)
    waiting = folder / _NEXT
    if not waiting.is_dir():
        remove_tree(folder / _OLD)
        return
    try:
        journal = read_json(waiting / _JOURNAL)
        new, old = ([str(name) for name in journal[key]] for key in ("new", "old"))
    except Exception:
        return  # nobody's journal: leave it
    if any(PurePath(name).is_absolute() or ".." in PurePath(name).parts for name in (*new, *old)):
        return  # not of `_move`: a folder from elsewhere must not reach outside of itself
    _finish(waiting, folder, new, old)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _exchange_folder(staged: Path, folder: Path, old: list[str]) -> bool:
    """Let ``folder`` show the new set in one step; False if that cannot be done here, and nothing has changed.

    The folder that people stand in, with the lock, comes back in a second step, with the new files as links.
    """
    place = folder.resolve()
    twin = place.parent / temporary(f".{place.name}{_STAGED}")
    files = _files(staged)
    try:
        os.rename(staged, twin)
    except OSError:  # the folder above is not ours, or another disk
        return False
    done = False
    try:
        with contextlib.suppress(OSError):
            if (folder / LOCK).exists():
                os.link(folder / LOCK, twin / LOCK)
            shutil.copymode(folder, twin)
            done = exchange(twin, place)
    finally:
        if not done:
            (twin / LOCK).unlink(missing_ok=True)
            os.rename(twin, staged)
    if not done:
        return False
    # now `place` is the new folder, and `twin` the one that was there
    with contextlib.suppress(OSError):  # where there are no links, the new folder stays
        for name in old:
            (twin / name).unlink()
        for name in files:
            (twin / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(place / name, twin / name)
        exchange(twin, place)
        flush_names(place.parent, place)
    for name in _files(twin):  # what somebody put there in this moment
        if name != LOCK and name not in (*files, *old):
            with contextlib.suppress(OSError):
                _rename(twin / name, place / name)
    remove_tree(twin)
    return True


def _move(staged: Path, folder: Path, new: list[str], old: list[str]) -> None:
    """Move the old files aside, then the new ones in; undone on an error."""
    write_json(staged / _JOURNAL, {"new": new, "old": old})
    remove_tree(folder / _OLD)
    waiting = folder / _NEXT
    os.rename(staged, waiting)
    try:
        _finish(waiting, folder, new, old)
    except BaseException:
        _undo(waiting, folder, new, old)
        raise


def _finish(waiting: Path, folder: Path, new: list[str], old: list[str]) -> None:
    aside = folder / _OLD
    if all((waiting / name).exists() for name in new):  # no new file is in its place yet
        for name in old:
            if os.path.lexists(folder / name):
                _rename(folder / name, aside / name)
    for name in new:
        if (waiting / name).exists():
            _rename(waiting / name, folder / name)
    flush_names(folder)
    remove_tree(waiting)
    remove_tree(aside)


def _undo(waiting: Path, folder: Path, new: list[str], old: list[str]) -> None:
    with contextlib.suppress(OSError):
        for name in new:
            if not (waiting / name).exists() and os.path.lexists(folder / name):
                _rename(folder / name, waiting / name)
        for name in old:
            if os.path.lexists(folder / _OLD / name):
                _rename(folder / _OLD / name, folder / name)
        remove_tree(waiting)
        remove_tree(folder / _OLD)


def _rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)

"""Publishes a model into a repository that a server may be polling: complete, with one rename.

A polling server loads every folder of the repository, and may never retry one that it failed to load. So a model's
folder is prepared beside the repository, with links to its earlier versions, and exchanged as a whole.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vtk.errors import DataError
from vtk.files import replace_dir
from vtk.locks import hold_name
from vtk.nodes import check_folder, resolve_output
from vtk_export.readme import README
from vtk_export.triton.pbtxt import CONFIG, LABELS, MARK, PART, read_text
from vtk_export.triton.readme import check_page

NO_BYTECODE = "__pycache__"
DECODING = {
    "vtk_depth.py": "bit_depth",
    "vtk_pixels.py": "pixels",
    "vtk_profiles.py": "icc_profiles",
    "vtk_raw.py": "raw_images",
    "vtk_read_pixels.py": "read_pixels",
    "vtk_tiff.py": "tiff",
    "vtk_tiff_samples.py": "tiff_samples",
}
"""Name in a model's folder → module of `vtk.data.decoding`, which needs Pillow and NumPy only."""

MODEL_SERVER = "ovms.json"
"""Config for OpenVINO Model Server, of a model for the server's OpenVINO back-end."""

OWN = frozenset({"warmup", MODEL_SERVER, README, "client.py", "client.json", "vtk_images.py", *DECODING})
"""Names in a model's folder beside its versions, config and labels."""


@dataclass(frozen=True)
class EarlierModel:
    """A model of an earlier export.

    Attributes:
        path: its folder.
        config: its message.
        versions: in ascending order.
    """

    path: Path
    config: Any
    versions: tuple[int, ...]


@dataclass
class Draft:
    """A model's folder that is not published yet.

    Attributes:
        folder: to be filled; takes the model's place.
        old: what was there.
        version: number of the version to be written: the next one, or an earlier one to be written anew.
        reused: it takes the place of the last version.
        kept: what was there stays, and the draft is thrown away.
    """

    folder: Path
    old: EarlierModel | None
    version: int
    reused: bool = False
    kept: bool = False

    @property
    def at(self) -> Path:
        """The version's folder."""
        return self.folder / str(self.version)

    @property
    def last(self) -> Path | None:
        """The folder of the last version of what was there."""
        return None if self.old is None or not self.old.versions else self.old.path / str(self.old.versions[-1])

    def reuse(self) -> None:
        """Replace the last version in place: the running model follows its files by itself.

        A polling server does not know that, and loads it once more beside the one that serves.
        """
        assert self.old is not None
        at = self.at
        self.version, self.reused = self.old.versions[-1], True
        at.rename(self.at)

    def keep(self) -> None:
        """Keep the model as it was: nothing changed, and a polling server would load it once more."""
        assert self.old is not None
        self.version, self.kept = self.old.versions[-1], True


class _Kept(Exception):
    """Ends a draft that is discarded."""


def find_existing(repo: Path, name: str, part_of: str = "") -> EarlierModel | None:
    """Return the model of an earlier export.

    Args:
        repo: the repository.
        name: of the model.
        part_of: the ensemble that it is a step of.

    Raises:
        DataError: ``repo`` is a file, or holds something else under this name.
    """
    check_folder(repo, what="the folder of a model repository")
    path = resolve_output(repo / name)
    if not path.exists():
        return None
    config = None
    if (path / CONFIG).is_file():
        with contextlib.suppress(OSError, UnicodeDecodeError):
            config = read_text((path / CONFIG).read_text(encoding="utf-8"), str(path / CONFIG))
    if config is None or MARK not in config.parameters:
        raise DataError(f"{path} was not written by `vtk export triton`, so it stays; give another --name or --out")
    if (other := config.parameters[PART].string_value if PART in config.parameters else "") != part_of:
        kind = f"is a step of the ensemble `{other}`" if other else "is a model of its own"
        raise DataError(f"{path} {kind}, so it stays; give another --name or --out")
    own = {CONFIG, LABELS, *OWN}
    foreign = sorted(p.name for p in path.iterdir() if p.name not in own and not (p.name.isdecimal() and p.is_dir()))
    if foreign:  # the whole folder is replaced
        raise DataError(
            f"{path} holds {foreign[0]}, which would be lost; move it away, or give another --name or --out"
        )
    check_page(path)
    versions = sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and p.is_dir())
    return EarlierModel(path, config, tuple(versions))


@contextlib.contextmanager
def draft(repo: Path, name: str, part_of: str = "") -> Iterator[Draft]:
    """Yield a draft of the model's next version; on success it is published, on an error nothing has changed.

    Drafts of several models may be open at once; those that are opened last are published first.

    Args:
        repo: the repository.
        name: of the model.
        part_of: the ensemble that it is a step of.

    Raises:
        DataError: the repository or the folder around it cannot be written, or another export was quicker.
    """
    old = find_existing(repo, name, part_of)
    repo = repo.resolve()
    existed = repo.exists()
    with _hold(repo, name):
        staging = _staging(repo, name)
        try:
            with contextlib.suppress(_Kept), replace_dir(repo / name, beside=staging) as folder:
                new = Draft(folder, old, (old.versions[-1] if old and old.versions else 0) + 1)
                yield new
                if new.kept:
                    raise _Kept
                now = find_existing(repo, name, part_of)
                if (now and now.versions) != (old and old.versions):
                    raise DataError(f"another export has written {repo / name} meanwhile; export again")
                if old is not None:
                    _link_versions(old, new)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if not existed:
                with contextlib.suppress(OSError):
                    repo.rmdir()  # only if nothing was put there


@contextlib.contextmanager
def _hold(repo: Path, name: str) -> Iterator[None]:
    """Keep other exports of a model away; the lock lies beside the repository, which a server may be reading."""
    with hold_name(repo.parent / f"{repo.name}.{name}", f"vtk export triton --name {name}", f"{repo / name}:"):
        yield


def _staging(repo: Path, name: str) -> Path:
    prefix = f".{repo.name}.staging-"
    for left in repo.parent.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            shutil.rmtree(left, ignore_errors=True)  # of an export that was killed
    staging = repo.parent / f"{prefix}{os.getpid()}-{name}"
    try:
        staging.mkdir(parents=True)
        if repo.exists() and repo.stat().st_dev != staging.stat().st_dev:
            staging.rmdir()
            raise DataError(
                f"`--out` {repo} is a separate file system, into which nothing can be renamed; give a "
                f"folder inside it, such as {repo / 'models'}"
            )
    except OSError as error:
        raise DataError(
            f"cannot write {repo.parent}, where a model is made before it is moved into {repo}: "
            f"{error.strerror or error}; give an --out in a folder of yours"
        ) from error
    return staging


def _link_versions(old: EarlierModel, new: Draft) -> None:
    """Link the earlier versions into the new folder, without copying their weights."""
    for version in old.versions:
        if version != new.version:
            shutil.copytree(old.path / str(version), new.folder / str(version), copy_function=link_file)


def link_file(source: str | Path, target: str | Path) -> None:
    """Make a file have another name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def forbid_bytecode(version: Path) -> None:
    """Block Python's bytecode folder with a file: compiled files would look like a change to a polling server."""
    (version / NO_BYTECODE).write_bytes(b"")

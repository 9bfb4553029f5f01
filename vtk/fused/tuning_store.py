"""Stores tuned choices: one table per card and versions, ``$VTK_HOME/tuned/*.json``."""

import contextlib
import functools
import hashlib
import importlib.metadata
import re
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vtk.errors import HeldError
from vtk.files import home, write_text
from vtk.locks import hold_folder
from vtk_kernels import choices
from vtk_kernels.choices import FIELDS, ChoiceTableError, Entry

_WAIT_S = 5.0
"""A writer holds the folder for milliseconds; one that takes longer is not waited for."""

_loaded: dict[Path, tuple[tuple[int, ...], tuple[Entry, ...]]] = {}
"""What `load` has read, by file: the file as it was, and its entries."""


def path(card: str) -> Path:
    """Return the file of a card under these versions of torch, Triton and our kernels; it need not exist."""
    versions = "|".join((card, torch.__version__, _triton(), kernels_digest()))
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return home() / "tuned" / f"{name}-{hashlib.sha256(versions.encode()).hexdigest()[:12]}.json"


def read(card: str) -> dict[tuple[Any, ...], Entry]:
    """Return what was tuned on a card, by `key`; nothing, and a warning, where the file is damaged."""
    file = path(card)
    if not file.is_file():
        return {}
    try:
        return {key(entry): entry for entry in choices.read(file)}
    except ChoiceTableError as error:
        warnings.warn(f"{error}; it is ignored, and written anew by `vtk doctor --tune`", RuntimeWarning, stacklevel=2)
        return {}


def write(card: str, entries: Iterable[Entry]) -> dict[tuple[Any, ...], Entry]:
    """Add entries to a card's file, in place of older ones about the same; return all that it then has.

    What another process wrote meanwhile stays.

    Raises:
        DataError: it cannot be written.
    """
    file = path(card)
    with _held(file.parent):
        found = read(card) | {key(entry): entry for entry in entries}
        write_text(file, choices.text(found.values()))
    return found


def load(card: str) -> None:
    """Let choices know what was tuned on a card, unless they do."""
    file = path(card)
    with contextlib.suppress(OSError):
        found = file.stat()
        state = found.st_mtime_ns, found.st_size, found.st_ino
        if file not in _loaded or _loaded[file][0] != state:
            _loaded[file] = state, tuple(read(card).values())
            choices.use(entry for _, entries in _loaded.values() for entry in entries)


def load_for(device: torch.device) -> None:
    """As `load`, of a CUDA device; of others nothing is tuned."""
    if device.type == "cuda" and torch.cuda.is_available():
        load(torch.cuda.get_device_name(device))


def key(entry: Entry) -> tuple[Any, ...]:
    """Return what an entry is about."""
    return tuple(entry[field] for field in FIELDS)


@functools.cache
def kernels_digest() -> str:
    """Return the sha256 of our kernels' code: other kernels have other times."""
    found = hashlib.sha256()
    for file in sorted(Path(choices.__file__).parent.glob("*.py")):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@contextlib.contextmanager
def _held(folder: Path) -> Any:
    """Hold the folder; wait for another writer, who is done in a moment."""
    end = time.monotonic() + _WAIT_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold_folder(folder, "vtk doctor --tune", "the tuned choices in"))
                break
            except HeldError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
        yield

"""Detects the layout of a folder of images: ``train/`` and ``val/``, or class folders without a split."""

import contextlib
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from vtk.data.sources.listing import ImageFile, folders, is_hidden, loose_images, natural, note_unused, walk
from vtk.data.sources.unused_files import LeftOut, UnusedFiles
from vtk.errors import DataError
from vtk.text import one_line

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "validation", "valid", "test", "testing")
EXPECTED = "expected train/ and val/ (or validation/, valid/, test/), each with one folder per class, or class folders"

Files = dict[str, list[ImageFile]]
"""Class → its image files."""


@dataclass(frozen=True)
class Layout:
    """The folders of the parts.

    Attributes:
        kind: ``split`` if the folder has a held-out part, ``flat`` if the split is made here.
        train: folder of the training classes; None if there are only held-out ones.
        val: folder of the held-out classes; None for ``flat``.
        notes: for the user, one sentence each.
        warnings: probable mistakes, one sentence each.
    """

    kind: Literal["split", "flat"]
    train: Path | None
    val: Path | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Part(NamedTuple):
    """The class folders of one part.

    Attributes:
        files: class → its image files; with ``keep_empty`` also classes without files.
        empty: names of folders without image files.
        warnings: one sentence each.
    """

    files: Files
    empty: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class ImageSet(NamedTuple):
    """A set with one label per image.

    Attributes:
        base: folder that file names are relative to.
        layout: the folders of the parts; for a table, the table itself.
        parts: training part and held-out part.
        left: unused files.
        table: the table of labels, if there is one.
        notes: for the user, one sentence each.
    """

    base: Path
    layout: Layout
    parts: tuple[Part, Part]
    left: LeftOut
    notes: tuple[str, ...] = ()
    table: Path | None = None


def find_layout(root: Path, classes: Sequence[str] | None = None) -> Layout:
    """Return the layout by the folder names below ``root``.

    Args:
        root: the folder given by the user.
        classes: known class names (evaluation): folders with exactly these names are always classes, and a held-out
            part without ``train/`` is allowed.

    Raises:
        DataError: no class folders, or ``train/`` without class folders beside a held-out folder.
    """
    names = folders(root)
    if not names:
        found = f"{root} has {loose_images(root)} images but no folders" if loose_images(root) else f"{root} is empty"
        raise DataError(f"{found}; {EXPECTED}")
    if classes is not None and {class_name(name) for name in names} <= set(classes):
        return Layout("flat", root, None)
    train, held_out = _named(names, TRAIN_NAMES), _named(names, VAL_NAMES)
    with_classes = [name for name in held_out if _has_images(root / name)]
    if train and not folders(root / train[0]):
        if held_out or len(_named(names, TRAIN_NAMES)) == len(names):
            raise DataError(f"{root / train[0]} has no class folders; {EXPECTED}")
        return Layout("flat", root, None)  # a class called train
    if train:
        val = with_classes[0] if with_classes else None
        empty = [name for name in held_out if name not in with_classes and not loose_images(root / name)]
        if val is None and empty:
            return Layout("flat", root / train[0], None, (), (_empty_note(root, names, train[0], empty),))
        if unused := [name for name in names if name not in (train[0], val)]:
            notes: tuple[str, ...] = (
                f"unused folders: {_some(unused)} beside {_some([train[0], *filter(None, [val])])}",
            )
        else:
            notes = ()
        if val is None:
            return Layout("flat", root / train[0], None, notes)
        return Layout("split", root / train[0], root / val, notes)
    if with_classes and len(held_out) == len(names):
        if classes is None:
            raise DataError(f"{root} has {with_classes[0]}/ but no train/; {EXPECTED}")
        unused = [name for name in names if name != with_classes[0]]
        notes = (f"unused folders: {_some(unused)} beside {with_classes[0]}/",) if unused else ()
        return Layout("split", None, root / with_classes[0], notes)
    if len(names) == 1 and classes is None:
        inner = folders(root / names[0])
        if len(inner) > 1 or _named(inner, TRAIN_NAMES):
            raise DataError(f"{root} contains only {names[0]}/, which contains {_some(inner)}; give {root / names[0]}")
    return Layout("flat", root, None)


def list_part(root: Path, part: Path | None, *, keep_empty: bool = False, rest: UnusedFiles | None = None) -> Part:
    """Return the image files of every class folder of ``part``; their names are relative to ``root``.

    Files at any depth belong to the class folder they are in. Images outside class folders are not used.

    Args:
        root: the folder given by the user.
        part: folder of class folders; None for one that is absent.
        keep_empty: keep classes of folders without images.
        rest: records all other files in ``part``.

    Raises:
        DataError: an unreadable folder, or a folder whose name is not text and cannot be stored as a class name.
    """
    if part is None:
        return Part({})
    prefix = "" if part == root else f"{part.relative_to(root).as_posix()}/"
    found: Files = {}
    spellings: dict[str, list[str]] = {}
    for name in folders(part):
        if not is_text(class_name(name)):
            raise DataError(f"{part} has a folder whose name is not UTF-8 text ({name!a}); rename it")
        files = list(walk(part / name, rest, f"{prefix}{name}/"))
        spellings.setdefault(class_name(name), []).append(name)
        found.setdefault(class_name(name), []).extend(files)
    if rest is not None:
        note_unused(part, prefix, folders(part), rest)
    empty = tuple(name for name, files in found.items() if not files)
    warnings = []
    if twice := [name for name, folders_of in spellings.items() if len(folders_of) > 1]:
        warnings.append(f"{part.name}/ has {_some(twice)} twice, in two Unicode normal forms: both are one class")
    if inner := _inner_parts(part, found):
        warnings.append(
            f"class folders of {part.name}/ contain folders named {_some(inner)}: all their images are one part; a "
            "split is train/CLASS and val/CLASS, not CLASS/train"
        )
    if loose := loose_images(part):
        files_are = "image file is" if loose == 1 else "image files are"
        warnings.append(f"{loose} {files_are} directly in {part.name}/, outside class folders, and unused")
    kept = found if keep_empty else {name: files for name, files in found.items() if files}
    return Part(kept, empty, tuple(warnings))


def refuse_inside(out: Path, root: Path) -> None:
    """Refuse an output folder among the images: the next scan would take it for a class.

    Args:
        out: folder that will be written.
        root: folder of images; folders beside its ``train/`` are not scanned.

    Raises:
        DataError: ``out`` is ``root``, or inside a folder that is scanned for classes.
    """
    place, images = out.resolve(), root.resolve()
    if not place.is_relative_to(images) or not images.is_dir():
        return
    inner = place.relative_to(images).parts
    names = folders(images)
    beside = bool(_named(names, TRAIN_NAMES)) and bool(inner) and not _named(inner[:1], TRAIN_NAMES + VAL_NAMES)
    if not (beside or any(map(is_hidden, inner))):
        raise DataError(f"`--out` {out} is among the images of {root}; give a folder outside")


def _inner_parts(part: Path, found: Files) -> list[str]:
    """Return the train/ and val/ folders that every class folder contains."""
    inner = [set(folders(part / name)) for name, files in found.items() if files and (part / name).is_dir()]
    common = set.intersection(*inner) if inner else set()
    train, val = (_named(natural(common), names) for names in (TRAIN_NAMES, VAL_NAMES))
    return [*train, *val] if train and val else []


def _has_images(folder: Path) -> bool:
    return any(True for name in folders(folder) for _ in walk(folder / name))


def _empty_note(root: Path, names: Sequence[str], train: str, empty: Sequence[str]) -> str:
    others = [name for name in names if name != train and name not in empty]
    beside = f"; also unused: {_some(others)}" if others else ""
    has = "has" if len(empty) == 1 else "have"
    return f"{_some(empty)} in {root} {has} no images: a part of {train}/ is held out instead{beside}"


def class_name(folder: str) -> str:
    """Return the class name of a folder name: composed Unicode (NFC), equal for copies made by macOS.

    If Python decodes names as ASCII (the C locale with ``PYTHONUTF8=0``) they are still decoded as UTF-8.
    """
    with contextlib.suppress(UnicodeDecodeError):
        folder = folder if folder.isascii() else os.fsencode(folder).decode("utf-8")
    return unicodedata.normalize("NFC", folder)


def is_text(name: str) -> bool:
    """Return whether a name is text; Python decodes bytes that are not UTF-8 to lone surrogates, which JSON lacks."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the names that are in ``wanted``, in its order; case is ignored."""
    return [name for want in wanted for name in names if name.lower() == want]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"{one_line(name)}/" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"

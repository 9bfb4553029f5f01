"""How a folder of images is organised: ``train/`` + ``val/``, or one set of class folders to be split here."""

import contextlib
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from vtk.data.sources.listing import Found, folders, is_hidden, loose_images, natural, note_rest, walk
from vtk.data.sources.unused_files import LeftOut, Rest
from vtk.errors import DataError
from vtk.text import one_line

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "validation", "valid", "test", "testing")
EXPECTED = "expected train/ and val/ (or validation/, valid/, test/), each with one folder per class, or class folders"

Files = dict[str, list[Found]]
"""Class → its image files."""


@dataclass(frozen=True)
class Layout:
    """Where the class folders are.

    Attributes:
        kind: ``split`` if the folder itself says what is held out, ``flat`` if that is decided here.
        train: folder with the class folders to train on; None if there are only held-out ones.
        val: folder with the held-out class folders; None for ``flat``.
        notes: what the user should know about the choice, one sentence each.
        warnings: what is probably not meant, one sentence each.
    """

    kind: Literal["split", "flat"]
    train: Path | None
    val: Path | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Part(NamedTuple):
    """The class folders of one part.

    Attributes:
        files: class → its image files, with `keep_empty` also of classes that have none.
        empty: names of folders without image files.
        warnings: one sentence each.
    """

    files: Files
    empty: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class ImageSet(NamedTuple):
    """A set of one label an image.

    Attributes:
        base: folder that names of files start at.
        layout: where the parts are; of a table, both are the table.
        parts: images to train on, and held-out ones.
        left: files that are not used.
        table: that says so, if one does.
        notes: what else the user should know, one sentence each.
    """

    base: Path
    layout: Layout
    parts: tuple[Part, Part]
    left: LeftOut
    notes: tuple[str, ...] = ()
    table: Path | None = None


def find_layout(root: Path, classes: Sequence[str] | None = None) -> Layout:
    """Look at the folder names below ``root``.

    Args:
        root: the folder given by the user.
        classes: names that are known already (evaluation); folders of exactly these names are always classes, and
            held-out images without a ``train/`` are enough.

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
        return Layout("flat", root, None)  # one of the classes is trains
    if train:
        val = with_classes[0] if with_classes else None
        empty = [name for name in held_out if name not in with_classes and not loose_images(root / name)]
        if val is None and empty:
            return Layout("flat", root / train[0], None, (), (_empty_note(root, names, train[0], empty),))
        if unused := [name for name in names if name not in (train[0], val)]:
            notes: tuple[str, ...] = (f"not used: {_some(unused)} beside {_some([train[0], *filter(None, [val])])}",)
        else:
            notes = ()
        if val is None:
            return Layout("flat", root / train[0], None, notes)
        return Layout("split", root / train[0], root / val, notes)
    if with_classes and len(held_out) == len(names):
        if classes is None:
            raise DataError(f"{root} has {with_classes[0]}/ but no train/; {EXPECTED}")
        unused = [name for name in names if name != with_classes[0]]
        notes = (f"not used: {_some(unused)} beside {with_classes[0]}/",) if unused else ()
        return Layout("split", None, root / with_classes[0], notes)
    if len(names) == 1 and classes is None:
        inner = folders(root / names[0])
        if len(inner) > 1 or _named(inner, TRAIN_NAMES):
            raise DataError(f"{root} holds {names[0]}/ only, and that {_some(inner)}; give {root / names[0]}")
    return Layout("flat", root, None)


def collect(root: Path, part: Path | None, *, keep_empty: bool = False, rest: Rest | None = None) -> Part:
    """Return the image files of every class folder of ``part``, which is ``root`` or below it; their names start there.

    Files at any depth belong to the class folder they are in. Images outside class folders are not used.

    Args:
        root: the folder given by the user.
        part: folder of class folders; None for one that is absent.
        keep_empty: make classes of folders without images, too.
        rest: is told of everything else that lies in ``part``.

    Raises:
        DataError: a folder may not be read, or its name is no text and so cannot be stored as the name of a class.
    """
    if part is None:
        return Part({})
    prefix = "" if part == root else f"{part.relative_to(root).as_posix()}/"
    found: Files = {}
    spelled: dict[str, list[str]] = {}
    for name in folders(part):
        if not is_text(class_name(name)):
            raise DataError(f"{part} has a folder whose name is not UTF-8 text ({name!a}); rename it")
        files = list(walk(part / name, rest, f"{prefix}{name}/"))
        spelled.setdefault(class_name(name), []).append(name)
        found.setdefault(class_name(name), []).extend(files)
    if rest is not None:
        note_rest(part, prefix, folders(part), rest)
    empty = tuple(name for name, files in found.items() if not files)
    warnings = []
    if twice := [name for name, folders_of in spelled.items() if len(folders_of) > 1]:
        warnings.append(f"{part.name}/ has {_some(twice)} twice, in two spellings of Unicode: both are one class")
    if parted := _inner_parts(part, found):
        warnings.append(
            f"class folders of {part.name}/ hold folders named {_some(parted)}: all their images are one part; a split "
            "is train/CLASS and val/CLASS, not CLASS/train"
        )
    if loose := loose_images(part):
        files_are = "image file is" if loose == 1 else "image files are"
        warnings.append(f"{loose} {files_are} directly in {part.name}/, outside class folders, and not used")
    kept = found if keep_empty else {name: files for name, files in found.items() if files}
    return Part(kept, empty, tuple(warnings))


def refuse_inside(out: Path, root: Path) -> None:
    """Refuse results among the images: the next look at the folder would take them for a class, or for images.

    Args:
        out: folder that will be written.
        root: folder of images; what lies beside its ``train/`` is not looked at.

    Raises:
        DataError: ``out`` is ``root`` or lies where classes are looked for.
    """
    place, images = out.resolve(), root.resolve()
    if not place.is_relative_to(images) or not images.is_dir():
        return
    inner = place.relative_to(images).parts
    names = folders(images)
    beside = bool(_named(names, TRAIN_NAMES)) and bool(inner) and not _named(inner[:1], TRAIN_NAMES + VAL_NAMES)
    if not (beside or any(map(is_hidden, inner))):
        raise DataError(
            f"`--out` {out} lies among the images of {root}, which it would change; give a folder elsewhere"
        )


def _inner_parts(part: Path, found: Files) -> list[str]:
    """Return the train/ and val/ folders that lie inside of every class folder."""
    inner = [set(folders(part / name)) for name, files in found.items() if files and (part / name).is_dir()]
    common = set.intersection(*inner) if inner else set()
    train, val = (_named(natural(common), names) for names in (TRAIN_NAMES, VAL_NAMES))
    return [*train, *val] if train and val else []


def _has_images(folder: Path) -> bool:
    return any(True for name in folders(folder) for _ in walk(folder / name))


def _empty_note(root: Path, names: Sequence[str], train: str, empty: Sequence[str]) -> str:
    others = [name for name in names if name != train and name not in empty]
    beside = f"; not used either: {_some(others)}" if others else ""
    has = "has" if len(empty) == 1 else "have"
    return f"{_some(empty)} in {root} {has} no images: a part of {train}/ is held out in place of it{beside}"


def class_name(folder: str) -> str:
    """Return the class of a folder name: composed Unicode, so that a copy made by macOS has the same classes.

    Where Python reads names as ASCII (the C locale with ``PYTHONUTF8=0``) they are still taken for UTF-8.
    """
    with contextlib.suppress(UnicodeDecodeError):
        folder = folder if folder.isascii() else os.fsencode(folder).decode("utf-8")
    return unicodedata.normalize("NFC", folder)


def is_text(name: str) -> bool:
    """Tell whether a name is text; Python reads bytes that are not UTF-8 as lone surrogates, which JSON lacks."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the names that are ``wanted``, in the order of ``wanted``; upper and lower case alike."""
    return [name for want in wanted for name in names if name.lower() == want]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"{one_line(name)}/" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"

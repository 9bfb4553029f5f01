"""Images with any number of labels: a CSV file, or folders where every folder above an image is one of its labels.

The CSV file has a line ``path,label1;label2`` for each image and may have a third column, ``train`` or ``val``. Paths
start at the file's folder; a first line that names the columns is left out. In folders an image may lie at any depth
(``beach/dog/1.jpg`` is both), and a file of the same name and bytes in several folders is one image with all their
labels; files directly in the folder have no label.
"""

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from vtk.data.images import MAX_PIXELS
from vtk.data.layout import TRAIN_NAMES, VAL_NAMES
from vtk.data.listing import Found, folders, natural, walk
from vtk.data.probed import probe_files, refuse_bad, sizes_of
from vtk.data.samples import BadFile, DataAudit, Sample
from vtk.errors import DataError, UsageError

_HEADS = ("path", "image", "file", "filename", "image_path", "file_name")
_PARTS = {**dict.fromkeys(TRAIN_NAMES, "train"), **dict.fromkeys(VAL_NAMES, "val")}


@dataclass(frozen=True)
class MultiAudit(DataAudit):
    """What a multi-label set holds; the label of a sample is an array (classes,) fp32 of zeros and ones."""

    def counts(self, part: Literal["train", "val"]) -> list[int]:
        """Return the images that have each label, in index order."""
        labels = [cast(Any, sample.label) for sample in getattr(self, part)]
        return [int(count) for count in (np.sum(labels, axis=0) if labels else np.zeros(len(self.classes)))]


@dataclass
class _Listed:
    """Images of a set by name: their labels, and the part that the set itself puts them into."""

    root: Path
    labels: dict[str, set[str]]
    parts: dict[str, str]


def scan_multi(
    root: Path,
    *,
    val_split: float = 0.2,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    on_bad_image: str = "skip",
    in_chans: int = 3,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    cache: bool = True,
    show_progress: bool = True,
) -> MultiAudit:
    """Decode every image of a multi-label set once and say what is there; arguments are those of `vtk.data.scan`.

    Args:
        root: a ``.csv`` file, a folder with ``labels.csv``, or folders (``train/`` and ``val/`` above them or not).
        val_split: fraction held out where the set does not say; of every label with two images at least one.
        seed: of that division.
        classes: labels in index order, when a trained model has them already.
        on_bad_image: ``skip`` or ``fail``.
        in_chans: channels of the model's input.
        max_pixels: a larger image is a bad one.
        workers: processes that decode.
        cache: remember what was decoded.
        show_progress: draw a progress bar.

    Raises:
        DataError: no images or labels, a line that cannot be read, or a label that the model does not know.
    """
    root = Path(root)
    table = root if root.suffix.lower() == ".csv" else root / "labels.csv"
    listed = _read_csv(table) if table.is_file() or table == root else _read_folders(root)
    found = {label for labels in listed.labels.values() for label in labels}
    names = tuple(natural(found)) if classes is None else tuple(classes)
    if unknown := natural(found - set(names)):
        raise DataError(f"{root} has labels that the model does not know: {', '.join(unknown[:5])}")
    if not names:
        raise DataError(f"{root} has no labels; give lines path,label1;label2 or images in folders named by labels")
    files = [_stat(listed.root, name) for name in listed.labels]
    probes, cached = probe_files(listed.root, files, workers, cache, show_progress, in_chans, max_pixels)
    if on_bad_image == "fail":
        refuse_bad(listed.root, probes)
    good = [name for name in listed.labels if not probes[name].bad]
    if not good:
        raise DataError(f"{root}: none of its {len(files)} image files can be read")
    index = {name: i for i, name in enumerate(names)}
    labels = {name: sorted(index[label] for label in listed.labels[name]) for name in good}
    notes: tuple[str, ...] = ()
    held = {name for name in good if listed.parts.get(name) == "val"}
    split = bool(listed.parts)
    if not split:
        held = _hold_out(good, labels, len(names), val_split, seed)
        notes = (f"{len(held)} of {len(good)} images are held out (--val-split {val_split}, seed {seed})",)
    samples = [Sample(listed.root / name, cast(int, _one_hot(labels[name], len(names)))) for name in good]
    many = Counter(len(labels[name]) for name in good)
    return MultiAudit(
        root=root,
        layout="split" if split else "flat",
        classes=names,
        train=tuple(s for s, name in zip(samples, good, strict=True) if name not in held),
        val=tuple(s for s, name in zip(samples, good, strict=True) if name in held),
        bad=tuple(BadFile(listed.root / name, probe.bad) for name, probe in probes.items() if probe.bad),
        sizes=sizes_of([probes[name] for name in good]),
        modes=dict(Counter(probes[name].mode for name in good).most_common()),
        exif_rotated=sum(probes[name].orientation != 1 for name in good),
        notes=(*notes, "labels an image: " + ", ".join(f"{n} in {many[n]}" for n in sorted(many))),
        val_split=val_split,
        seed=seed,
        max_pixels=max_pixels,
        cached=cached,
    )


def _one_hot(labels: Sequence[int], classes: int) -> np.ndarray:
    row = np.zeros(classes, dtype=np.float32)
    row[list(labels)] = 1.0
    return row


def _stat(root: Path, name: str) -> Found:
    try:
        info = os.stat(root / name)
        return Found(name, info.st_size, info.st_mtime_ns)
    except OSError:  # named by the table and not there: a bad file like any other
        return Found(name, 0, 0)


def _read_csv(table: Path) -> _Listed:
    listed = _Listed(table.parent, {}, {})
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file), 1) if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {table} as a table of labels: {error}") from error
    if lines and lines[0][1][0].strip().lower() in _HEADS:
        lines = lines[1:]
    for number, row in lines:
        name, labels, part = (*(cell.strip() for cell in row[:3]), "", "")[:3]
        if not name or len(row) not in (2, 3) or (part and part.lower() not in _PARTS):
            raise DataError(
                f"{table} line {number} is {','.join(row)[:60]!r}; write path,label1;label2 or path,label1;label2,val"
            )
        listed.labels.setdefault(name, set()).update(filter(None, map(str.strip, labels.split(";"))))
        if part:
            listed.parts[name] = _PARTS[part.lower()]
    if not listed.labels:
        raise DataError(f"{table} names no images; write lines path,label1;label2")
    return listed


def _read_folders(root: Path) -> _Listed:
    inside = {name.lower(): name for name in folders(root)}
    train, val = (next((inside[n] for n in known if n in inside), None) for known in (TRAIN_NAMES, VAL_NAMES))
    listed = _Listed(root, {}, {})
    if train is None:
        _gather(root, "", None, listed)
    else:
        _gather(root, f"{train}/", "train" if val else None, listed)
        if val:
            _gather(root, f"{val}/", "val", listed)
    if not listed.labels:
        raise DataError(f"{root} has no images; give a table of labels (.csv), or folders named by labels")
    return listed


def _gather(root: Path, prefix: str, part: str | None, listed: _Listed) -> None:
    """Add the images below a part; files of one name and size are one image if their bytes are the same."""
    first: dict[tuple[str, int], list[tuple[str, str | None]]] = {}
    for file in walk(root / prefix if prefix else root):
        name, labels = prefix + file.name, set(file.name.split("/")[:-1])
        like = first.setdefault((os.path.basename(name), file.bytes), [])
        same = None
        if like and file.bytes:
            digest = _digest(root / name)
            like[:] = [(other, known or _digest(root / other)) for other, known in like]
            same = next((other for other, known in like if known == digest), None)
            like.append((name, digest)) if same is None else None
        else:
            like.append((name, None))
        if same is not None:
            listed.labels[same] |= labels
            continue
        listed.labels[name] = labels
        if part:
            listed.parts[name] = part


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return f"unreadable {path}"


def _hold_out(
    names: Sequence[str], labels: Mapping[str, Sequence[int]], classes: int, fraction: float, seed: int
) -> set[str]:
    """Divide label by label, the rarest first, so that each has about ``fraction`` of its images held out.

    The idea is the iterative stratification of Sechidis, Tsoumakas and Vlahavas (2011).
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"`--val-split` is {fraction}; give 0 (hold out nothing) or more, below 1")
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    counts = Counter(label for name in names for label in labels[name])
    done: set[str] = set()
    held: set[str] = set()
    for label in sorted(range(classes), key=lambda i: (counts[i], i)):
        mine = [name for name in order if label in labels[name]]
        wanted = max(round(fraction * len(mine)), 1 if fraction and len(mine) > 1 else 0)
        wanted -= sum(name in held for name in mine)
        free = [name for name in mine if name not in done]
        held.update(free[: max(0, wanted)])
        done.update(free)
    rest = [name for name in order if name not in done]
    held.update(rest[: round(fraction * len(rest))])
    return held

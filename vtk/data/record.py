"""The record of a run's images, by content and path, by which later commands find the held-out ones.

A card stores twelve bytes per image: six of the digest of the file's bytes and six of the hash of its path below the
folder. This identifies a million images, even if files were added, moved or renamed since.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vtk.data.audit.result import DataAudit, Sample
from vtk.errors import DataError

MOST = 200_000
"""Most images of a part that a card lists (over three million characters); larger parts are not listed."""

_CONTENT = _PATH = 6


class Entry(NamedTuple):
    """An image of a run: first bytes of the digest of its content, and of the hash of its path."""

    content: bytes
    path: bytes


@dataclass(frozen=True)
class Record:
    """The images of a run.

    Attributes:
        train: training images; None if the card does not list them.
        val: held-out images; None if the card does not list them.
    """

    train: tuple[Entry, ...] | None
    val: tuple[Entry, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"train": _encode(self.train), "val": _encode(self.val)}


class ImagesByUse(NamedTuple):
    """Images of a folder by their use in a run, in the order of the folder.

    Attributes:
        held: held out by the run.
        trained: training images of the run.
        new: not in the run.
        changed: number of ``held`` images known only by path: their content differs.
        missing: number of held-out images of the run that are not in the folder.
        named: number of ``new`` images with the path of another image of the run.
    """

    held: tuple[Sample, ...]
    trained: tuple[Sample, ...]
    new: tuple[Sample, ...]
    changed: int
    missing: int
    named: int

    @property
    def known(self) -> bool:
        """Whether any image is from the run."""
        return bool(self.held or self.trained)


def record_of(audit: DataAudit) -> Record:
    """Return the record of a run on these images."""
    parts = (audit.train, audit.val)
    return Record(*(tuple(_entry(audit, sample) for sample in part) if len(part) <= MOST else None for part in parts))


def read_record(data: Mapping[str, Any]) -> Record | None:
    """Return the record in ``Card.data``; None if there is none, as in version 0.1.

    Raises:
        DataError: it is damaged.
    """
    value = data.get("images")
    if value is None:
        return None
    try:
        if not isinstance(value, Mapping):
            raise ValueError("it is not an object")
        return Record(_decode(value.get("train")), _decode(value.get("val")))
    except ValueError as error:
        raise DataError(f"the card's list of the run's images is damaged: {error}; get the pack again") from error


def sort_images(record: Record, audit: DataAudit, samples: Sequence[Sample]) -> ImagesByUse:
    """Return the images of a folder by their use in a run.

    An image is identified by its content, wherever it is. An image of unknown content at the path of a run's image is
    that image, changed, if most images at known paths have their old content: other folders may have files of the same
    names. An image that was in both parts, as two files, is assigned by its path, else to the training part.

    Args:
        record: of the run.
        audit: of the folder, with digests.
        samples: images of it.
    """
    sides = {"held": record.val or (), "trained": record.train or ()}
    contents = {side: {entry.content for entry in entries} for side, entries in sides.items()}
    paths = {side: {entry.path for entry in entries} for side, entries in sides.items()}
    found: dict[str, list[Sample]] = {"held": [], "trained": [], "new": []}
    seen: set[bytes] = set()
    changed = 0
    mine = [_entry(audit, sample) for sample in samples]
    before = {entry.path: entry.content for entries in sides.values() for entry in entries}
    named = [before[entry.path] == entry.content for entry in mine if entry.path in before]
    others = 0
    if 2 * sum(named) < len(named):  # another folder with equal names
        paths, others = {side: set() for side in sides}, len(named) - sum(named)
    for sample, entry in zip(samples, mine, strict=True):
        same = [side for side in sides if entry.content in contents[side]]
        at = [side for side in sides if entry.path in paths[side]]
        if same:
            side = same[0] if len(same) == 1 else at[0] if at else "trained"
        else:
            side = at[0] if at else "new"
            changed += side == "held"
        found[side].append(sample)
        seen |= {entry.content if same else entry.path}
    missing = sum(entry.content not in seen and entry.path not in seen for entry in sides["held"])
    return ImagesByUse(tuple(found["held"]), tuple(found["trained"]), tuple(found["new"]), changed, missing, others)


def same_images(record: Record, audit: DataAudit, samples: Sequence[Sample]) -> bool:
    """Return whether these are exactly the held-out images of the run, at the same paths."""
    return record.val is not None and sorted(record.val) == sorted(_entry(audit, sample) for sample in samples)


def name_below(audit: DataAudit, path: Path) -> str:
    """Return a path below the folder of an audit, with ``/``."""
    return (path.relative_to(audit.folder) if path.is_relative_to(audit.folder) else path).as_posix()


def content_lines(audit: DataAudit) -> Iterable[tuple[str, str, str]]:
    """Yield part, path and digest of every image of a run."""
    for part in ("train", "val"):
        for sample in getattr(audit, part):
            yield part, name_below(audit, sample.path), audit.digests.get(sample.path, "")


def _entry(audit: DataAudit, sample: Sample) -> Entry:
    name = name_below(audit, sample.path).encode("utf-8", "surrogateescape")
    digest = bytes.fromhex(audit.digests.get(sample.path, ""))
    # a file without a digest is identified by its path only
    return Entry(digest[:_CONTENT] or hashlib.sha256(b"\0" + name).digest()[:_CONTENT], _hash(name))


def _hash(name: bytes) -> bytes:
    return hashlib.sha256(name).digest()[:_PATH]


def _encode(entries: Sequence[Entry] | None) -> str | None:
    if entries is None:
        return None
    return base64.b64encode(b"".join(entry.content + entry.path for entry in entries)).decode("ascii")


def _decode(text: Any) -> tuple[Entry, ...] | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError("a part is not text")
    try:
        packed = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("a part is not base64") from error
    size = _CONTENT + _PATH
    if len(packed) % size:
        raise ValueError(f"a part has {len(packed)} bytes, no multiple of {size}")
    return tuple(Entry(packed[i : i + _CONTENT], packed[i + _CONTENT : i + size]) for i in range(0, len(packed), size))

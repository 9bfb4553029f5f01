"""The record of a run's images, by content and by path: later commands take the ones that it held out.

A card holds twelve bytes an image: six of the digest of the file's bytes and six of the hash of its path below the
folder. That tells a million images apart, whatever was added to the folder, moved or renamed since.
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
"""Images of a part that a card lists: over three million characters. Larger parts it does not list."""

_CONTENT = _PATH = 6


class Entry(NamedTuple):
    """An image of a run: first bytes of the digest of its content, and of the hash of its path."""

    content: bytes
    path: bytes


@dataclass(frozen=True)
class Record:
    """The images of a run.

    Attributes:
        train: those it trained on; None where a card does not list them.
        val: those it held out; None where a card does not list them.
    """

    train: tuple[Entry, ...] | None
    val: tuple[Entry, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"train": _encode(self.train), "val": _encode(self.val)}


class Sorted(NamedTuple):
    """Images of a folder, by what a run did with them; the order is that of the folder.

    Attributes:
        held: it held them out.
        trained: it trained on them.
        new: it has not seen them.
        changed: those of ``held`` that it knows by their path only: their content is another.
        missing: how many of those that it held out are not in the folder.
        named: how many of ``new`` lie where it found other images, which says nothing of this folder.
    """

    held: tuple[Sample, ...]
    trained: tuple[Sample, ...]
    new: tuple[Sample, ...]
    changed: int
    missing: int
    named: int

    @property
    def known(self) -> bool:
        """Whether any image is one of the run's."""
        return bool(self.held or self.trained)


def record_of(audit: DataAudit) -> Record:
    """Return the record of a run on these images."""
    parts = (audit.train, audit.val)
    return Record(*(tuple(_entry(audit, sample) for sample in part) if len(part) <= MOST else None for part in parts))


def read_record(data: Mapping[str, Any]) -> Record | None:
    """Return the record in ``Card.data``; None where there is none, as of runs of version 0.1.

    Raises:
        DataError: it is damaged.
    """
    told = data.get("images")
    if told is None:
        return None
    try:
        if not isinstance(told, Mapping):
            raise ValueError("it is no object")
        return Record(_decode(told.get("train")), _decode(told.get("val")))
    except ValueError as error:
        raise DataError(f"the card's list of the run's images is damaged: {error}; take the pack anew") from error


def sort_images(record: Record, audit: DataAudit, samples: Sequence[Sample]) -> Sorted:
    """Say what a run did with the images of a folder.

    An image is known by its content wherever it lies. One of unknown content that lies where the run found an image is
    that image, changed, if most of what lies so has the content that it had: other folders may have files of the same
    names. One that the run both trained on and held out, as two files, is what its path says, else trained on.

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
    if 2 * sum(named) < len(named):  # another folder, whose names say nothing
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
    return Sorted(tuple(found["held"]), tuple(found["trained"]), tuple(found["new"]), changed, missing, others)


def same_images(record: Record, audit: DataAudit, samples: Sequence[Sample]) -> bool:
    """Tell whether these are exactly the images that the run held out, under the paths where they were."""
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
    # a file without a digest is known by its path alone: no content begins with the hash of "path"
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
        raise ValueError("a part is no text")
    try:
        told = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("a part is no base64") from error
    size = _CONTENT + _PATH
    if len(told) % size:
        raise ValueError(f"a part has {len(told)} bytes, no multiple of {size}")
    return tuple(Entry(told[i : i + _CONTENT], told[i + _CONTENT : i + size]) for i in range(0, len(told), size))

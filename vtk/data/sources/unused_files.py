"""Accounts for all unused files of a folder, by reason."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtk.data.decoding.images import open_image
from vtk.text import one_line

LISTED = 100
"""Most names stored of each reason."""

NO_SUFFIX = "no suffix"

_ARCHIVES = frozenset(".zip .tar .gz .tgz .bz2 .tbz2 .xz .txz .zst .7z .rar".split())
_PICTURES = frozenset(
    ".tga .jxl .dcm .dicom .nii .npy .npz .exr .hdr .psd .svg .eps .ico .icns .pcx .dds .raw .dng .cr2 .cr3 .nef .arw "
    ".orf .rw2 .heics .heifs .avifs .j2k .jpx .jpf .j2c .jxr .wdp .qoi .sgi .xbm .xpm .fits .mha .mhd .nrrd .czi "
    ".svs".split()
)
_TRIED = 32
"""Files per suffix whose first bytes are read; if one of them is an image, all are read."""


class UnusedFiles:
    """Unused files, recorded while folders are walked; names are relative to the given folder.

    Attributes:
        hidden: number of hidden and system files, and of files in such folders.
        others: files without an image suffix.
        loose: image files outside class folders.
        special: entries with an image suffix that are not regular files, such as a pipe.
        unused: unused folder → number of files in it.
        links: folders that are links.
    """

    def __init__(self) -> None:
        self.hidden = 0
        self.others: list[str] = []
        self.loose: list[str] = []
        self.special: list[str] = []
        self.unused: dict[str, int] = {}
        self.links: list[str] = []

    def count_hidden(self, path: str, is_folder: bool) -> None:
        """Count a hidden file, or all files in a hidden folder."""
        self.hidden += files_below(path) if is_folder else 1


@dataclass(frozen=True)
class LeftOut:
    """Unused files of a set, by reason.

    Attributes:
        hidden: number of hidden and system files.
        suffixes: suffix → number of files without an image suffix.
        listed: suffix → the first `LISTED` of them.
        pictures: name → format, of those whose content is a readable image.
        loose: number of image files outside class folders; the first `LISTED` are in ``loose_listed``.
        special: entries with an image suffix that are not regular files.
        unused: unused folder → number of files in it.
        merged: number of copies whose labels were merged into another file's.
        links: folders that are links into the same set → their targets.
        lines: reason → number of unused lines of a table.
    """

    hidden: int = 0
    suffixes: Mapping[str, int] = field(default_factory=dict)
    listed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)
    loose: int = 0
    loose_listed: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    unused: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0
    links: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of all unused files."""
        others = sum(sum(counts.values()) for counts in (self.suffixes, self.unused, self.lines))
        return self.hidden + others + self.loose + len(self.special) + self.merged

    def reasons(self) -> dict[str, int]:
        """Return reason → number of unused files; they add up to `total`."""
        found = {"without an image suffix": sum(self.suffixes.values()), "outside class folders": self.loose}
        found |= {"in unused folders": sum(self.unused.values()), "not regular files": len(self.special)}
        found |= {"merged copies": self.merged, "hidden or system files": self.hidden, **self.lines}
        return {reason: count for reason, count in found.items() if count}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "total": self.total,
            "hidden": self.hidden,
            "suffixes": dict(self.suffixes),
            "listed": {suffix: list(names) for suffix, names in self.listed.items()},
            "pictures": dict(self.pictures),
            "loose": self.loose,
            "loose_listed": list(self.loose_listed),
            "special": list(self.special),
            "unused": dict(self.unused),
            "merged": self.merged,
            "links": dict(self.links),
            "lines": dict(self.lines),
        }

    def warnings(self) -> list[str]:
        """Return warnings, one sentence each."""
        found = []
        if self.pictures:
            first, kind = next(iter(self.pictures.items()))
            found.append(
                f"{_files(len(self.pictures))} unused although the content is an image, since the suffix is not: "
                f"{_counts(count_suffixes(self.pictures))}; for example {one_line(first)} ({kind}); rename to use them"
            )
        readable = count_suffixes(self.pictures)
        unread = {suffix: n - readable.get(suffix, 0) for suffix, n in self.suffixes.items() if suffix in _PICTURES}
        if unread := {suffix: n for suffix, n in unread.items() if n}:
            found.append(f"images of unsupported formats: {_counts(unread)}; convert them to PNG or TIFF")
        for link, target in list(self.links.items())[:3]:
            found.append(
                f"{one_line(link)} is a link to {one_line(target)}, whose images are used a second time; remove "
                "it if that is not intended"
            )
        return found

    def notes(self) -> list[str]:
        """Return notes, one sentence each."""
        readable = count_suffixes(self.pictures)
        other = {s: n - readable.get(s, 0) for s, n in self.suffixes.items() if s not in _PICTURES}
        other = {suffix: count for suffix, count in other.items() if count}
        found = [f"unused, without an image suffix: {_counts(other)}"] if other else []
        if archives := {suffix: count for suffix, count in other.items() if suffix in _ARCHIVES}:
            found.append(f"archives are not read: {_counts(archives)}")
        return found


def summarize(rest: UnusedFiles, root: Path, merged: int = 0) -> LeftOut:
    """Return the unused files by reason; the first bytes of files without an image suffix are read."""
    by_suffix: dict[str, list[str]] = {}
    for name in rest.others:
        by_suffix.setdefault(suffix_of(name), []).append(name)
    by_suffix = dict(sorted(by_suffix.items(), key=lambda item: -len(item[1])))
    pictures: dict[str, str] = {}
    for names in by_suffix.values():
        found = {name: kind for name in names[:_TRIED] if (kind := format_of(root / name))}
        if found:
            found |= {name: kind for name in names[_TRIED:] if (kind := format_of(root / name))}
        pictures |= found
    return LeftOut(
        hidden=rest.hidden,
        suffixes={suffix: len(names) for suffix, names in by_suffix.items()},
        listed={suffix: tuple(names[:LISTED]) for suffix, names in by_suffix.items()},
        pictures=pictures,
        loose=len(rest.loose),
        loose_listed=tuple(rest.loose[:LISTED]),
        special=tuple(rest.special),
        unused=dict(rest.unused),
        merged=merged,
        links=_inner_links(root, rest.links),
    )


def _inner_links(root: Path, links: list[str]) -> dict[str, str]:
    """Return the links into the same folder with their targets; other targets are not in the set twice."""
    real, found = os.path.realpath(root), {}
    for link in links:
        target = os.path.realpath(root / link)
        if target == real or target.startswith(real + os.sep):
            found[link] = os.path.relpath(target, real).replace(os.sep, "/")
    return found


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name in lower case, or `NO_SUFFIX`."""
    return os.path.splitext(name)[1].lower() or NO_SUFFIX


def count_suffixes(names: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of names with each suffix."""
    counts: dict[str, int] = {}
    for name in names:
        counts[suffix_of(name)] = counts.get(suffix_of(name), 0) + 1
    return counts


def files_below(folder: str) -> int:
    """Return the number of files in a folder at any depth, without following links."""
    return sum(len(names) for _, _, names in os.walk(folder))


def format_of(path: Path) -> str:
    """Return the format of a file that is a readable image; empty for other files."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        with path.open("rb") as file:
            start = file.read(16)
        if not _looks_like_image(start):
            return ""
        with open_image(path) as image:
            return image.format or ""
    except Exception:  # whatever a decoder raises: not a readable image
        return ""


def _looks_like_image(start: bytes) -> bool:
    known = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ")
    return start.startswith(known) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP") or start[4:12] == b"ftypavif"


def _counts(counts: Mapping[str, int], limit: int = 8) -> str:
    shown = ", ".join(f"{one_line(suffix)} {count:,}" for suffix, count in list(counts.items())[:limit])
    more = sum(list(counts.values())[limit:])
    return f"{shown} and {more:,} of other names" if more else shown


def _files(count: int) -> str:
    return f"{count} file is" if count == 1 else f"{count} files are"

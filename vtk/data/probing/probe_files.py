"""Probes all files of a set, reusing earlier scans, and summarises the probes."""

import functools
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from vtk import console
from vtk.card import InputSpec
from vtk.data.decoding.images import TooLargeError, reason
from vtk.data.decoding.rules import Rules
from vtk.data.decoding.thin_images import NOMINAL, check_enlarged
from vtk.data.probing import cache as memory
from vtk.data.probing.fingerprint import fingerprints
from vtk.data.probing.pool import probe_many
from vtk.data.probing.probe import EMPTY, Probe, content_digest
from vtk.data.sources.listing import ImageFile
from vtk.errors import DataError
from vtk.text import one_line

Look = Literal["decode", "read", "list"]
"""How files are read: decoded; only their bytes, for digests; or only listed."""


def probe_files(
    root: Path,
    files: Sequence[ImageFile],
    workers: int | None,
    cache: bool,
    show_progress: bool,
    in_chans: int,
    max_pixels: int,
    look: Look = "decode",
    spec: InputSpec = NOMINAL,
    rules: Rules = "srgb",
) -> tuple[dict[str, Probe], int]:
    """Return the probe of every file, and the number of those from the cache; arguments as of `vtk.data.scan`."""
    if look == "list":
        return {file.name: EMPTY for file in files}, 0
    known = memory.load(root, in_chans, rules) if cache else {}
    probes: dict[str, Probe] = {}
    new: list[ImageFile] = []
    for file in files:
        found, probe = known.get(file.name, (None, EMPTY))
        if found == file and probe.width * probe.height <= max_pixels:
            probes[file.name] = probe
        else:
            new.append(file)
            probes[file.name] = EMPTY  # keeps the order
    if look == "read":
        probes |= {file.name: _read(os.path.join(root, file.name)) for file in new}
        return probes, len(files) - len(new)
    with console.progress("scan", len(new), unit="files", enabled=show_progress) as bar:
        paths = [os.path.join(root, file.name) for file in new]
        results = probe_many(
            paths, sum(file.bytes for file in new), in_chans=in_chans, max_pixels=max_pixels, rules=rules,
            workers=workers, on_done=bar.advance,
        )  # fmt: skip
    looks = fingerprints([probe.looks for probe in results])
    results = [probe._replace(looks=look) for probe, look in zip(results, looks, strict=True)]
    probes.update(zip((file.name for file in new), results, strict=True))
    if cache and (new or len(known) > len(probes)):
        memory.save(root, files, probes, in_chans, rules)
    # not cached: this depends on the model's input
    faults: dict[tuple[int, int], str] = {}  # many images have one size
    return {name: _enlarged(probe, spec, faults) for name, probe in probes.items()}, len(files) - len(new)


def _enlarged(probe: Probe, spec: InputSpec, faults: dict[tuple[int, int], str]) -> Probe:
    """Return the probe, marked bad if the image would become too large; ``faults`` caches the reason by size."""
    if probe.bad or not probe.mode:
        return probe
    size = probe.height, probe.width
    if size not in faults:
        faults[size] = ""
        try:
            check_enlarged(spec, *size)
        except TooLargeError as error:
            faults[size] = str(error)
    if faults[size]:
        return Probe(0, 0, "", 1, faults[size], probe.digest)
    return probe


def _read(path: str) -> Probe:
    """Return the probe of a file that is not decoded, with the digest of its bytes."""
    try:
        return EMPTY._replace(digest=content_digest(path))
    except OSError as error:
        return EMPTY._replace(bad=reason(error, path))


def modes_of(probes: Sequence[Probe]) -> dict[str, int]:
    """Return Pillow mode → number of the good images that were decoded, the most frequent first."""
    return dict(Counter(probe.mode for probe in probes if probe.mode).most_common())


class Digests(Mapping[Path, str]):
    """The digest of each good file's bytes, by its path; built on first use, since not every command needs it.

    Building the paths costs more than loading an earlier scan.
    """

    def __init__(self, root: Path, probes: Mapping[str, Probe]) -> None:
        self.root, self.probes = root, probes

    @functools.cached_property
    def _found(self) -> dict[Path, str]:
        return {self.root / name: probe.digest for name, probe in self.probes.items() if not probe.bad}

    def __getitem__(self, path: Path) -> str:
        return self._found[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def refuse_bad(root: Path, probes: Mapping[str, Probe]) -> None:
    """Refuse a set with unreadable files.

    Raises:
        DataError: there are unreadable files; the message counts them and names the first.
    """
    if bad := sum(bool(probe.bad) for probe in probes.values()):
        raise DataError(
            f"{root}: {bad} of {len(probes)} image files cannot be read, and --on-bad-image is fail; "
            f"{first_bad(probes)}; `vtk data audit` lists all of them"
        )


def first_bad(probes: Mapping[str, Probe]) -> str:
    """Return the first unreadable file and the reason, for a message; there must be one."""
    name, probe = next((name, probe) for name, probe in probes.items() if probe.bad)
    return f"for example {one_line(name)}: {probe.bad}"


def sizes_of(probes: Sequence[Probe]) -> dict[str, int]:
    """Return ``min|median|max_height|width`` of the good images that were decoded, in pixels."""
    probes = [probe for probe in probes if probe.mode]
    if not probes:
        return {}
    sizes: dict[str, int] = {}
    for side in ("height", "width"):
        values = [getattr(probe, side) for probe in probes]
        sizes |= {
            f"min_{side}": min(values),
            f"median_{side}": int(statistics.median_low(values)),
            f"max_{side}": max(values),
        }
    return sizes

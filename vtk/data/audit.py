"""The look at the data before training: every file decoded once, classes and split decided, everything odd named."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtk import console
from vtk.data import cache as memory
from vtk.data.layout import EXPECTED, Files, Layout, collect, find_layout, split
from vtk.data.listing import Found, natural
from vtk.data.pool import probe_many
from vtk.data.probe import Probe
from vtk.data.samples import BadFile, DataAudit, Sample
from vtk.errors import DataError, UsageError

__all__ = ["BadFile", "DataAudit", "Sample", "scan"]

_UNKNOWN = Probe(0, 0, "", 1)


def scan(
    root: Path,
    *,
    val_split: float = 0.2,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    workers: int | None = None,
    cache: bool = True,
    show_progress: bool = True,
) -> DataAudit:
    """Decode every image below ``root`` once and say what is there.

    Args:
        root: ``train/`` + ``val/`` (or ``validation/``, ``valid/``, ``test/``), or class folders.
        val_split: fraction of each class held out where the folder itself does not say.
        seed: of that division.
        classes: names in index order, when a trained model has them already; by default the folders of the training
            part, naturally sorted.
        workers: processes that decode; None for one per CPU, 0 for this process.
        cache: remember what was decoded (`vtk.data.cache`); a file is decoded again when its size or time changes.
        show_progress: draw a progress bar.

    Raises:
        DataError: no images, no layout that is known, a class without a readable training image, or a folder that is
            not a known class.
        UsageError: ``val_split`` is not in [0, 1).
    """
    start = time.perf_counter()
    if not 0 <= val_split < 1:
        raise UsageError(f"`--val-split` is {val_split}; give 0 (hold out nothing) or more, below 1")
    root = Path(root)
    layout = find_layout(root, classes)
    notes = list(layout.notes)
    train = collect(root, layout.train, notes) if layout.train else {}
    val = collect(root, layout.val, notes) if layout.val else {}
    names = _class_names(layout, train, val, classes)
    labels = {name: i for i, name in enumerate(names)}
    probes, cached = _probe(root, [*_flatten(train), *_flatten(val)], workers, cache, show_progress)

    train_samples, val_samples = _good(root, train, labels, probes), _good(root, val, labels, probes)
    if classes is None:
        _check_classes(layout, names, train, train_samples)
    if layout.kind == "flat" and layout.train:
        train_samples, val_samples = _split(layout.train, train_samples, val_split, seed)
        notes.insert(0, _split_note(layout.train, train_samples, val_samples, val_split, seed))
    if not train_samples and not val_samples:
        raise DataError(f"{root}: none of its {len(probes)} image files can be read; {_first_bad(probes)}")
    if layout.val and not val_samples:
        raise DataError(f"{layout.val}: none of its image files can be read; {_first_bad(probes)}")
    if val_samples and (absent := [names[i] for i in sorted(set(labels.values()) - {s.label for s in val_samples})]):
        notes.append(f"no held-out images of: {_some(absent)}")
    good = [probe for probe in probes.values() if not probe.bad]
    return DataAudit(
        root=root,
        layout=layout.kind,
        classes=names,
        train=tuple(train_samples),
        val=tuple(val_samples),
        bad=tuple(BadFile(root / name, probe.bad) for name, probe in probes.items() if probe.bad),
        sizes=_sizes(good),
        modes=dict(Counter(probe.mode for probe in good).most_common()),
        exif_rotated=sum(probe.orientation != 1 for probe in good),
        notes=tuple(notes),
        val_split=val_split,
        seed=seed,
        seconds=time.perf_counter() - start,
        cached=cached,
    )


def _class_names(layout: Layout, train: Files, val: Files, classes: Sequence[str] | None) -> tuple[str, ...]:
    if not train and not val:
        raise DataError(f"{layout.train or layout.val} has folders, but no image files in them; {EXPECTED}")
    if classes is not None:
        known = tuple(classes)
        if unknown := natural({*train, *val} - set(known)):
            raise DataError(
                f"{layout.train or layout.val} has folders that are not classes of the model: {_some(unknown)}; "
                f"it knows {_some(known, 20)}"
            )
        return known
    if unknown := natural(set(val) - set(train)):
        raise DataError(
            f"{layout.val} has classes that {layout.train} has not: {_some(unknown)}; move or rename those folders"
        )
    if len(train) < 2:
        raise DataError(f"{layout.train} has images of one class only ({_some(list(train))}); {EXPECTED}")
    return tuple(natural(train))


def _probe(
    root: Path, files: Sequence[Found], workers: int | None, cache: bool, show_progress: bool
) -> tuple[dict[str, Probe], int]:
    """Return what is known of every file, and for how many an earlier scan told it."""
    known = memory.load(root) if cache else {}
    probes: dict[str, Probe] = {}
    new: list[Found] = []
    for file in files:
        size, mtime, probe = known.get(file.name, (-1, -1, _UNKNOWN))
        if (size, mtime) == (file.bytes, file.mtime_ns):
            probes[file.name] = probe
        else:
            new.append(file)
            probes[file.name] = _UNKNOWN  # keeps the order of the walk
    with console.progress("scan", len(new), unit="files", enabled=show_progress) as bar:
        paths = [os.path.join(root, file.name) for file in new]
        results = probe_many(paths, sum(file.bytes for file in new), workers=workers, on_done=bar.advance)
    probes.update(zip((file.name for file in new), results, strict=True))
    if cache and (new or len(known) > len(probes)):
        memory.save(root, files, probes)
    return probes, len(files) - len(new)


def _flatten(files: Files) -> list[Found]:
    return [file for of_class in files.values() for file in of_class]


def _good(root: Path, files: Files, labels: Mapping[str, int], probes: Mapping[str, Probe]) -> list[Sample]:
    return [
        Sample(root / file.name, labels[name])
        for name in sorted(files, key=labels.__getitem__)
        for file in files[name]
        if not probes[file.name].bad
    ]


def _check_classes(layout: Layout, names: Sequence[str], train: Files, samples: Sequence[Sample]) -> None:
    present = {sample.label for sample in samples}
    if lost := [name for i, name in enumerate(names) if i not in present]:
        raise DataError(
            f"{layout.train}: no image of the class {lost[0]} can be read ({len(train[lost[0]])} tried); "
            "repair or remove that folder"
        )


def _split(folder: Path, samples: Sequence[Sample], fraction: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    by_class: dict[int, list[Sample]] = {}
    for sample in samples:
        by_class.setdefault(sample.label, []).append(sample)
    prefix = len(folder.parts)
    train: list[Sample] = []
    val: list[Sample] = []
    for of_class in by_class.values():
        names = ["/".join(sample.path.parts[prefix:]) for sample in of_class]
        kept, held_out = split(of_class, names, fraction, seed)
        train += kept
        val += held_out
    return train, val


def _split_note(folder: Path, train: Sequence[Sample], val: Sequence[Sample], fraction: float, seed: int) -> str:
    if not fraction:
        return f"{folder} has no held-out part, and none was split off (--val-split 0)"
    return (
        f"{folder} has no held-out part: {len(val)} of {len(train) + len(val)} images were split off, "
        f"class by class (--val-split {fraction:g}, seed {seed})"
    )


def _sizes(probes: Sequence[Probe]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for side in ("height", "width"):
        values = [getattr(probe, side) for probe in probes]
        sizes |= {
            f"min_{side}": min(values),
            f"median_{side}": int(statistics.median_low(values)),
            f"max_{side}": max(values),
        }
    return sizes


def _first_bad(probes: Mapping[str, Probe]) -> str:
    name, probe = next((name, probe) for name, probe in probes.items() if probe.bad)
    return f"for example {name}: {probe.bad}"


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

"""Scans a set of images before training: decodes every file once and decides classes and held-out part."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtk.card import InputSpec
from vtk.data.audit.copies import find_copies
from vtk.data.audit.result import BadFile, DataAudit, Sample
from vtk.data.audit.split import Named, divide
from vtk.data.audit.unusual import find_unusual
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.decoding.rules import Decoding
from vtk.data.decoding.thin_images import NOMINAL
from vtk.data.probing.probe import Probe
from vtk.data.probing.probe_files import Digests, Look, first_bad, modes_of, probe_files, refuse_bad, sizes_of
from vtk.data.sources.image_set import read_image_set
from vtk.data.sources.layout import EXPECTED, Files, ImageSet, Layout
from vtk.data.sources.listing import ImageFile, natural
from vtk.data.sources.table import separator_of
from vtk.data.sources.timm_datasets import fetch, is_named
from vtk.data.value_range.choice import RangeChoice, choose_scan_range
from vtk.data.value_range.limits import parse_option
from vtk.errors import DataError, UsageError
from vtk.text import one_line

__all__ = ["BadFile", "DataAudit", "Sample", "scan"]


def scan(
    root: Path,
    *,
    val_split: float = 0.2,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    on_bad_image: str = "skip",
    on_leak: str = "warn",
    keep_empty_classes: bool = False,
    in_chans: int = 3,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    cache: bool = True,
    show_progress: bool = True,
    look: Look = "decode",
    together: bool = True,
    field_separator: str | None = None,
    spec: InputSpec = NOMINAL,
    value_range: Sequence[str] = (),
    decoding: Decoding | None = None,
) -> DataAudit:
    """Decode every image below ``root`` once and return the audit.

    Args:
        root: ``train/`` + ``val/`` (or ``validation/``, ``valid/``, ``test/``), or class folders; or a table of labels
            (`vtk.data.sources.single_label_table`); or a data set of timm's readers such as ``torch/cifar10``
            (`vtk.data.sources.timm_datasets`).
        val_split: fraction of each class held out where the folder itself does not say.
        seed: random seed of that split.
        classes: class names of a trained model, in index order; by default the folders of the training part,
            naturally sorted.
        on_bad_image: ``skip`` leaves out unreadable images and reports them; ``fail`` raises an error.
        on_leak: on held-out images that are byte-identical to training images: ``warn`` or ``fail``.
        keep_empty_classes: keep classes that have no (readable) images.
        in_chans: channels of the model's input, which each file must provide (`vtk.data.decoding.bands`).
        max_pixels: largest image (width × height); a larger one is unreadable.
        workers: processes that decode; None for one per CPU, 0 for this process.
        cache: reuse and store the results; a file is decoded again when its size or times change.
        show_progress: draw a progress bar.
        look: how much of each file is read (`Look`); without decoding, unreadable files are found only when they are
            used, and sizes and modes are unknown.
        together: keep copies of one image in one part of a split made here; version 0.1 did not.
        field_separator: of a table's columns, by name (comma, semicolon, tab) or the character; None: detected.
        spec: the model's input; an image too thin for it is unreadable (`vtk.data.decoding.thin_images`).
        value_range: LOW and HIGH of images of more than 8 bits, as for ``--value-range``; by default chosen from the
            images (`vtk.data.value_range`).
        decoding: rules and value range of a trained model; None for a new one.

    Raises:
        DataError: no images, unknown layout, a class without a readable training image, a folder that is not a known
            class, unreadable files with ``on_bad_image="fail"``, or leaks with ``on_leak="fail"``.
        UsageError: ``val_split`` is not in [0, 1), or another value is out of range.
    """
    parse_option(value_range)
    start = time.perf_counter()
    if not 0 <= val_split < 1:
        raise UsageError(f"`--val-split` is {val_split}; allowed is at least 0 (no held-out part) and below 1")
    if on_bad_image not in ("skip", "fail"):
        raise UsageError(f"`--on-bad-image` is {on_bad_image}; allowed is skip or fail")
    if on_leak not in ("warn", "fail"):
        raise UsageError(f"`--on-leak` is {on_leak}; allowed is warn or fail")
    if max_pixels < 1 or in_chans < 1:
        raise UsageError(f"`--max-pixels` is {max_pixels} and `--in-chans` {in_chans}; allowed is at least 1")
    root = fetch(root) if is_named(root := Path(root)) else root
    image_set = read_image_set(root, classes, keep_empty=keep_empty_classes, separator=separator_of(field_separator))
    base, layout, parts = image_set.base, image_set.layout, image_set.parts
    notes, warnings = [*layout.notes, *image_set.notes, *image_set.left.notes()], list(layout.warnings)
    train, val = (part.files for part in parts)
    warnings += [text for part in parts for text in part.warnings]
    warnings += image_set.left.warnings()
    names = _class_names(image_set, classes)
    if (empty := parts[0].empty) and classes is None:
        warnings.append(_empty_note(image_set, empty, keep_empty_classes))
    labels = {name: i for i, name in enumerate(names)}
    probes, cached = probe_files(
        base, [*_flatten(train), *_flatten(val)], workers, cache, show_progress, in_chans, max_pixels, look, spec,
        decoding.rules if decoding else "srgb",
    )  # fmt: skip
    if on_bad_image == "fail":
        refuse_bad(root, probes)

    train_named, val_named = _good(train, labels, probes), _good(val, labels, probes)
    if classes is None and not keep_empty_classes:
        _check_classes(layout, names, train, train_named, probes)
    if layout.kind == "flat" and layout.train:
        prefix = f"{layout.train.relative_to(base).as_posix()}/" if layout.train not in (base, image_set.table) else ""
        train_named, val_named = divide(train_named, probes, prefix, val_split, seed, together=together)
        notes.insert(0, _split_note(layout.train, len(train_named), len(val_named), val_split, seed))
    train_samples, val_samples = ([Sample(base / n, label) for n, label in of] for of in (train_named, val_named))
    if not train_samples and not val_samples:
        raise DataError(f"{root}: none of its {len(probes)} image files can be read, {first_bad(probes)}")
    if layout.val and not val_samples:
        raise DataError(f"{layout.val}: none of its image files can be read, {first_bad(probes)}")
    if val_samples and (absent := [names[i] for i in sorted(set(labels.values()) - {s.label for s in val_samples})]):
        notes.append(f"classes without held-out images: {_some(absent)}")
    parts_named = {"train": train_named, "val": val_named}
    classed = {part: [(name, names[label]) for name, label in of] for part, of in parts_named.items()}
    copies = find_copies(base, classed, probes)
    if on_leak == "fail":
        copies.refuse_leaks(root)
    found = choose_scan_range(probes, decoding, value_range, in_chans)
    return DataAudit(
        root=root,
        layout=layout.kind,
        classes=names,
        train=tuple(train_samples),
        val=tuple(val_samples),
        notes=(*notes, *found.notes, *copies.notes()),
        warnings=(*warnings, *found.warnings, *copies.warnings()),
        odd=find_unusual(
            (f.name, of, probes[f.name]) for part in (train, val) for of, files in part.items() for f in files
        ),
        val_split=val_split,
        seed=seed,
        max_pixels=max_pixels,
        seconds=time.perf_counter() - start,
        cached=cached,
        copies=copies,
        left=image_set.left,
        **probe_facts(base, probes, found),
    )


def probe_facts(root: Path, probes: Mapping[str, Probe], chosen: RangeChoice) -> dict[str, Any]:
    """Return the arguments of `DataAudit` that follow from the probes and the value range."""
    good = [probe for probe in probes.values() if not probe.bad]
    return {
        "bad": tuple(BadFile(root / name, probe.bad) for name, probe in probes.items() if probe.bad),
        "sizes": sizes_of(good),
        "modes": modes_of(good),
        "exif_rotated": sum(probe.orientation != 1 for probe in good),
        "digests": Digests(root, probes),
        "decoding": chosen.decoding,
        "values": chosen.facts,
        "colors": chosen.colors,
    }


def _class_names(image_set: ImageSet, classes: Sequence[str] | None) -> tuple[str, ...]:
    layout, parts = image_set.layout, image_set.parts
    train, val = (part.files for part in parts)
    if not any(train.values()) and not any(val.values()):
        raise DataError(f"{layout.train or layout.val} has folders but no image files in them; {EXPECTED}")
    if classes is not None:
        known = tuple(classes)
        if unknown := natural({*train, *val} - set(known)):
            what = "folders" if image_set.table is None else "labels"
            raise DataError(
                f"{layout.train or layout.val} has {what} that are not classes of the model: {_some(unknown)}; its "
                f"classes are {_some(known, 20)}"
            )
        return known
    unknown = natural(set(val) - set(train))
    if unknown and image_set.table is not None:
        raise DataError(
            f"{image_set.table} has held-out images of classes without training images: {_some(unknown)}; put some "
            "into train"
        )
    if unknown:
        has_empty = set(unknown) & set(parts[0].empty)
        do = "fill those folders, or give --keep-empty-classes" if has_empty else "move or rename those folders"
        raise DataError(f"{layout.val} has classes that are not in {layout.train}: {_some(unknown)}; {do}")
    if len(train) < 2:
        expected = EXPECTED if image_set.table is None else "give images of two or more classes"
        raise DataError(f"{layout.train} has images of only one class ({_some(list(train))}); {expected}")
    return tuple(natural(train))


def _empty_note(image_set: ImageSet, empty: Sequence[str], kept: bool) -> str:
    assert image_set.layout.train is not None
    name, have = image_set.layout.train.name, "has" if len(empty) == 1 else "have"
    if image_set.table is None:
        found = f"{_some([f'{each}/' for each in empty])} in {name}/ {have} no image files"
    else:
        found = f"{_some(empty)} in {name} {have} no images"
    if kept:
        return f"{found}: these classes cannot be learnt"
    return f"{found}; empty classes are dropped (--keep-empty-classes keeps them)"


def _flatten(files: Files) -> list[ImageFile]:
    return [file for of_class in files.values() for file in of_class]


def _good(files: Files, labels: Mapping[str, int], probes: Mapping[str, Probe]) -> list[Named]:
    return [
        (file.name, labels[name])
        for name in sorted(files, key=labels.__getitem__)
        for file in files[name]
        if not probes[file.name].bad
    ]


def _check_classes(
    layout: Layout, names: Sequence[str], train: Files, images: Sequence[Named], probes: Mapping[str, Probe]
) -> None:
    present = {label for _, label in images}
    if missing := [name for i, name in enumerate(names) if i not in present]:
        of_class = {file.name: probes[file.name] for file in train[missing[0]]}
        raise DataError(
            f"{layout.train}: no image of the class {missing[0]} can be read ({len(of_class)} files, "
            f"{first_bad(of_class)}); repair the files, or remove "
            f"{'that folder' if layout.train and layout.train.is_dir() else 'its lines'}"
        )


def _split_note(folder: Path, train: int, val: int, fraction: float, seed: int) -> str:
    if not fraction:
        return f"{folder} has no held-out part, and --val-split is 0: no images are held out"
    return (
        f"{folder} has no held-out part: {val} of {train + val} images are held out, "
        f"stratified by class (--val-split {fraction:g}, seed {seed})"
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(map(one_line, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")

"""The look at the data before training: every file decoded once, classes and split decided, everything odd named."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtk.card import InputSpec
from vtk.data.audit.copies import find_copies
from vtk.data.audit.result import BadFile, DataAudit, Sample
from vtk.data.audit.split import Named, divide
from vtk.data.audit.unusual import find_odd
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.decoding.rules import Decoding
from vtk.data.decoding.thin_images import NOMINAL
from vtk.data.probing.probe import Probe
from vtk.data.probing.probe_files import Digests, Look, first_bad, modes_of, probe_files, refuse_bad, sizes_of
from vtk.data.sources.image_set import gather
from vtk.data.sources.layout import EXPECTED, Files, ImageSet, Layout
from vtk.data.sources.listing import Found, natural
from vtk.data.sources.table import separator_of
from vtk.data.sources.timm_datasets import fetch, is_named
from vtk.data.value_range.choice import choose_scan_range
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
    """Decode every image below ``root`` once and say what is there.

    Args:
        root: ``train/`` + ``val/`` (or ``validation/``, ``valid/``, ``test/``), or class folders; or a table of labels
            (`vtk.data.sources.single_label_table`); or a data set of timm's readers such as ``torch/cifar10``
            (`vtk.data.sources.timm_datasets`).
        val_split: fraction of each class held out where the folder itself does not say.
        seed: of that division.
        classes: names in index order, when a trained model has them already; by default the folders of the training
            part, naturally sorted.
        on_bad_image: ``skip`` leaves out what cannot be read and names it; ``fail`` stops.
        on_leak: ``warn`` of held-out images whose bytes are in the training part, too; ``fail`` stops.
        keep_empty_classes: make classes of folders without (readable) images, too.
        in_chans: channels of the model's input, which a file must be able to fill (`vtk.data.decoding.bands`).
        max_pixels: a larger image, width × height, is a bad one.
        workers: processes that decode; None for one per CPU, 0 for this process.
        cache: remember what was decoded; a file is decoded again when its size or time changes.
        show_progress: draw a progress bar.
        look: how closely files are looked at (`Look`); without decoding, those that cannot be read
            are found only where they are used, and neither sizes nor modes are known.
        together: copies of one image come to one side where a folder is divided here; version 0.1 did not do that.
        field_separator: of a table's columns, by name (comma, semicolon, tab) or as it is; None to find it.
        spec: of the input; an image that it cannot be made of is a bad one (`vtk.data.decoding.thin_images`).
        value_range: LOW and HIGH of images of more than 8 bits, as ``--value-range`` takes them; by default settled
            here (`vtk.data.value_range`).
        decoding: of a trained model, which settles nothing anew; None for a new one.

    Raises:
        DataError: no images, no layout that is known, a class without a readable training image, a folder that is not
            a known class, bad files with ``on_bad_image="fail"``, or leaks with ``on_leak="fail"``.
        UsageError: ``val_split`` is not in [0, 1), or another value is out of range.
    """
    parse_option(value_range)
    start = time.perf_counter()
    if not 0 <= val_split < 1:
        raise UsageError(f"`--val-split` is {val_split}; give 0 (hold out nothing) or more, below 1")
    if on_bad_image not in ("skip", "fail"):
        raise UsageError(f"`--on-bad-image` {on_bad_image} is not known; give skip or fail")
    if on_leak not in ("warn", "fail"):
        raise UsageError(f"`--on-leak` {on_leak} is not known; give warn or fail")
    if max_pixels < 1 or in_chans < 1:
        raise UsageError(f"`--max-pixels` is {max_pixels} and `--in-chans` {in_chans}; both are at least 1")
    root = fetch(root) if is_named(root := Path(root)) else root
    gathered = gather(root, classes, keep_empty=keep_empty_classes, separator=separator_of(field_separator))
    base, layout, parts = gathered.base, gathered.layout, gathered.parts
    notes, warnings = [*layout.notes, *gathered.notes, *gathered.left.notes()], list(layout.warnings)
    train, val = (part.files for part in parts)
    warnings += [text for part in parts for text in part.warnings]
    warnings += gathered.left.warnings()
    names = _class_names(gathered, classes)
    if (empty := parts[0].empty) and classes is None:
        warnings.append(_empty_note(gathered, empty, keep_empty_classes))
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
        prefix = f"{layout.train.relative_to(base).as_posix()}/" if layout.train not in (base, gathered.table) else ""
        train_named, val_named = divide(train_named, probes, prefix, val_split, seed, together=together)
        notes.insert(0, _split_note(layout.train, len(train_named), len(val_named), val_split, seed))
    train_samples, val_samples = ([Sample(base / n, label) for n, label in of] for of in (train_named, val_named))
    if not train_samples and not val_samples:
        raise DataError(f"{root}: none of its {len(probes)} image files can be read; {first_bad(probes)}")
    if layout.val and not val_samples:
        raise DataError(f"{layout.val}: none of its image files can be read; {first_bad(probes)}")
    if val_samples and (absent := [names[i] for i in sorted(set(labels.values()) - {s.label for s in val_samples})]):
        notes.append(f"no held-out images of: {_some(absent)}")
    parts_named = {"train": train_named, "val": val_named}
    classed = {part: [(name, names[label]) for name, label in of] for part, of in parts_named.items()}
    copies = find_copies(base, classed, probes)
    if on_leak == "fail":
        copies.refuse_leaks(root)
    good = [probe for probe in probes.values() if not probe.bad]
    found = choose_scan_range(probes, decoding, value_range, in_chans)
    return DataAudit(
        root=root,
        layout=layout.kind,
        classes=names,
        train=tuple(train_samples),
        val=tuple(val_samples),
        bad=tuple(BadFile(base / name, probe.bad) for name, probe in probes.items() if probe.bad),
        sizes=sizes_of(good),
        modes=modes_of(good),
        exif_rotated=sum(probe.orientation != 1 for probe in good),
        notes=(*notes, *found.notes, *copies.notes()),
        warnings=(*warnings, *found.warnings, *copies.warnings()),
        odd=find_odd(
            (f.name, of, probes[f.name]) for part in (train, val) for of, files in part.items() for f in files
        ),
        val_split=val_split,
        seed=seed,
        max_pixels=max_pixels,
        seconds=time.perf_counter() - start,
        cached=cached,
        digests=Digests(base, probes),
        copies=copies,
        left=gathered.left,
        decoding=found.decoding,
        values=found.facts,
        colors=found.colors,
    )


def _class_names(gathered: ImageSet, classes: Sequence[str] | None) -> tuple[str, ...]:
    layout, parts = gathered.layout, gathered.parts
    train, val = (part.files for part in parts)
    if not any(train.values()) and not any(val.values()):
        raise DataError(f"{layout.train or layout.val} has folders, but no image files in them; {EXPECTED}")
    if classes is not None:
        known = tuple(classes)
        if unknown := natural({*train, *val} - set(known)):
            what = "folders that are not classes" if gathered.table is None else "labels that are not classes"
            raise DataError(
                f"{layout.train or layout.val} has {what} of the model: {_some(unknown)}; it knows {_some(known, 20)}"
            )
        return known
    unknown = natural(set(val) - set(train))
    if unknown and gathered.table is not None:
        raise DataError(
            f"{gathered.table} holds out images of classes that no training image has: {_some(unknown)}; put some into "
            "train"
        )
    if unknown:
        lost = set(unknown) & set(parts[0].empty)
        do = "fill those folders, or give --keep-empty-classes" if lost else "move or rename those folders"
        raise DataError(f"{layout.val} has classes that {layout.train} has not: {_some(unknown)}; {do}")
    if len(train) < 2:
        expected = EXPECTED if gathered.table is None else "give images of two or more"
        raise DataError(f"{layout.train} has images of one class only ({_some(list(train))}); {expected}")
    return tuple(natural(train))


def _empty_note(gathered: ImageSet, empty: Sequence[str], kept: bool) -> str:
    assert gathered.layout.train is not None
    name, have = gathered.layout.train.name, "has" if len(empty) == 1 else "have"
    if gathered.table is None:
        found = f"{_some([f'{each}/' for each in empty])} in {name}/ {have} no image files"
    else:
        found = f"{_some(empty)} in {name} {have} no images"
    if kept:
        return f"{found}: a class that cannot be learnt"
    return f"{found}, so no class is made of it (--keep-empty-classes makes one)"


def _flatten(files: Files) -> list[Found]:
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
    if lost := [name for i, name in enumerate(names) if i not in present]:
        tried = {file.name: probes[file.name] for file in train[lost[0]]}
        raise DataError(
            f"{layout.train}: no image of the class {lost[0]} can be read ({len(tried)} tried; {first_bad(tried)}); "
            f"repair or remove {'that folder' if layout.train and layout.train.is_dir() else 'its lines'}"
        )


def _split_note(folder: Path, train: int, val: int, fraction: float, seed: int) -> str:
    if not fraction:
        return f"{folder} has no held-out part, and none was split off (--val-split 0)"
    return (
        f"{folder} has no held-out part: {val} of {train + val} images were split off, "
        f"class by class (--val-split {fraction:g}, seed {seed})"
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(map(one_line, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")

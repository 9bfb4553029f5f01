"""Reads the images of a pre-training run: all below a folder, or class folders for labelled methods."""

import time
from collections.abc import Sequence
from pathlib import Path

from vtk.card import InputSpec
from vtk.data.audit.copies import find_copies
from vtk.data.audit.folder_scan import scan
from vtk.data.audit.result import BadFile, DataAudit, Sample
from vtk.data.audit.split import divide
from vtk.data.decoding.rules import Decoding
from vtk.data.probing.probe_files import Digests, first_bad, modes_of, probe_files, refuse_bad, sizes_of
from vtk.data.sources.layout import TRAIN_NAMES, VAL_NAMES
from vtk.data.sources.listing import ImageFile, folders, note_unused, walk
from vtk.data.sources.timm_datasets import fetch, is_named
from vtk.data.sources.unused_files import UnusedFiles, summarize
from vtk.data.value_range.choice import choose_scan_range
from vtk.data.value_range.limits import parse_option
from vtk.errors import DataError
from vtk.training.pretrain.config import PretrainConfig

_LEAST = 4
"""Minimum number of images, one of which is held out."""


def read_images(
    config: PretrainConfig, spec: InputSpec, *, labelled: bool, show_progress: bool, decoding: Decoding | None = None
) -> DataAudit:
    """Scan the images of a run; ``decoding`` is that of a resumed run of version 0.1.

    Raises:
        DataError: the folder is absent, or too few of its images can be read; of a labelled run, see `vtk.data.scan`.
    """
    assert config.data is not None
    if labelled:
        audit = scan(
            config.data, val_split=config.val_split, seed=config.seed, workers=config.workers,
            show_progress=show_progress, on_bad_image=config.on_bad_image, in_chans=config.in_chans,
            max_pixels=config.max_pixels, on_leak=config.on_leak, field_separator=config.field_separator,
            keep_empty_classes=config.keep_empty_classes, spec=spec, value_range=config.value_range,
            decoding=decoding,
        )  # fmt: skip
        if not audit.val:
            raise DataError(f"{config.data} has no held-out images; give it a val/ folder, or more images of a class")
        return audit
    return _scan_all(config, config.data, spec, show_progress, decoding)


def _scan_all(
    config: PretrainConfig, given: Path, spec: InputSpec, show_progress: bool, decoding: Decoding | None
) -> DataAudit:
    parse_option(config.value_range)
    start = time.perf_counter()
    root = fetch(given) if is_named(given) else given
    if root.is_file():
        raise DataError(f"{root} is a file; give a folder of images")
    rest = UnusedFiles()
    parts, notes = _parts(root, rest)
    files = [file for part in parts for file in part]
    if not files:
        raise DataError(f"{root} has no images, at any depth; give a folder of images")
    probes, cached = probe_files(
        root, files, config.workers, True, show_progress, config.in_chans, config.max_pixels, spec=spec,
        rules=decoding.rules if decoding else "srgb",
    )  # fmt: skip
    if config.on_bad_image == "fail":
        refuse_bad(root, probes)
    good = [[file.name for file in part if not probes[file.name].bad] for part in parts]
    named = [[(name, 0) for name in part] for part in good]
    if len(parts) == 1:
        train, val = divide(named[0], probes, "", config.val_split, config.seed)
        notes.append(
            f"{len(val)} of {len(good[0])} images are held out (--val-split {config.val_split:g}, seed {config.seed})"
        )
    else:
        train, val = named
    if len(train) + len(val) < _LEAST or not val:
        bad = f"; {first_bad(probes)}" if any(probe.bad for probe in probes.values()) else ""
        raise DataError(
            f"{root} has {len(train)} readable training images and {len(val)} held out; give at least {_LEAST} in "
            f"total{bad}"
        )
    copies = find_copies(root, {"train": [(n, "") for n, _ in train], "val": [(n, "") for n, _ in val]}, probes)
    if config.on_leak == "fail":
        copies.refuse_leaks(root)
    left = summarize(rest, root)
    readable = [probe for probe in probes.values() if not probe.bad]
    seen = choose_scan_range(probes, decoding, config.value_range, config.in_chans)
    return DataAudit(
        root=root,
        layout="flat" if len(parts) == 1 else "split",
        classes=(),
        train=tuple(Sample(root / name, 0) for name, _ in train),
        val=tuple(Sample(root / name, 0) for name, _ in val),
        bad=tuple(BadFile(root / name, probe.bad) for name, probe in probes.items() if probe.bad),
        sizes=sizes_of(readable),
        modes=modes_of(readable),
        exif_rotated=sum(probe.orientation != 1 for probe in readable),
        notes=(*notes, *left.notes(), *seen.notes, *copies.notes()),
        warnings=(*left.warnings(), *seen.warnings, *copies.warnings()),
        val_split=config.val_split,
        seed=config.seed,
        max_pixels=config.max_pixels,
        seconds=time.perf_counter() - start,
        cached=cached,
        digests=Digests(root, probes),
        copies=copies,
        left=left,
        decoding=seen.decoding,
        values=seen.facts,
        colors=seen.colors,
    )


def _parts(root: Path, rest: UnusedFiles) -> tuple[list[list[ImageFile]], list[str]]:
    """Return all images below ``root``; where it has train/ and val/ with images, those of each, and a note."""
    names = folders(root)
    train, val = (_first(names, wanted) for wanted in (TRAIN_NAMES, VAL_NAMES))
    if train and val and all(any(True for _ in walk(root / part)) for part in (train, val)):
        both = [list(walk(root / part, rest, f"{part}/")) for part in (train, val)]
        note_unused(root, "", (train, val), rest)
        note = f"images in {val}/ are held out"
        others = [name for name in names if name not in (train, val)]
        return both, [note, *([f"not used: {', '.join(others[:5])}"] if others else [])]
    return [list(walk(root, rest))], []


def _first(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((name for want in wanted for name in names if name.lower() == want), None)

"""Scans a multi-label set: decodes every image once and holds out a part of every label."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np

from vtk.card import InputSpec
from vtk.data.audit.copies import find_copies
from vtk.data.audit.folder_scan import probe_facts
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.audit.unusual import find_unusual
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.decoding.rules import Decoding, Rules
from vtk.data.decoding.thin_images import NOMINAL
from vtk.data.probing.probe_files import Look, first_bad, probe_files, refuse_bad
from vtk.data.sources.listing import natural, stat_file
from vtk.data.sources.multilabel_set import read_multilabel_set
from vtk.data.sources.table import separator_of
from vtk.data.sources.timm_datasets import is_named
from vtk.data.value_range.choice import choose_scan_range
from vtk.data.value_range.limits import parse_option
from vtk.errors import DataError, UsageError
from vtk.text import one_line


@dataclass(frozen=True)
class MultiAudit(DataAudit):
    """The audit of a multi-label set; the label of a sample is an array (classes,) fp32 of zeros and ones."""

    noun: ClassVar[tuple[str, str]] = ("label", "labels")

    def counts(self, part: Literal["train", "val"]) -> list[int]:
        """Return the images that have each label, in index order."""
        labels = [cast(Any, sample.label) for sample in getattr(self, part)]
        return [int(count) for count in (np.sum(labels, axis=0) if labels else np.zeros(len(self.classes)))]


def scan_multi(
    root: Path,
    *,
    classes: Sequence[str] | None = None,
    label_separator: str | None = None,
    field_separator: str | None = None,
    seed: int = 0,
    val_split: float = 0.2,
    spec: InputSpec = NOMINAL,
    decoding: Decoding | None = None,
    value_range: Sequence[str] = (),
    max_pixels: int = MAX_PIXELS,
    in_chans: int = 3,
    on_leak: str = "warn",
    on_bad_image: str = "skip",
    together: bool = True,
    look: Look = "decode",
    cache: bool = True,
    workers: int | None = None,
    show_progress: bool = True,
) -> MultiAudit:
    """Decode every image of a multi-label set once and return the audit; other arguments as for `vtk.data.scan`.

    Args:
        root: a table of labels, a folder with ``labels.csv``, or folders (with or without ``train/`` and ``val/`` above
            them).
        classes: labels of a trained model, in index order.
        label_separator: of an image's labels in a table, by name or the character; None: detected.
        val_split: fraction to hold out if the set has no split; at least one image of every label with two images.

    Raises:
        DataError: no images or labels, a line that cannot be read, or a label that the model does not know.
        UsageError: a dataset by name, or a value out of range.
    """
    parse_option(value_range)
    start, root = time.perf_counter(), Path(root)
    if is_named(root):
        raise UsageError(f"`{root}`: datasets by name have one label per image; leave out --multi-label")
    listed = read_multilabel_set(
        root, known=classes or (),
        field_separator=separator_of(field_separator), label_separator=separator_of(label_separator),
    )  # fmt: skip
    found = {label for labels in listed.labels.values() for label in labels} | set(listed.known)
    names = tuple(natural(found)) if classes is None else tuple(classes)
    if unknown := natural(found - set(names)):
        raise DataError(f"{root} has labels that are not labels of the model: {', '.join(map(one_line, unknown[:5]))}")
    if not names:
        raise DataError(f"{root} has no labels; give lines path,label1;label2 or images in folders named by labels")
    files = [stat_file(listed.root, name) for name in listed.labels]
    rules: Rules = decoding.rules if decoding else "srgb"
    probes, cached = probe_files(
        listed.root, files, workers, cache, show_progress, in_chans, max_pixels, look, spec, rules
    )
    if on_bad_image == "fail":
        refuse_bad(listed.root, probes)
    good = [name for name in listed.labels if not probes[name].bad]
    if not good:
        raise DataError(f"{root}: none of its {len(files)} image files can be read, {first_bad(probes)}")
    index = {name: i for i, name in enumerate(names)}
    labels = {name: sorted(index[label] for label in listed.labels[name]) for name in good}
    held = {name for name in good if listed.parts.get(name) == "val"}
    if classes is None and len(held) == len(good):
        raise DataError(f"{root}: all {len(good)} images are held out; put some into train")
    split, notes = bool(listed.parts), []
    if not split:
        same = {name: probes[name].digest or name for name in good} if together else {name: name for name in good}
        held = _hold_out_together(good, labels, same, len(names), val_split, seed)
        notes = [f"{len(held)} of {len(good)} images are held out (--val-split {val_split}, seed {seed})"]
    samples = [Sample(listed.root / name, cast(int, _one_hot(labels[name], len(names)))) for name in good]
    many = Counter(len(labels[name]) for name in good)
    notes.append("labels per image: " + ", ".join(f"{n} in {many[n]}" for n in sorted(many)))
    warnings = list(listed.warnings)
    if classes is None and max(many) < 2:
        warnings.append("no image has two labels; leave out --multi-label to train mutually exclusive classes")
    if classes is None and (absent := _absent(names, labels, [name for name in good if name not in held])):
        warnings.append(f"no training image has {absent}")
    if held and (absent := _absent(names, labels, held)):
        notes.append(f"no held-out image has {absent}")
    chosen = choose_scan_range(probes, decoding, value_range, in_chans)
    train, val = (tuple(s for s, n in zip(samples, good, strict=True) if (n in held) == side) for side in (False, True))
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "val": []}
    for name in good:
        parts["val" if name in held else "train"].append((name, "; ".join(natural(listed.labels[name]))))
    copies = find_copies(listed.root, parts, probes)
    if on_leak == "fail":
        copies.refuse_leaks(root)
    return MultiAudit(
        root=root,
        layout="split" if split else "flat",
        classes=names,
        train=train,
        val=val,
        notes=(*notes, *listed.notes, *listed.left.notes(), *chosen.notes, *copies.notes()),
        warnings=(*warnings, *listed.left.warnings(), *chosen.warnings, *copies.warnings()),
        odd=find_unusual((name, "; ".join(natural(of)), probes[name]) for name, of in listed.labels.items()),
        copies=copies,
        left=listed.left,
        seed=seed,
        val_split=val_split,
        max_pixels=max_pixels,
        cached=cached,
        seconds=time.perf_counter() - start,
        **probe_facts(listed.root, probes, chosen),
    )


def _absent(names: Sequence[str], labels: Mapping[str, Sequence[int]], part: Iterable[str]) -> str:
    """Return the labels that no image of a part has, for a message; empty if there are none."""
    present = {label for name in part for label in labels[name]}
    absent = [one_line(name) for i, name in enumerate(names) if i not in present]
    more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
    return f"label{'s' * (len(absent) > 1)} {', '.join(absent[:5])}{more}" if absent else ""


def _one_hot(labels: Sequence[int], classes: int) -> np.ndarray:
    row = np.zeros(classes, dtype=np.float32)
    row[list(labels)] = 1.0
    return row


def _hold_out_together(
    names: Sequence[str],
    labels: Mapping[str, Sequence[int]],
    same: Mapping[str, str],
    classes: int,
    fraction: float,
    seed: int,
) -> set[str]:
    """Split as `_hold_out`; images with the same key in ``same`` stay in one part, with the labels of all."""
    first: dict[str, str] = {}
    merged: dict[str, set[int]] = {}
    for name in names:
        merged.setdefault(first.setdefault(same[name], name), set()).update(labels[name])
    held = _hold_out(list(merged), {name: sorted(own) for name, own in merged.items()}, classes, fraction, seed)
    return {name for name in names if first[same[name]] in held}


def _hold_out(
    names: Sequence[str], labels: Mapping[str, Sequence[int]], classes: int, fraction: float, seed: int
) -> set[str]:
    """Hold out about ``fraction`` of the images of each label, the rarest label first.

    This is iterative stratification (Sechidis, Tsoumakas and Vlahavas 2011).
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"`--val-split` is {fraction}; allowed is at least 0 (no held-out part) and below 1")
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

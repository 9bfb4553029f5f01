"""Evaluates a source on a corrupted test set as it is published, ImageNet-C or CIFAR-C (``vtk eval --corrupted``)."""

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vtk import console
from vtk.data.audit.folder_scan import scan
from vtk.data.cpus import usable_cpus
from vtk.data.decoding.decode import pixel_limit
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.array_images import ArrayImages, make_array_loader, open_images, read_labels
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.sources.cifar_names import class_numbers
from vtk.data.sources.corruption_sets import LABELS, SEVERITIES, CorruptionSet, find_corruptions
from vtk.errors import DataError, UsageError
from vtk.evaluation.config import EvalConfig
from vtk.evaluation.corruption_error import IMAGENET, Baseline, print_errors, read_baseline, summarize
from vtk.evaluation.metrics import evaluate
from vtk.evaluation.restriction import Restriction
from vtk.files import write_text
from vtk.filesets import open_folder, replace_set
from vtk.formats import write_json
from vtk.marks import begins, json_with
from vtk.runtime.backends.base import load_backend, precision_of, predictor
from vtk.runtime.run_conditions import conditions_of
from vtk.runtime.source import Source
from vtk.text import one_line

_HEAD = "corruption,severity,images,top1,loss"
MARKS = {
    "corruptions.json": json_with("corruptions", "baseline", "backend", "provider"),
    "corruptions.csv": begins(_HEAD),
}
"""Output files, and how they are recognised."""
_FEW = 200


@dataclass(frozen=True)
class SetScore:
    """Accuracy on a corruption at one severity: number of images, top-1 as a fraction, mean loss in nats."""

    count: int
    top1: float
    loss: float


@dataclass(frozen=True)
class CorruptionResult:
    """Result of an evaluation on a corrupted test set.

    Attributes:
        source: name of the model.
        scores: corruption → severity (``1`` to ``5``) → its score.
        mean_top1: accuracy over all corruptions and severities.
        standard_top1: the same over the 15 corruptions of the mCE; None where one of them is incomplete.
        relative: corruption → its error as a share of the baseline's.
        mce: mean corruption error, as a fraction; None without a baseline, or where a corruption is incomplete.
        baseline: whose errors the mCE is relative to; None without.
        restricted: classes to choose from, if ``--restrict`` was given.
        conditions: back-end, provider, precision, device and batch size.
    """

    source: str
    scores: Mapping[str, Mapping[str, SetScore]]
    mean_top1: float
    standard_top1: float | None
    relative: Mapping[str, float]
    mce: float | None
    baseline: str | None
    restricted: int | None
    conditions: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; accuracies and errors as fractions."""
        scores = {name: {level: asdict(one) for level, one in of.items()} for name, of in self.scores.items()}
        return {
            "source": self.source, "corruptions": scores, "mean_top1": self.mean_top1,
            "standard_top1": self.standard_top1, "ce": dict(self.relative), "mce": self.mce, "baseline": self.baseline,
            "restricted": self.restricted, **self.conditions,
        }  # fmt: skip


def evaluate_corruptions(source: Source, config: EvalConfig) -> CorruptionResult:
    """Evaluate ``source`` on every corruption and severity of ``config.data``, and print the errors.

    Args:
        source: with class names.
        config: options; those that are None come from the card.

    Raises:
        UsageError: the source is multi-label or carries no class names, or the baseline is of other classes.
        DataError: the folder has no corruptions, or images of other classes.
        UnavailableError: a requested back-end or device is not available.
    """
    source.require_description("eval")
    if source.card.multi_label:
        raise UsageError(f"`--corrupted` is for models with one label per image; {source.name} is multi-label")
    sets = find_corruptions(Path(config.data))
    baseline = _baseline(config, len(source.card.classes), sets)
    if config.out is None:
        return _evaluate(source, config, sets, baseline)
    with open_folder(config.out, MARKS, f"vtk eval {source.name}", overwrite=config.overwrite):
        result = _evaluate(source, config, sets, baseline)
        with replace_set(config.out, MARKS, "vtk eval") as staged:
            write_json(staged / "corruptions.json", result.to_dict())
            write_text(staged / "corruptions.csv", _table(result))
        console.say(f"written: {config.out}/corruptions.json, corruptions.csv")
    return result


def _baseline(config: EvalConfig, classes: int, sets: list[CorruptionSet]) -> Baseline | None:
    """Return the baseline that was asked for; by default AlexNet's for the images and classes of ImageNet-C."""
    given = config.baseline
    if given == "alexnet" and config.restrict:
        raise UsageError(
            f"`--baseline` alexnet chose among all {IMAGENET:,} classes, and --restrict makes the choice easier; leave "
            "one of them out"
        )
    if given == "alexnet" and classes != IMAGENET:
        raise UsageError(
            f"`--baseline` alexnet is of ImageNet-C's {IMAGENET:,} classes, the model has {classes}; give the "
            "corruptions.json of another model, or none"
        )
    if given is not None:
        return read_baseline(given)
    usual = classes == IMAGENET and not sets[0].is_array and not config.restrict
    return read_baseline("alexnet") if usual else None


class _Images:
    """The images of each corruption and severity, through the model's preprocessing."""

    def __init__(self, source: Source, config: EvalConfig, batch: int, arrays: bool) -> None:
        self.card, self.config, self.batch = source.card, config, batch
        self.transform = eval_transform(self.card.input)
        self.labels: np.ndarray | None = None
        if arrays:
            path, numbers = config.data / LABELS, class_numbers(self.card.classes)
            given = read_labels(path)
            if int(given.max()) >= len(numbers):
                raise DataError(f"{path} has the label {given.max()}; the model has {len(numbers)} classes")
            self.labels = np.asarray(numbers)[given]

    def load(self, one: CorruptionSet, level: str) -> tuple[Any, list[int]]:
        """Return a loader, and the labels of its images."""
        if self.labels is not None:
            rows, first = _rows(one, level, self.labels)
            images = ArrayImages(one.path, first, rows.tolist(), self.transform)
            return make_array_loader(images, batch_size=self.batch, workers=self._workers(len(rows))), rows.tolist()
        card, most = self.card, pixel_limit(self.card)
        # listed only: decoding millions of images twice would double the time
        samples = scan(
            one.path / level, classes=card.classes, in_chans=card.input.in_chans, val_split=0, look="list",
            max_pixels=most, decoding=Decoding.of(card.input), show_progress=False,
        ).samples  # fmt: skip
        loader = make_loader(
            samples, self.transform, batch_size=self.batch, shuffle=False, seed=0,
            workers=self._workers(len(samples)), max_pixels=most,
        )  # fmt: skip
        return loader, [sample.label for sample in samples]

    def _workers(self, images: int) -> int:
        if self.config.workers is not None:
            return self.config.workers
        return min(usable_cpus(), 8) if images > _FEW else 0


def _evaluate(
    source: Source, config: EvalConfig, sets: list[CorruptionSet], baseline: Baseline | None
) -> CorruptionResult:
    conditions, classes = conditions_of(source, config), source.card.classes
    images = _Images(source, config, conditions.batch_size, sets[0].is_array)
    scores: dict[str, dict[str, SetScore]] = {}
    kept = 0
    backend = load_backend(
        conditions.backend, source, device=conditions.device, dtype=conditions.precision, threads=config.threads
    )
    try:
        for one in sets:
            for level in one.severities:
                console.say(f"{one_line(one.name)}, severity {level}", style="dim")
                loader, labels = images.load(one, level)
                predict = predictor(backend)
                if config.restrict:
                    restriction = Restriction(labels, len(classes))
                    predict, kept = restriction.wrap(predict), max(kept, restriction.count)
                found = evaluate(predict, loader, classes, device=backend.device)
                scores.setdefault(one.name, {})[level] = SetScore(found.count, found.top1, found.loss)
        ran = {
            "backend": backend.name, "provider": backend.provider, "precision": precision_of(backend),
            "device": str(backend.device), "batch_size": conditions.batch_size,
        }  # fmt: skip
    finally:
        backend.close()
    errors = {name: {level: 1 - score.top1 for level, score in of.items()} for name, of in scores.items()}
    summary = summarize(errors, baseline)
    print_errors(errors, summary, baseline)
    if config.restrict:
        console.say(f"chosen among {kept} of {len(classes)} classes (--restrict)")
    return CorruptionResult(
        source.name, scores, summary.mean_top1, summary.standard_top1, summary.relative, summary.mce,
        None if baseline is None else baseline.name, kept or None, ran,
    )  # fmt: skip


def _rows(one: CorruptionSet, level: str, labels: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the labels of a severity's images, and the row of the first; each severity has a fifth of the array."""
    count = len(open_images(one.path))
    each = count // len(SEVERITIES)
    if count % len(SEVERITIES) or len(labels) not in (each, count):
        raise DataError(
            f"{one.path} has {count} images and labels.npy {len(labels)} labels; CIFAR-C has the test images at five "
            "severities, one after the other, and a label for each"
        )
    first = SEVERITIES.index(level) * each
    return (labels if len(labels) == each else labels[first : first + each]), first


def _table(result: CorruptionResult) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD.split(","))
    for name, of in result.scores.items():
        writer.writerows([name, level, one.count, one.top1, one.loss] for level, one in of.items())
    return text.getvalue()

"""Evaluates a source on a corrupted test set as it is published, ImageNet-C or CIFAR-C (``vtk eval --corrupted``)."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtk import console
from vtk.data.sources.corruption_sets import CorruptionSet, find_corruptions, passed_over
from vtk.errors import UsageError
from vtk.evaluation.config import EvalConfig
from vtk.evaluation.corruption_error import IMAGENET, Baseline, print_errors, read_baseline, summarize
from vtk.evaluation.metrics import evaluate
from vtk.evaluation.restriction import Restriction
from vtk.files import write_text
from vtk.filesets import open_folder, replace_set
from vtk.formats import write_json
from vtk.marks import begins, json_with
from vtk.runtime.backends.base import load_backend, precision_of, predictor
from vtk.runtime.corrupted_images import CorruptedImages
from vtk.runtime.run_conditions import conditions_of
from vtk.runtime.source import Source
from vtk.text import one_line

_HEAD = "corruption,severity,images,top1,loss"
MARKS = {
    "corruptions.json": json_with("corruptions", "baseline", "backend", "provider"),
    "corruptions.csv": begins(_HEAD),
}
"""Output files, and how they are recognised."""


@dataclass(frozen=True)
class SetScore:
    """Accuracy on a corruption at one severity.

    Attributes:
        count: images.
        top1: as a fraction.
        loss: mean cross-entropy in nats; None where it is not finite.
    """

    count: int
    top1: float
    loss: float | None


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
        skipped: files that could not be read, and why.
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
    skipped: tuple[tuple[Path, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; accuracies and errors as fractions."""
        scores = {name: {level: asdict(one) for level, one in of.items()} for name, of in self.scores.items()}
        return {
            "source": self.source, "corruptions": scores, "mean_top1": self.mean_top1,
            "standard_top1": self.standard_top1, "ce": dict(self.relative), "mce": self.mce, "baseline": self.baseline,
            "restricted": self.restricted, **self.conditions,
            "skipped": [{"path": str(path), "reason": why} for path, why in self.skipped],
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
    for name, why in passed_over(Path(config.data), sets):
        console.warn(f"left out: {one_line(name)} is no corruption, {why}")
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
        found = read_baseline(given)
        if found.errors is not None and (found.restricted is not None) != config.restrict:
            theirs = "all classes" if found.restricted is None else f"the {found.restricted} classes of its images"
            raise UsageError(
                f"`--baseline` {found.name} chose among {theirs}, unlike this model; evaluate both with --restrict, or "
                "both without"
            )
        return found
    usual = classes == IMAGENET and not sets[0].is_array and not config.restrict
    return read_baseline("alexnet") if usual else None


def _evaluate(
    source: Source, config: EvalConfig, sets: list[CorruptionSet], baseline: Baseline | None
) -> CorruptionResult:
    conditions, classes = conditions_of(source, config), source.card.classes
    images = CorruptedImages(source, config, conditions.batch_size, sets)
    scores: dict[str, dict[str, SetScore]] = {}
    kept: set[int] = set()
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
                    predict = restriction.wrap(predict)
                    kept.add(restriction.count)
                found = evaluate(predict, loader, classes, device=backend.device)
                loss = found.loss if math.isfinite(found.loss) else None
                scores.setdefault(one.name, {})[level] = SetScore(found.count, found.top1, loss)
        ran = {
            "backend": backend.name, "provider": backend.provider, "precision": precision_of(backend),
            "device": str(backend.device), "batch_size": conditions.batch_size,
        }  # fmt: skip
    finally:
        backend.close()
    errors = {name: {level: 1 - score.top1 for level, score in of.items()} for name, of in scores.items()}
    summary = summarize(errors, baseline)
    print_errors(errors, summary, baseline)
    result = CorruptionResult(
        source.name, scores, summary.mean_top1, summary.standard_top1, summary.relative, summary.mce,
        None if baseline is None else baseline.name, max(kept, default=None), ran, tuple(images.skipped),
    )  # fmt: skip
    _print_conditions(result, baseline, sorted(kept), len(classes))
    return result


def _print_conditions(result: CorruptionResult, baseline: Baseline | None, kept: list[int], classes: int) -> None:
    """Print what the numbers are of: images, back-end, classes, and whether the baseline's are of as many images."""
    for path, why in result.skipped:
        console.warn(f"skipped {one_line(path)}: {why}")
    counts = {name: {level: one.count for level, one in of.items()} for name, of in result.scores.items()}
    total = sum(count for of in counts.values() for count in of.values())
    skipped = f"; unreadable and skipped: {len(result.skipped)}" if result.skipped else ""
    ran = result.conditions
    console.say(
        f"{console.count(total, 'image')}, {ran['backend']} on {ran['provider']}, {ran['precision']}, "
        f"batch {ran['batch_size']}{skipped}"
    )
    if kept:
        among = f"{kept[0]} to {kept[-1]}" if kept[0] != kept[-1] else str(kept[0])
        console.say(f"chosen among {among} of {classes} classes (--restrict)")
    for name, of in counts.items():
        theirs = {} if baseline is None else baseline.images.get(name, {})
        for level in of.keys() & theirs.keys():
            if theirs[level] != of[level] and baseline is not None:
                console.warn(
                    f"{baseline.name} is of other images: {theirs[level]} of {one_line(name)} at severity {level}, "
                    f"here {of[level]}"
                )
                return


def _table(result: CorruptionResult) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEAD.split(","))
    for name, of in result.scores.items():
        writer.writerows([name, level, one.count, one.top1, one.loss] for level, one in of.items())
    return text.getvalue()

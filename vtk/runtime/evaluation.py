"""Evaluates any source on a folder of images, with the metrics of training."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vtk import console
from vtk.data.audit.folder_scan import DataAudit
from vtk.data.cpus import usable_cpus
from vtk.data.decoding.decode import pixel_limit
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.errors import UsageError
from vtk.evaluation import choice
from vtk.evaluation.abstained import Abstained, AnswerCounter
from vtk.evaluation.abstention import with_threshold
from vtk.evaluation.config import EvalConfig
from vtk.evaluation.metrics import Metrics, evaluate
from vtk.evaluation.multilabel import MultiLabelMetrics, evaluate_labels
from vtk.evaluation.restriction import Restriction
from vtk.evaluation.result_files import PER_CLASS, per_class_csv
from vtk.files import write_text
from vtk.filesets import open_folder, replace_set
from vtk.formats import write_json
from vtk.marks import begins, json_with, png
from vtk.packages import require
from vtk.runtime.agreement import Agreement
from vtk.runtime.backends.base import load_backend, precision_of, predictor
from vtk.runtime.data_option import fp8_images
from vtk.runtime.export_facts import PLAIN, Facts
from vtk.runtime.images import find_images
from vtk.runtime.run_conditions import conditions_of
from vtk.runtime.source import Source

_FEW = 200
_LEAST_AGREEMENT = 0.999
_JSON = json_with("split", "backend", "provider", "precision", "same_conditions")
MARKS = {
    "metrics.json": _JSON,
    "per_class.csv": begins(PER_CLASS),
    "confusion.png": png(("metrics.json", _JSON), ("per_class.csv", begins(PER_CLASS))),
}
"""Output files of an evaluation, and how they are recognised."""


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation.

    Attributes:
        metrics: over all images of the split.
        audit: of the folder, with its unreadable files.
        backend: name; ``provider`` is what really ran.
        agreement: fraction of images whose most likely class is the reference's; None without one.
        reference: name of the compared model.
        training: the training run's top-1 (of several labels its mAP), if these are its held-out images, else None;
            of a compressed pack that of its compression.
        same_conditions: whether back-end, precision, device and batch size are the training run's, so that its metric
            is reproduced exactly.
        left_out: reason to number of images that were not evaluated, for instance ``trained on``.
        abstained: answers above and below the threshold of ``--threshold auto``; None without it.
        restricted: number of classes to choose from, with ``--restrict``; None without it.
    """

    metrics: Metrics | MultiLabelMetrics
    audit: DataAudit
    split: str
    backend: str
    provider: str
    precision: str
    device: str
    batch_size: int
    agreement: float | None
    reference: str | None
    training: float | None
    same_conditions: bool
    left_out: dict[str, int] = field(default_factory=dict)
    abstained: Abstained | None = None
    restricted: int | None = None

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels."""
        return isinstance(self.metrics, MultiLabelMetrics)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = ("split", "backend", "provider", "precision", "device", "batch_size", "agreement", "reference",
                 "same_conditions", "left_out")  # fmt: skip
        result = {**self.metrics.to_dict(), **{name: getattr(self, name) for name in names}}
        result[f"training_{choice.default(self.multi_label)}"] = self.training
        if self.abstained is not None:
            result["abstained"] = self.abstained.to_dict()
        if self.restricted is not None:
            result["restricted"] = self.restricted
        if outside := self.audit.values.get("outside"):
            result["outside_value_range"] = list(outside)
        result["skipped"] = [{"path": str(bad.path), "reason": bad.reason} for bad in self.audit.bad]
        return result


def evaluate_source(source: Source, config: EvalConfig, *, reference: Source | None = None) -> EvalResult:
    """Evaluate ``source`` on the images of ``config.data`` and print the metrics.

    Args:
        source: what to evaluate; an ``ort-…`` back-end needs an ONNX file.
        config: options; those that are None come from the card.
        reference: a pack or checkpoint to compare the most likely classes with, in the precision of an ONNX file or
            else of its training run; by default the source itself, if the conditions differ from the training run's.

    Raises:
        UsageError: the source carries no class names, or options contradict each other.
        DataError: the folder's classes are not the card's, or it has no images.
        UnavailableError: a requested back-end or device is not available.
    """
    source.require_description("eval")
    if config.out is None:
        return _evaluate(source, config, reference)
    require("matplotlib")
    with open_folder(config.out, MARKS, f"vtk eval {source.name}", overwrite=config.overwrite):
        result = _evaluate(source, config, reference)
        _write(result, config.out)
    return result


def _evaluate(source: Source, config: EvalConfig, reference: Source | None) -> EvalResult:
    card = with_threshold(source.card, config.threshold, config.risk, source.name)
    counter = None if card.threshold is None else AnswerCounter(card)
    conditions = conditions_of(source, config)
    audit, part = find_images(source, config.data, config.split or "val")
    samples = part.samples
    # for a few images, starting processes takes longer than decoding
    workers = (min(usable_cpus(), 8) if len(samples) > _FEW else 0) if config.workers is None else config.workers
    loader = make_loader(
        samples,
        eval_transform(source.card.input),
        batch_size=conditions.batch_size,
        shuffle=False,
        seed=0,
        workers=workers,
        max_pixels=pixel_limit(source.card),
    )
    with contextlib.ExitStack() as stack:
        backend = load_backend(
            conditions.backend, source, device=conditions.device, dtype=conditions.precision, threads=config.threads,
            **fp8_images(source, conditions.precision, config.data),
        )  # fmt: skip
        stack.callback(backend.close)
        restriction = _restriction(source, config, [sample.label for sample in audit.samples])
        judge = Agreement.of(source, reference, conditions, config, restriction)
        if judge is not None:
            stack.callback(judge.backend.close)
        predict = predictor(backend) if restriction is None else restriction.wrap(predictor(backend))
        predict = judge.watch(predict) if judge else predict
        one = evaluate if counter is None else partial(evaluate, keep=counter.keep)
        score = evaluate_labels if source.card.multi_label else one
        metrics = score(predict, loader, source.card.classes, device=backend.device)
    narrow = restriction is not None and restriction.count < len(source.card.classes)
    result = EvalResult(
        metrics=metrics,
        audit=audit,
        split=config.split or "val",
        backend=backend.name,
        provider=backend.provider,
        precision=precision_of(backend),
        device=str(backend.device),
        batch_size=1 if getattr(backend, "apart", False) else conditions.batch_size,
        agreement=judge.fraction if judge else None,
        reference=judge.name if judge else None,
        # a choice among fewer classes is easier than the run's
        training=source.card.metrics.get(choice.default(source.card.multi_label)) if part.same and not narrow else None,
        same_conditions=conditions.same,
        left_out=dict(part.left_out),
        abstained=None if counter is None else counter.result(),
        restricted=None if restriction is None else restriction.count,
    )
    _print(result, source.facts, source.card.pack)
    return result


def _restriction(source: Source, config: EvalConfig, labels: list[int]) -> Restriction | None:
    if not config.restrict:
        return None
    if source.card.multi_label:
        raise UsageError(f"`--restrict` is for models with one label per image, and {source.name} is multi-label")
    return Restriction(labels, len(source.card.classes))


def _print(result: EvalResult, facts: Facts, pack: Mapping[str, Any]) -> None:
    exact, precision = facts == PLAIN, f"int8 ({facts.int8})" if facts.int8 else result.precision
    fp32_file = result.backend.startswith("ort-") or (result.backend == "openvino" and result.precision == "fp32")
    result.metrics.print()
    if result.abstained is not None:
        result.abstained.print(chosen_on_these=result.training is not None)
    skipped = f"; unreadable and skipped: {len(result.audit.bad)}" if result.audit.bad else ""
    images = console.count(result.metrics.count, "image")
    console.say(
        f"{images} ({result.split}), {result.backend} on {result.provider}, {precision}, "
        f"batch {result.batch_size}{skipped}"
    )
    if result.restricted is not None:
        console.say(f"chosen among {result.restricted} of {len(result.metrics.classes)} classes (--restrict)")
    if result.agreement is not None:
        line = f"most likely class as in {result.reference}: {console.percent(result.agreement, 2)} of the images"
        if exact and fp32_file and result.agreement < _LEAST_AGREEMENT:
            console.warn(f"{line}; an fp32 file should reach {console.percent(_LEAST_AGREEMENT)}")
        else:
            console.say(line)
    elif not result.same_conditions:
        console.say("not compared with the model as it was trained (--reference PACK does)")
    if result.training is None:
        return
    name = choice.default(result.multi_label)
    label, value = choice.names(result.multi_label)[name], result.metrics.numbers()[name]
    then, now = (console.percent(number, 2) for number in (result.training, value))
    owner = "the compressed pack's" if pack.get("compression") else "the training run's"
    before, dtype = pack.get("converted_from"), pack.get("dtype", "fp32")
    if not result.same_conditions:
        console.say(f"{owner} {label} was {then}, under other conditions")
    elif before and before != dtype:
        console.say(f"{owner} {label} was {then}, in {before}; this pack is rounded to {dtype}")
    elif value == result.training:
        console.say(f"{label} is exactly {owner}{' when it was compressed' if pack.get('compression') else ''}")
    else:
        why = "other images or labels, or another torch or machine"
        console.warn(f"{owner} {label} was {then}, this is {now}: {why}")


def _write(result: EvalResult, out: Path) -> None:
    from vtk.evaluation.result_files import confusion_png

    with replace_set(out, MARKS, "vtk eval") as staged:
        write_json(staged / "metrics.json", result.to_dict())
        write_text(staged / "per_class.csv", per_class_csv(result.metrics, result.abstained))
        if isinstance(result.metrics, Metrics):
            more = () if result.abstained is None else (result.abstained,)
            confusion_png(result.metrics, staged / "confusion.png", *more)
    drawn = "" if result.multi_label else ", confusion.png"
    console.say(f"written: {out}/metrics.json, per_class.csv{drawn}")

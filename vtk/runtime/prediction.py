"""Predicts labels of image files; a file that cannot be read is reported and skipped."""

import csv
import dataclasses
import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vtk import console
from vtk.calibration import Threshold
from vtk.data.cpus import batches_ahead
from vtk.data.decoding.decode import outside_of, pixel_limit, read_image
from vtk.data.decoding.images import reason
from vtk.data.decoding.rules import Decoding, show_range
from vtk.data.loading.eval_pipeline import EvalTransform, eval_transform
from vtk.data.sources.image_set import list_images
from vtk.errors import DataError
from vtk.evaluation.abstention import describe as describe_threshold
from vtk.evaluation.abstention import with_threshold
from vtk.evaluation.config import PredictConfig
from vtk.evaluation.labels import Prediction, check_finite, check_threshold, predictions
from vtk.files import replace_file
from vtk.nodes import check_file
from vtk.runtime.backends.base import describe, load_backend, predictor
from vtk.runtime.data_option import fp8_images
from vtk.runtime.run_conditions import conditions_of
from vtk.runtime.source import Source
from vtk.text import one_line

_SHOWN = 20
_NO_NUMBER = "the model's logits are infinite or NaN"
_HEADER = re.compile(rb"path(,labels,scores|(,answer)?(,label\d+,score\d+)+)\r?\n")
"""First line of a table of predictions."""


@dataclass(frozen=True)
class PredictResult:
    """Result of a prediction.

    Attributes:
        predictions: of the images that could be read, in the order of the listing.
        skipped: the others, and why.
        out: the CSV file, or None.
        provider: what really ran.
        multi_label: whether an image may have several labels.
        outside: images with values outside of the model's value range, which are clipped.
        chosen: threshold of ``--threshold auto``; None where every answer is given.
    """

    predictions: tuple[Prediction, ...]
    skipped: tuple[tuple[Path, str], ...]
    out: Path | None
    provider: str
    multi_label: bool = False
    outside: tuple[Path, ...] = ()
    chosen: Threshold | None = None

    @property
    def unknown(self) -> int:
        """Number of images whose answer is "unknown"."""
        return sum(p.unknown for p in self.predictions)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "count": len(self.predictions),
            "out": None if self.out is None else str(self.out),
            "provider": self.provider,
            **({"multi_label": True} if self.multi_label else {}),
            **({} if self.chosen is None else {"threshold": dataclasses.asdict(self.chosen), "unknown": self.unknown}),
            "predictions": [
                {
                    "path": str(p.path),
                    "labels": list(p.labels),
                    "scores": list(p.scores),
                    **({} if self.chosen is None else {"answer": p.answer}),
                }
                for p in self.predictions
            ],
            "skipped": [{"path": str(path), "reason": why} for path, why in self.skipped],
            **({"outside_value_range": [str(path) for path in self.outside]} if self.outside else {}),
        }


def predict_images(source: Source, config: PredictConfig) -> PredictResult:
    """Predict labels of the images of ``config.images``, write the CSV file and print a short table.

    Args:
        source: what to run; an ``ort-…`` back-end needs an ONNX file.
        config: options; those that are None come from the card.

    Raises:
        UsageError: the source carries no class names.
        DataError: no image could be read, or ``out`` is a file of another kind.
        UnavailableError: a requested back-end or device is not available.
    """
    source.require_description("predict")
    check_threshold(source.card, config.threshold, source.name)
    card = with_threshold(source.card, config.threshold, config.risk, source.name)
    paths = list_images(config.images)
    _check_out(config)
    conditions = conditions_of(source, config)
    backend = load_backend(
        conditions.backend, source, device=conditions.device, dtype=conditions.precision, threads=config.threads,
        **fp8_images(source, conditions.precision, config.data),
    )  # fmt: skip
    transform = eval_transform(source.card.input)
    found: list[Prediction] = []
    skipped: list[tuple[Path, str]] = []
    cut: list[Path] = []
    try:
        predict = predictor(backend, check=False)
        with console.progress("predict", len(paths)) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit is the model's own
            load = partial(_load, transform=transform, max_pixels=pixel_limit(source.card), cut=cut)
            for batch in batches_ahead(paths, load, conditions.batch_size):
                good = [(path, image) for path, image in batch if isinstance(image, Tensor)]
                for path, problem in batch:
                    if isinstance(problem, str):
                        skipped.append((path, problem))
                        console.warn(f"skipped {one_line(path)}: {problem}")
                if good:
                    logits = predict(torch.stack([image for _, image in good]))
                    right = logits.isfinite().all(1).tolist()
                    if not (any(right) or found) and len(good) > 1:
                        check_finite(logits, describe(backend))  # it is the model's fault, not an image's
                    for path in (path for (path, _), kept in zip(good, right, strict=True) if not kept):
                        skipped.append((path, _NO_NUMBER))
                        console.warn(f"skipped {one_line(path)}: {_NO_NUMBER}")
                    named = [path for (path, _), kept in zip(good, right, strict=True) if kept]
                    found += predictions(
                        card, logits[right], named, top_k=config.top_k, threshold=config.threshold
                    )  # fmt: skip
                bar.advance(len(batch))
        provider = backend.provider
    finally:
        backend.close()
    if not found:
        if any(why == _NO_NUMBER for _, why in skipped):
            check_finite(torch.tensor(torch.nan), describe(backend))
        raise DataError(f"none of the {len(paths)} images of {config.images} could be read; nothing was written")
    many = source.card.multi_label
    result = PredictResult(tuple(found), tuple(skipped), config.out, provider, many, tuple(sorted(cut)), card.threshold)
    if config.out is not None:
        _write(result, config.out, min(config.top_k, len(source.card.classes)))
    _print(result)
    if cut:
        low_high = "; ".join(map(show_range, source.card.input.value_range[:1]))
        console.warn(
            f"{len(cut)} image{'s have' if len(cut) > 1 else ' has'} values outside of the model's value range "
            f"({low_high}), which are clipped: {', '.join(map(one_line, sorted(cut)[:3]))}"
            + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
        )
    return result


def _load(path: Path, transform: EvalTransform, max_pixels: int, cut: list[Path]) -> tuple[Path, Tensor | str]:
    """Decode an image, or return why it cannot be read; append images beyond the value range to ``cut``."""
    spec = transform.spec
    try:
        image = read_image(path, spec.in_chans, max_pixels, Decoding.of(spec))
        if outside_of(image):
            cut.append(path)
        return path, transform(image)
    except DataError as error:
        return path, reason(error.__cause__ or error, path)


def _header(k: int, *, answers: bool) -> list[str]:
    return [
        "path",
        *(["answer"] if answers else []),
        *(f"{name}{i}" for i in range(1, k + 1) for name in ("label", "score")),
    ]


def _check_out(config: PredictConfig) -> None:
    """Refuse to replace a file that is not a table of predictions."""
    if config.out is None:
        return
    check_file(config.out, example="predictions.csv")
    if config.out.is_file() and not config.overwrite:
        with config.out.open("rb") as file:
            if not _HEADER.match(file.read(1 << 16)):
                raise DataError(
                    f"`--out` {config.out} is not a table of predictions; give another file, or --overwrite"
                )


def _write(result: PredictResult, out: Path, k: int) -> None:
    with replace_file(out) as tmp, tmp.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file, lineterminator="\n")
        if result.multi_label:  # as `--multi-label` reads them, with the scores beside them
            writer.writerow(["path", "labels", "scores"])
            writer.writerows(
                [p.path, ";".join(p.labels), ";".join(f"{score:.6f}" for score in p.scores)] for p in result.predictions
            )
            return
        answers = result.chosen is not None
        writer.writerow(_header(k, answers=answers))
        for p in result.predictions:
            pairs = zip(p.labels, p.scores, strict=True)
            writer.writerow(
                [
                    p.path,
                    *([p.answer] if answers else []),
                    *(cell for label, score in pairs for cell in (label, f"{score:.6f}")),
                ]
            )


def _print(result: PredictResult) -> None:
    shown = result.predictions if result.out is None else result.predictions[:_SHOWN]
    if result.multi_label:
        columns, left = ["image", "labels"], (0, 1)
        rows = [
            [p.path, ", ".join(f"{label} {score:.3f}" for label, score in zip(p.labels, p.scores, strict=True)) or "–"]
            for p in shown
        ]
    else:
        k, answers = len(result.predictions[0].labels), result.chosen is not None
        columns = [
            "image",
            *(["answer"] if answers else []),
            *(name for i in range(1, k + 1) for name in ("label", "score")),
        ]
        left = (0, 1, *range(2, 2 * k + 1, 2)) if answers else (0, *range(1, 2 * k, 2))
        rows = [
            [
                p.path,
                *([p.answer] if answers else []),
                *(cell for pair in zip(p.labels, p.scores, strict=True) for cell in (pair[0], f"{pair[1]:.3f}")),
            ]
            for p in shown
        ]
    console.table("Predictions", columns, rows, left=left)
    if len(shown) < len(result.predictions):
        console.say(f"… and {len(result.predictions) - len(shown)} more in {result.out}")
    if result.chosen is not None:
        console.say(f"{result.unknown} of {len(result.predictions)} unknown; {describe_threshold(result.chosen)}")
    skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
    written = f"; written: {result.out}" if result.out else ""
    console.say(f"{console.count(len(result.predictions), 'image')} on {result.provider}{skipped}{written}")

"""Runs a model without its classifier over images, and writes a row of pooled features for each."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import vtk
from vtk import console
from vtk.data.loading.readable import batches
from vtk.data.sources.image_set import list_images
from vtk.errors import DataError, UsageError
from vtk.evaluation.labels import check_finite
from vtk.packages import require
from vtk.runtime.backends.base import Backend, describe, load_backend, needs_onnx, precision_of, predictor
from vtk.runtime.embedding.config import EmbedConfig
from vtk.runtime.embedding.labels import labels_of
from vtk.runtime.embedding.tables import Table, check_out, open_table
from vtk.runtime.images import choose_images
from vtk.runtime.run_conditions import conditions_of
from vtk.runtime.source import Source
from vtk.text import one_line

FEATURES: Final = "features"
"""Name of the features among the outputs of an exported file."""
_NO_NUMBER = "the model's features are infinite or NaN"
_EXPORT = "give the pack, or a file of `vtk export onnx --output features`"


@dataclass(frozen=True)
class EmbedResult:
    """A table of embeddings.

    Attributes:
        out: the file.
        count: rows, one for each image that could be read.
        width: numbers of a row.
        labelled: whether there is a column of labels.
        skipped: files that could not be read, and why.
        provider: what really ran; ``backend`` and ``precision`` name it.
        images_per_second: of reading, running and writing.
        outside: images with values outside of the model's value range, which are clipped.
    """

    out: Path
    count: int
    width: int
    labelled: bool
    skipped: tuple[tuple[Path, str], ...]
    backend: str
    precision: str
    provider: str
    images_per_second: float
    outside: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = ("count", "width", "labelled", "backend", "precision", "provider", "images_per_second")
        return {
            "out": str(self.out),
            **{name: getattr(self, name) for name in names},
            "skipped": [{"path": str(path), "reason": why} for path, why in self.skipped],
            **({"outside_value_range": [str(path) for path in self.outside]} if self.outside else {}),
        }


def embed_images(source: Source, config: EmbedConfig) -> EmbedResult:
    """Write the pooled features of the images of ``config.images`` to ``config.out``.

    Memory does not grow with the number of images but by their names.

    Args:
        source: opened with ``features=True``; an ``ort-…`` back-end needs an ONNX file with features.
        config: options; those that are None come from the card.

    Raises:
        UsageError: the source or the back-end gives no features.
        DataError: no image could be read, or ``out`` is a file of another kind.
        UnavailableError: a requested back-end, device or package is not available.
    """
    check_features(source, config.backend)
    if config.out.suffix.lower() == ".parquet":
        require("pyarrow")
    check_out(config.out, overwrite=config.overwrite)
    paths = list(_paths(source, config))
    label = labels_of(config.images)
    labelled = config.labels and any(label(path) is not None for path in paths)
    conditions = conditions_of(source, config)
    backend = load_backend(
        conditions.backend, source, device=conditions.device, dtype=conditions.precision, threads=config.threads,
        **({"raw": True} if needs_onnx(conditions.backend) else {}),
    )  # fmt: skip
    run = _Run(backend, config)
    try:
        about = {
            "version": vtk.__version__, "source": source.name, "model": source.card.model.name,
            "input": source.card.input.to_dict(), "backend": backend.name, "precision": precision_of(backend),
            "normalized": config.normalize,
        }  # fmt: skip
        start, table = time.perf_counter(), None
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(console.progress("embed", len(paths)))
            for batch in batches(paths, source.card, conditions.batch_size, config.workers):
                run.skip(*batch.skipped)
                run.outside += batch.outside
                if batch.images is not None:
                    kept, rows = run.rows(batch.paths, batch.images)
                    if kept:
                        if table is None:
                            width = rows.shape[1]
                            table = stack.enter_context(open_table(config.out, width, labelled=labelled, about=about))
                        _add(table, kept, [label(path) for path in kept] if labelled else [], rows)
                        run.count, run.width = run.count + len(kept), rows.shape[1]
                bar.advance(len(batch))
            if not run.count:
                run.refuse(len(paths))
        speed = len(paths) / (time.perf_counter() - start)
    finally:
        backend.close()
    result = EmbedResult(
        config.out, run.count, run.width, labelled, tuple(run.skipped), backend.name, precision_of(backend),
        run.provider, speed, tuple(sorted(run.outside)),
    )  # fmt: skip
    _print(result)
    return result


def check_features(source: Source, backend: str | None) -> None:
    """Refuse a source or a back-end that cannot give features, before anything is loaded.

    Raises:
        UsageError: says which, and what to give.
    """
    if source.kind == "aoti":
        raise UsageError(f"{source.path} gives logits only; {_EXPORT}")
    if source.kind in ("onnx", "openvino") and not source.described:
        source.require_description("embed")
    if source.facts.preprocessing:
        raise UsageError(
            f"{source.path} takes raw images, which this command has resized and normalised already; give it a file "
            "exported without --with-preproc"
        )
    if (backend or "").startswith("bank") or (backend == "aoti"):
        raise UsageError(f"back-end `{backend}` gives logits only; give eager, compile, fused, or one of ONNX files")


def _paths(source: Source, config: EmbedConfig) -> Iterator[Path]:
    if config.split is None:
        yield from list_images(config.images)
    else:
        described = source.described or source.kind == "pack"
        yield from choose_images(source.card, config.images, config.split, described=described).paths


def _add(table: Table, paths: list[Path], labels: list[str | None], rows: Tensor) -> None:
    table.add([str(path) for path in paths], labels, rows.numpy())


class _Run:
    """The features of batches, and what was skipped."""

    def __init__(self, backend: Backend, config: EmbedConfig) -> None:
        outputs = getattr(backend, "outputs", None)
        if outputs is not None and FEATURES not in outputs:
            raise UsageError(f"the file has the outputs {', '.join(outputs)}, and no `{FEATURES}`; {_EXPORT}")
        self.features = predictor(backend, check=False, output="logits" if outputs is None else FEATURES)
        self.backend, self.config, self.provider = backend, config, backend.provider
        self.count = self.width = 0
        self.skipped: list[tuple[Path, str]] = []
        self.outside: list[Path] = []

    def skip(self, *files: tuple[Path, str]) -> None:
        for path, why in files:
            self.skipped.append((path, why))
            console.warn(f"skipped {one_line(path)}: {why}")

    def rows(self, paths: list[Path], images: Tensor) -> tuple[list[Path], Tensor]:
        """Return the files whose features are finite, and these, fp32 on the CPU."""
        rows = self.features(images).float().cpu()
        if rows.ndim != 2:
            shape = tuple(rows.shape[1:])
            raise UsageError(
                f"the model gives {shape} numbers for an image; embeddings need pooled features (channels)"
            )
        right = rows.isfinite().all(1)
        if not (bool(right.any()) or self.count) and len(rows) > 1:
            check_finite(rows, describe(self.backend))  # it is the model's fault, not an image's
        self.skip(*((path, _NO_NUMBER) for path, kept in zip(paths, right.tolist(), strict=True) if not kept))
        kept = [path for path, fine in zip(paths, right.tolist(), strict=True) if fine]
        rows = rows[right]
        return kept, torch.nn.functional.normalize(rows, dim=1) if self.config.normalize else rows

    def refuse(self, files: int) -> None:
        """Raise the error of a run without a row."""
        if any(why == _NO_NUMBER for _, why in self.skipped):
            check_finite(torch.tensor(torch.nan), describe(self.backend))
        raise DataError(f"none of the {files} images of {self.config.images} could be read; nothing was written")


def _print(result: EmbedResult) -> None:
    skipped = f", {len(result.skipped)} skipped" if result.skipped else ""
    label = ", label" if result.labelled else ""
    console.say(
        f"{console.count(result.count, 'image')}{skipped}, {result.backend} on {result.provider}, {result.precision}, "
        f"{result.images_per_second:,.1f} images/s"
    )
    console.say(f"written: {result.out}: path{label}, embedding ({result.width} numbers)")
    if result.outside:
        console.warn(
            f"{len(result.outside)} images have values outside of the model's value range, which are clipped: "
            + ", ".join(map(one_line, result.outside[:3]))
        )

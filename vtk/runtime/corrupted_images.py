"""Loads the images of a corrupted test set, of one corruption and severity after the other."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk.card import Card
from vtk.data.audit.folder_scan import scan
from vtk.data.audit.result import Sample
from vtk.data.cpus import usable_cpus
from vtk.data.decoding.decode import pixel_limit
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.array_images import ArrayImages, make_array_loader, open_images, read_labels
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.readable import batches
from vtk.data.sources.cifar_names import class_numbers
from vtk.data.sources.corruption_sets import LABELS, SEVERITIES, CorruptionSet
from vtk.errors import DataError
from vtk.evaluation.config import EvalConfig
from vtk.runtime.source import Source
from vtk.text import one_line

_FEW = 200


class CorruptedImages:
    """The images of each corruption and severity, through the model's preprocessing.

    Args:
        source: with class names.
        config: folder and worker processes.
        batch: images of a batch.
        sets: the corruptions; arrays are checked at once, before anything is evaluated.

    Attributes:
        skipped: files that could not be read so far, and why.

    Raises:
        DataError: an array is none of images, or labels are of another number or of other classes.
    """

    def __init__(self, source: Source, config: EvalConfig, batch: int, sets: Sequence[CorruptionSet]) -> None:
        self.card, self.config, self.batch = source.card, config, batch
        self.skipped: list[tuple[Path, str]] = []
        self.labels: np.ndarray | None = None
        if sets[0].is_array:
            path, numbers = config.data / LABELS, class_numbers(self.card.classes)
            given = read_labels(path)
            if int(given.max()) >= len(numbers):
                raise DataError(f"{path} has the label {given.max()}; the model has {len(numbers)} classes")
            self.labels = np.asarray(numbers)[given]
            for one in sets:
                _rows(one, SEVERITIES[0], self.labels)

    def load(self, one: CorruptionSet, level: str) -> tuple[Any, list[int]]:
        """Return an iterable of (images (B, C, H, W) fp32, labels (B,)), and the labels of all images."""
        if self.labels is not None:
            rows, first = _rows(one, level, self.labels)
            images = ArrayImages(one.path, first, rows.tolist(), eval_transform(self.card.input))
            workers = self.config.workers
            if workers is None:
                workers = min(usable_cpus(), 8) if len(rows) > _FEW else 0
            return make_array_loader(images, batch_size=self.batch, workers=workers), rows.tolist()
        # listed only: decoding millions of images twice would double the time
        samples = scan(
            one.path / level, classes=self.card.classes, in_chans=self.card.input.in_chans, val_split=0, look="list",
            max_pixels=pixel_limit(self.card), decoding=Decoding.of(self.card.input), show_progress=False,
        ).samples  # fmt: skip
        return _Readable(samples, self.card, self.batch, self.config.workers, self.skipped), [
            sample.label for sample in samples
        ]


class _Readable:
    """Batches of the files that can be read, with their labels; the others are added to ``skipped``."""

    def __init__(
        self, samples: Sequence[Sample], card: Card, batch: int, workers: int | None, skipped: list[tuple[Path, str]]
    ) -> None:
        self.dataset, self.card, self.batch, self.workers, self.skipped = samples, card, batch, workers, skipped

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        labels = {sample.path: sample.label for sample in self.dataset}
        bad: list[tuple[Path, str]] = []
        for one in batches(list(labels), self.card, self.batch, self.workers):
            bad += one.skipped
            if one.images is not None:
                yield one.images, torch.tensor([labels[path] for path in one.paths])
        self.skipped += bad
        if len(bad) == len(labels):
            raise DataError(
                f"none of the {len(bad)} images can be read, such as {one_line(bad[0][0])}: {bad[0][1]}; give others"
            )


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

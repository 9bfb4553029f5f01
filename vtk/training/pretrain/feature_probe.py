"""Accuracies of a backbone's frozen features during pre-training: k-NN and linear probe, by the class folders.

The classes are only looked at here; a method that learns without labels learns nothing from them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.loading.loader import Transform, make_loader
from vtk.data.sources.layout import TRAIN_NAMES, class_name
from vtk.errors import DataError
from vtk.evaluation.frozen_features import knn_top1, probe_top1
from vtk.training.engine.precision import Precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import share
from vtk.training.pretrain.config import PretrainConfig

METRICS = ("knn_top1", "probe_top1")


class FeatureProbe:
    """Scores the features of a backbone.

    Args:
        parts: images with their classes: a bank of training images, and the held-out ones.
        transform: of evaluation.
        config: of the run.
        workers: processes that load images.
        ranks: this process and the others; each takes every W-th batch.
    """

    def __init__(
        self, parts: tuple[Sequence[Sample], Sequence[Sample]], transform: Transform, config: PretrainConfig,
        workers: int, ranks: Ranks,
    ) -> None:  # fmt: skip
        self.parts, self.transform, self.config, self.workers, self.ranks = parts, transform, config, workers, ranks

    def __str__(self) -> str:
        classes = len({sample.label for sample in self.parts[0]})
        return f"features are scored by {classes} class folders, {len(self.parts[0])} training images"

    @torch.no_grad()
    def score(self, model: nn.Module, precision: Precision) -> dict[str, float]:
        """Return ``knn_top1`` and ``probe_top1`` of the features of held-out images.

        Args:
            model: holds the backbone as ``backbone``; in eval mode.
            precision: that it was prepared for.
        """
        (bank, bank_labels), (features, labels) = (self._features(model, precision, part) for part in self.parts)
        scores: dict[str, float] = {}
        if self.ranks.main:
            on = self.ranks.device
            four = (bank.to(on), bank_labels.to(on), features.to(on), labels.to(on))
            scores = {"knn_top1": knn_top1(*four, k=self.config.knn_k), "probe_top1": probe_top1(*four)}
        return dict(self.ranks.gather(scores)[0])

    def _features(self, model: Any, precision: Precision, part: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return features (n, D) in fp32 and classes (n,) of all images, in order, on the CPU."""
        config, ranks, mine = self.config, self.ranks, []
        # made anew each time: the processes that load images end with it
        loader = make_loader(
            part, self.transform, batch_size=config.eval_batch_size, shuffle=False, seed=config.seed,
            workers=self.workers, max_pixels=config.max_pixels,
        )  # fmt: skip
        for images, labels in share(loader, ranks, whole=True):
            ranks.check()
            (seen,), _ = precision.before_forward(model, (images.to(ranks.device),), {})
            mine.append((model.backbone(seen).float().cpu(), labels))
        precision.before_eval(model)
        parts = ranks.gather(mine)
        batches = [parts[i % ranks.world][i // ranks.world] for i in range(sum(map(len, parts)))]
        return torch.cat([rows for rows, _ in batches]), torch.cat([labels for _, labels in batches])


def make_probe(
    config: PretrainConfig, audit: DataAudit, transform: Transform, workers: int, ranks: Ranks
) -> FeatureProbe | None:
    """Return the probe of a run; None without one.

    Raises:
        DataError: ``--probe on``, and the images have no classes.
    """
    if config.probe == "off" or (config.probe == "auto" and config.method != "dino"):
        return None
    parts = classes_of(audit)
    if parts is None:
        if config.probe == "on":
            raise DataError(
                f"`--probe` on: the images of {audit.root} are not in two or more class folders; sort them, or give "
                "--probe off"
            )
        return None
    bank = parts[0]
    if len(bank) > config.probe_images:
        # every n-th: files come class by class
        bank = [bank[i * len(bank) // config.probe_images] for i in range(config.probe_images)]
    return FeatureProbe((bank, parts[1]), transform, config, workers, ranks)


def describe_scores(scores: Mapping[str, float]) -> str:
    """Return the accuracies in words."""
    names = {"knn_top1": "k-NN", "probe_top1": "linear probe"}
    return ", ".join(f"{names[key]} {console.percent(value, 1)}" for key, value in scores.items())


def classes_of(audit: DataAudit) -> tuple[list[Sample], list[Sample]] | None:
    """Return training and held-out images labelled by their class folder; None unless all are in two or more.

    Of a labelled run these are its own labels. Otherwise the class folder is the first one below ``train/``, ``val/``
    or, without a split, below the root.
    """
    if audit.classes:
        return list(audit.train), list(audit.val)
    parts = audit.train, audit.val
    names = [[_folder(sample.path, audit) for sample in part] for part in parts]
    known = sorted({name for part in names for name in part if name is not None})
    if len({*names[0]}) < 2 or any(name is None for part in names for name in part):
        return None
    numbers = {name: i for i, name in enumerate(known)}
    train, val = (
        [Sample(sample.path, numbers[name]) for sample, name in zip(part, own, strict=True) if name is not None]
        for part, own in zip(parts, names, strict=True)
    )
    return train, val


def _folder(path: Path, audit: DataAudit) -> str | None:
    inner = path.relative_to(audit.root).parts[:-1]
    if audit.layout == "split" or (inner and inner[0].lower() in TRAIN_NAMES):
        inner = inner[1:]
    return class_name(inner[0]) if inner else None

"""Reads, weighs and scores the images of a run by the kind of its labels."""

from typing import Any, cast

import numpy as np
import torch

from vtk.card import InputSpec
from vtk.data.audit.folder_scan import scan
from vtk.data.audit.multilabel_scan import scan_multi
from vtk.data.audit.result import DataAudit
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.samplers import BalancedSampler, EpochSampler, RepeatSampler, balanced_weights
from vtk.evaluation.metrics import Metrics
from vtk.evaluation.multilabel import MultiLabelMetrics
from vtk.training.objectives.base import Classification
from vtk.training.objectives.binary import Binary
from vtk.training.objectives.multilabel import MultiLabel, positive_weights
from vtk.training.options.scratch import ScratchOptions
from vtk.training.run_config import RunConfig

Scores = Metrics | MultiLabelMetrics


def read_data(
    config: RunConfig, spec: InputSpec, *, show_progress: bool, decoding: Decoding | None = None
) -> DataAudit:
    """Scan the images of a run; see `vtk.data.scan` and `vtk.data.audit.multilabel_scan` for what they raise.

    ``decoding`` is that of a resumed run of version 0.1.
    """
    assert config.data is not None
    arguments: dict[str, Any] = {
        "val_split": config.val_split, "seed": config.seed, "workers": config.workers, "show_progress": show_progress,
        "on_bad_image": config.on_bad_image, "in_chans": config.in_chans, "max_pixels": config.max_pixels,
        "on_leak": config.on_leak, "field_separator": config.field_separator,
        "spec": spec, "value_range": config.value_range, "decoding": decoding,
    }  # fmt: skip
    if config.multi_label:
        return scan_multi(config.data, label_separator=config.label_separator, **arguments)
    return scan(config.data, keep_empty_classes=config.keep_empty_classes, **arguments)


def separators(config: RunConfig) -> dict[str, str]:
    """Return the separators of the run's table of labels, for its card: other commands read tables with them."""
    options = {"field_separator": config.field_separator, "label_separator": config.label_separator}
    return {name: value for name, value in options.items() if value is not None}


def make_objective(config: RunConfig, audit: DataAudit) -> Classification:
    """Return the objective of a run."""
    classes, weights = len(audit.classes), None
    mixing: dict[str, float] = {"mixup": config.mixup, "cutmix": config.cutmix, "prob": config.mix_prob}
    if isinstance(config, ScratchOptions) and config.loss != "ce":
        return Binary(
            classes, smoothing=config.smoothing, threshold=config.bce_threshold, total=config.loss == "bce-sum",
            **mixing,
        )  # fmt: skip
    if config.class_weights == "balanced":
        if config.multi_label:
            weights = positive_weights([cast(Any, sample.label) for sample in audit.train], classes)
        else:
            weights = balanced_weights(audit.train, classes)
    kind = MultiLabel if config.multi_label else Classification
    return kind(classes, smoothing=config.smoothing, weights=weights, **mixing)


def make_sampler(config: RunConfig, audit: DataAudit) -> EpochSampler | None:
    """Return the sampler of the training images; None for a shuffled pass over all of them."""
    if isinstance(config, ScratchOptions) and config.aug_repeats > 1:
        return RepeatSampler(len(audit.train), config.aug_repeats, config.seed)
    if config.sampler != "balanced":
        return None
    return BalancedSampler([sample.label for sample in audit.train], config.seed)


def describe(config: RunConfig, objective: Classification, audit: DataAudit) -> list[str]:
    """Return the lines on class imbalance, for people."""
    if config.sampler == "balanced":
        present = sum(count > 0 for count in audit.counts("train"))
        lines = [f"every class equally often: an epoch shows {len(audit.train) / present:.0f} images of each"]
    elif objective.weights is not None:
        weights = {name: float(w) for name, w in zip(audit.classes, objective.weights, strict=True) if w > 0}
        least, most = min(weights, key=weights.__getitem__), max(weights, key=weights.__getitem__)
        lines = [f"class weights from {weights[least]:.2g} ({least}) to {weights[most]:.2g} ({most})"]
        step = config.batch_size * config.accumulate if isinstance(config.batch_size, int) else None
        # few steps have an image of the class, and clipping cuts those, not the many that pull the other way
        if step is not None and config.clip_grad and not config.multi_label and weights[most] > step:
            lines.append(
                f"an image of {most} weighs more than a whole step of {step} images, which --clip-grad "
                f"{config.clip_grad:g} cuts down; --sampler balanced or --clip-grad 0 keeps what it counts"
            )
    else:
        return []
    # what a rare class gains costs frequent ones, so that top-1 may call the first, untrained epoch the best
    if config.chosen_metric == "top1" and len({count for count in audit.counts("val") if count}) > 1:
        lines.append(
            "held-out classes are of unequal size, and the best epoch is that of the best top-1, in which frequent "
            "ones count for more; --metric balanced_accuracy counts all alike"
        )
    return lines


def remember(epoch: int, metrics: Scores) -> dict[str, Any]:
    """Return the stored numbers of the best epoch; `recall` turns them into metrics again."""
    table = metrics.confusion if isinstance(metrics, Metrics) else metrics.table
    return {**metrics.numbers(), "count": metrics.count, "epoch": epoch, "confusion": torch.as_tensor(table)}


def recall(best: dict[str, Any], classes: tuple[str, ...], multi_label: bool) -> Scores:
    """Return the metrics of what `remember` returned."""
    table: np.ndarray = best["confusion"].numpy()
    if multi_label:
        return MultiLabelMetrics(best["count"], best["loss"], table, classes)
    return Metrics(best["count"], best["top1"], best["top5"], best["loss"], table, classes)

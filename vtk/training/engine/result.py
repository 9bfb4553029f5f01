"""Results of the engine (an epoch, a state to resume from, the numbers of a fit) and of a whole run."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtk.evaluation.metrics import Metrics
from vtk.evaluation.multilabel import MultiLabelMetrics
from vtk.training.policies.census import Census


@dataclass(frozen=True)
class FitState:
    """State of a run after an epoch or within one, besides the model's tensors.

    Attributes:
        epoch: epochs done.
        optimizer: its state dict.
        schedule: its state dict.
        rows: one dict of numbers per epoch done.
        scaler: state dict of the loss scaler; empty without one.
        ema: state of the average of the weights; empty without one.
        step: steps done of the epoch in progress; 0 after an epoch.
        parts: of that epoch, by process: the sums so far, random generators, and what each process counts by itself.
    """

    epoch: int
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    rows: list[dict[str, float]]
    scaler: dict[str, Any] = field(default_factory=dict)
    ema: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class EpochEnd:
    """Argument of the ``on_epoch`` of `fit`.

    Attributes:
        epoch: epochs done, from 1.
        row: ``epoch``, ``loss`` (mean over images), ``lr`` (of the last step), ``seconds``, ``images_per_second`` and
            what the objective logs; with a loss scaler also ``skipped_steps``, with a step rule of two passes
            ``perturbed_loss``, the mean loss of the second.
        state: builds the resume state; ``extra`` numbers are added to its last row.
        averaged: opens a context in which the model holds the average of its weights, if one is kept.
    """

    epoch: int
    row: dict[str, float]
    state: Callable[[Mapping[str, float]], FitState]
    averaged: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@dataclass
class FitResult:
    """Numbers of a finished run: one row per epoch, its speed (training only), and whether a callback stopped it.

    Attributes:
        signal: number of the signal that ended the run; 0 without one.
        epoch: epochs done.
        step: steps done of the epoch after them.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    images: int = 0
    seconds: float = 0.0
    stopped: bool = False
    signal: int = 0
    epoch: int = 0
    step: int = 0

    @property
    def images_per_second(self) -> float:
        """Training images per second, over this call's epochs."""
        return self.images / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class FinetuneResult:
    """Result of a run.

    Attributes:
        out: folder of the run.
        task: the best pack.
        task_last: the pack of the last epoch.
        metrics: of the best pack on the held-out images.
        best_epoch: from 1.
        rows: numbers of every epoch.
        census: trained and frozen weights.
        images_per_second: of training, without evaluation; NaN when nothing was left to train.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        memory: the memory mode that was taken.
        batch_size: images per forward pass.
        adapter: the best pack's LoRA factors as PEFT reads them; None under other policies.
        metric: by which the best epoch was chosen.
        stopped_early: whether ``--patience`` or a callback ended it before its last epoch.
        trial: ``limit`` and ``max_steps``, where they were given: the metrics are of a part of the images, or of a few
            steps.
        train_share: fraction of the training images that was used.
    """

    out: Path
    task: Path
    task_last: Path
    metrics: Metrics | MultiLabelMetrics
    best_epoch: int
    rows: list[dict[str, float]]
    census: Census
    images_per_second: float
    precision: str
    memory: str
    batch_size: int
    adapter: Path | None = None
    metric: str = "top1"
    stopped_early: bool = False
    trial: Mapping[str, int] = field(default_factory=dict)
    train_share: float = 1.0

    @property
    def top1(self) -> float:
        """Held-out accuracy of the best pack; NaN where images have several labels."""
        return self.metrics.numbers().get("top1", math.nan)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "out": str(self.out),
            "task": str(self.task),
            "task_last": str(self.task_last),
            **self.metrics.numbers(),
            "metric": self.metric,
            "best_epoch": self.best_epoch,
            "epochs": len(self.rows),
            "stopped_early": self.stopped_early,
            "trained": self.census.trained,
            "total": self.census.total,
            "images_per_second": self.images_per_second,
            "precision": self.precision,
            "memory": self.memory,
            "batch_size": self.batch_size,
            **({} if self.train_share == 1 else {"train_share": self.train_share}),
            **self.trial,
            **({} if self.adapter is None else {"adapter": str(self.adapter)}),
        }


@dataclass(frozen=True)
class TrainResult:
    """Result of a run that trained a whole model.

    Attributes:
        out: folder of the run.
        model: the checkpoint of the best epoch.
        model_last: the checkpoint of the last epoch.
        run: its numbers; ``task`` and ``task_last`` are the two checkpoints.
    """

    out: Path
    model: Path
    model_last: Path
    run: FinetuneResult

    @property
    def top1(self) -> float:
        """Held-out accuracy of the best epoch; NaN where images have several labels."""
        return self.run.top1

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = self.run.to_dict()
        del values["task"], values["task_last"], values["memory"]
        return {"out": values.pop("out"), "model": str(self.model), "model_last": str(self.model_last), **values}

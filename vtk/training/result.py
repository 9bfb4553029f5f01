"""What the engine hands out: the end of an epoch, the state to resume from, the numbers of a run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FitState:
    """What a run needs besides the model's tensors in order to go on after an epoch.

    Attributes:
        epoch: epochs done.
        optimizer: its state dict.
        schedule: its state dict.
        rows: one dict of numbers per epoch done.
    """

    epoch: int
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    rows: list[dict[str, float]]


@dataclass(frozen=True)
class EpochEnd:
    """What `fit` hands to ``on_epoch``.

    Attributes:
        epoch: epochs done, from 1.
        row: ``epoch``, ``loss`` (mean over images), ``lr`` (of the last step), ``seconds``, ``images_per_second`` and
            what the objective logs.
        state: builds the resume state; ``extra`` numbers are added to its last row.
    """

    epoch: int
    row: dict[str, float]
    state: Callable[[Mapping[str, float]], FitState]


@dataclass
class FitResult:
    """Numbers of a finished run: one row per epoch, and its speed over all epochs (training only)."""

    rows: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    images: int = 0
    seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        """Training images per second, over this call's epochs."""
        return self.images / self.seconds if self.seconds else math.nan

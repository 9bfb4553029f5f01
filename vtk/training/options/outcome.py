"""What counts as the best epoch, when a run has learned enough, and where its numbers go."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.errors import UsageError
from vtk.evaluation import choice
from vtk.training.options.checks import require

TRACKERS = ("tensorboard", "csv")


@dataclass(frozen=True)
class OutcomeOptions:
    """The metric, and early stopping."""

    metric: Literal["auto", "top1", "top5", "loss", "macro_f1", "balanced_accuracy", "mAP", "micro_f1"] = field(
        default="auto",
        metadata={
            "help": "by which the best epoch is chosen, of the held-out images; auto is top1, with --multi-label mAP"
        },
    )
    patience: int | None = field(
        default=None,
        metadata={"help": "stop after this many epochs in a row without a better one; default never"},
    )

    track: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "where the numbers of every epoch go: tensorboard (RUN/tensorboard), csv (metrics.csv, which is "
            "always written)"
        },
    )

    def _check_outcome(self) -> None:
        for name in self.track:
            require(name in TRACKERS, "track", name, " or ".join(TRACKERS))
        require(self.patience is None or self.patience >= 1, "patience", self.patience, "at least 1")

    def _metric_of(self, multi_label: bool) -> str:
        """Return the metric's name, also where it was left open."""
        known = choice.names(multi_label)
        if self.metric not in ("auto", *known):
            kind = "images with several labels" if multi_label else "images with one label (--multi-label is not given)"
            raise UsageError(f"`--metric` {self.metric} is not one of {kind}; choose {', '.join(known)}")
        return choice.default(multi_label) if self.metric == "auto" else self.metric

"""Options of the outcome: the metric of the best epoch, early stopping, and trackers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.evaluation import choice
from vtk.options import Config, Option

TRACKERS = ("tensorboard", "wandb", "mlflow", "csv")


@dataclass(frozen=True, kw_only=True)
class TrackOptions(Config):
    """Trackers of the numbers of each epoch."""

    GROUP: ClassVar[str] = "output"

    track: Annotated[
        tuple[str, ...],
        Option(
            "trackers of epoch metrics: tensorboard (RUN/tensorboard), wandb, mlflow; csv is always written",
            among=TRACKERS, allowed=f"{', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}",
        ),
    ] = ()  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OutcomeOptions(TrackOptions):
    """The metric, and early stopping."""

    GROUP: ClassVar[str] = "schedule"

    metric: Annotated[
        Literal["auto", "top1", "top5", "loss", "macro_f1", "balanced_accuracy", "mAP", "micro_f1"],
        Option("held-out metric that chooses the best epoch; auto: top1, or mAP with --multi-label"),
    ] = "auto"
    patience: Annotated[int | None, Option("early stopping: epochs without improvement (default: off)", least=1)] = None

    def _metric_of(self, multi_label: bool) -> str:
        """Return the name of the metric, also for ``auto``."""
        known = choice.names(multi_label)
        if self.metric not in ("auto", *known):
            kind = "images with several labels" if multi_label else "images with one label (--multi-label is not given)"
            raise UsageError(f"`--metric` {self.metric} is not one of {kind}; choose {', '.join(known)}")
        return choice.default(multi_label) if self.metric == "auto" else self.metric

"""The numbers of a run's epochs: which one is the best, and when there is nothing more to learn."""

from typing import Any

from vtk.evaluation import choice
from vtk.training.runs.label_kinds import Scores, recall, remember


class History:
    """Rows of the epochs done, and the numbers of the best epoch.

    Args:
        classes: names of the classes.
        metric: chooses the best epoch.
        patience: epochs without a better one after which the run stops; None for never.
        multi_label: whether an image may have several labels.

    Attributes:
        rows: numbers of every epoch.
        best: ``epoch``, the metrics and ``confusion`` of the best epoch so far; empty before the first.
    """

    def __init__(self, classes: tuple[str, ...], metric: str, patience: int | None, multi_label: bool) -> None:
        self.classes, self.metric, self.patience, self.multi_label = classes, metric, patience, multi_label
        self.rows: list[dict[str, float]] = []
        self.best: dict[str, Any] = {}

    def judge(self, epoch: int, metrics: Scores) -> bool:
        """Keep ``metrics`` if they are the best so far, and return whether they are."""
        better = not self.best or choice.rank(self.metric, metrics.numbers()) > choice.rank(self.metric, self.best)
        if better:
            self.best = remember(epoch, metrics)
        return better

    @property
    def epochs_since_best(self) -> int:
        """Epochs since the best one."""
        return int(self.rows[-1]["epoch"]) - int(self.best["epoch"]) if self.rows and self.best else 0

    def out_of_patience(self) -> bool:
        """Whether ``--patience`` ends the run."""
        return self.patience is not None and self.epochs_since_best >= self.patience

    @property
    def best_numbers(self) -> dict[str, Any]:
        """Metrics of the best epoch, for a card."""
        return {key: value for key, value in self.best.items() if key != "confusion"}

    @property
    def last_numbers(self) -> dict[str, Any]:
        """Metrics of the last epoch, for a card; rows of an older version lack the newer ones."""
        row = self.rows[-1]
        numbers = {key: row.get(f"val_{key}") for key in self.best_numbers}
        numbers |= {"count": self.best["count"], "epoch": int(row["epoch"])}
        return {key: value for key, value in numbers.items() if value is not None}

    def best_metrics(self) -> Scores:
        """Return the metrics of the best epoch."""
        return recall(self.best, self.classes, self.multi_label)

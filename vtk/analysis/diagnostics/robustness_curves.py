"""What the diagnostics of robustness share: curves of accuracy, and sentences about them."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Result, Run
from vtk.analysis.measures.accuracy import kept, margin

HALF = 0.5
"""Of a model's lead over guessing: where a curve crosses it is told as the strength that the model stands."""


def options(context: Context, title: str, most: int | None = None) -> dict[str, Any]:
    """Return the keywords that all measurements of robustness take, at most ``most`` images."""
    count = context.count if most is None else min(context.count, most)
    return {
        "spec": context.spec,
        "max_images": count,
        "share": context.share,
        "title": title if context.show_progress else "",
    }


def tall(runs: Sequence[Run]) -> float:
    """Return the height of a plot in inches whose legend, below it, has several lines for each of two runs."""
    return figures.HEIGHT + 0.9 * (len(runs) - 1)


def clean_lines(axes: Any, runs: Sequence[Run]) -> None:
    """Draw every run's accuracy on unchanged images, dotted, and that of guessing, grey."""
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        axes.axhline(100 * run.result["clean"], color=colour, linestyle=":", linewidth=1)
    axes.axhline(100 / max(run.result["classes"] for run in runs), color="#999999", linewidth=1)
    axes.set_ylim(0, 102)


def points(curve: Result) -> tuple[list[float], list[float]]:
    """Return a curve's strengths, and its accuracies in per cent."""
    return list(curve["strengths"]), [100 * accuracy for accuracy in curve["accuracies"]]


def nothing_to_lose(result: Result) -> str | None:
    """Return a sentence where the model is no better than guessing, so that its curve says nothing."""
    clean, guess = result["clean"], 1 / max(result["classes"], 1)
    if clean - guess > margin(result["images"]):
        return None
    return (
        f"On unchanged images {100 * clean:.1f} % are right, where guessing gives {100 * guess:.1f} %: there is "
        "nothing to lose, and the curves say nothing. Train the model first."
    )


def certainty(result: Result) -> str:
    """Return a sentence on how exactly accuracies over so few images are known."""
    return (
        f"Without changes {100 * result['clean']:.1f} % are right; over {result['images']} images an accuracy is known "
        f"to about ±{100 * margin(result['images']):.0f} points."
    )


def fallen(curve: Result, result: Result) -> float | None:
    """Return the smallest strength of a curve at which half of the lead over guessing is gone; None where none is."""
    for strength, accuracy in zip(curve["strengths"], curve["accuracies"], strict=True):
        left = kept(accuracy, result["clean"], result["classes"])
        if left is not None and left < HALF:
            return float(strength)
    return None


def mean(curve: Result) -> float:
    """Return the mean accuracy of a curve, as a fraction."""
    return float(sum(curve["accuracies"]) / len(curve["accuracies"]))

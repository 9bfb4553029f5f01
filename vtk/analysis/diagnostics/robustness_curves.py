"""Accuracy curves of the robustness diagnostics, and sentences about them."""

from collections.abc import Callable, Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Result, Run
from vtk.analysis.measures.accuracy import margin, remaining_lead
from vtk.evaluation.intervals import wilson

HALF = 0.5
"""Share of the lead over chance at which a curve's strength is reported."""


def measure(
    context: Context, accuracy: Callable[..., Any], title: str, most: int | None = None, **options: Any
) -> dict[str, Any]:
    """Return the result of a measure of accuracy.

    Args:
        context: model and images.
        accuracy: the measure.
        title: of its progress bar.
        most: maximum number of images; None for all.
        options: of the measure.
    """
    count = context.count if most is None else min(context.count, most)
    result: dict[str, Any] = accuracy(
        context.model, context.batches, spec=context.spec, seed=context.config.seed, max_images=count,
        share=context.share, title=title if context.show_progress else "", **options,
    ).to_dict()  # fmt: skip
    return result


def figure_height(runs: Sequence[Run]) -> float:
    """Return the height, in inches, of a plot whose legend below it has several lines per run."""
    return figures.HEIGHT + 0.9 * (len(runs) - 1)


def clean_lines(axes: Any, runs: Sequence[Run]) -> None:
    """Draw the accuracy of every run on clean images, dotted, and that of chance, grey."""
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        axes.axhline(100 * run.result["clean"], color=colour, linestyle=":", linewidth=1)
    axes.axhline(100 / max(run.result["classes"] for run in runs), color="#999999", linewidth=1)
    axes.set_ylim(0, 102)


def points(curve: Result) -> tuple[list[float], list[float]]:
    """Return a curve's strengths, and its accuracies in per cent."""
    return list(curve["strengths"]), [100 * accuracy for accuracy in curve["accuracies"]]


def nothing_to_lose(result: Result) -> str | None:
    """Return a sentence if the model is no better than chance, so that its curves are not informative."""
    clean, guess = result["clean"], 1 / max(result["classes"], 1)
    if clean - guess > margin(result["images"]):
        return None
    return (
        f"On clean images the accuracy is {100 * clean:.1f} %, where chance is {100 * guess:.1f} %: nothing can be "
        "lost, so the curves are not informative. Train the model first."
    )


def certainty(result: Result) -> str:
    """Return a sentence on the accuracy on clean images and its 95 % interval."""
    low, high = wilson(round(result["clean"] * result["images"]), result["images"])
    return (
        f"The accuracy on clean images is {100 * result['clean']:.1f} %; with {result['images']} images its 95 % "
        f"interval is {100 * low:.1f} to {100 * high:.1f} %."
    )


def half_lead_strength(curve: Result, result: Result) -> float | None:
    """Return the smallest strength of a curve at which half of the lead over chance is lost; None if there is none."""
    for strength, accuracy in zip(curve["strengths"], curve["accuracies"], strict=True):
        left = remaining_lead(accuracy, result["clean"], result["classes"])
        if left is not None and left < HALF:
            return float(strength)
    return None


def mean(curve: Result) -> float:
    """Return the mean accuracy of a curve, as a fraction."""
    return float(sum(curve["accuracies"]) / len(curve["accuracies"]))

"""``miss-rate``: predictions at the mean of two images that are neither class (Chen et al. 2022, Table 6)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.miss_rate import miss_rate

_HIGH = 0.25  # Chen et al. 2022, Table 6: 21 % with strong augmentation, 40 % with SAM, 58 % with neither


def _measure(context: Context) -> dict[str, Any]:
    return miss_rate(context.model, context.batches, max_images=context.count, seed=context.config.seed).to_dict()


def _error(result: Result) -> float:
    """Return the standard error of a share of so many pairs."""
    return math.sqrt(result["rate"] * (1 - result["rate"]) / result["pairs"])


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new(height=1.1 + 0.5 * len(runs))
    for number, (colour, run) in enumerate(zip(figures.COLOURS, runs, strict=False)):
        axes.barh(number, 100 * run.result["rate"], 0.6, color=colour, xerr=100 * _error(run.result), capsize=3)
    axes.set_yticks(range(len(runs)), [figures.label(run.label) for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    figures.finish(axes, x="misses, % of pairs", y="")
    caption = (
        "Share of pairs of images whose mean image is taken for neither of their classes, with its standard error: "
        f"{runs[0].result['pairs']} pairs."
    )
    return [Picture("miss-rate", figure, caption)]


def _read(result: Result) -> list[str]:
    sentences = [
        f"Half-way between two images the model sees neither's class in {100 * result['rate']:.1f} % of "
        f"{result['pairs']} pairs (± {100 * _error(result):.1f})."
    ]
    if result["rate"] >= _HIGH:
        sentences.append("A model that is often wrong misses here too: look at its accuracy first.")
        sentences.append(
            "A model that goes straight from one class to the other between images misses less: mixup trains that "
            "(`vtk finetune … --mixup 0.8`), and Chen et al. (2022) find the same of sharpness-aware training (`--sam "
            "0.1`)."
        )
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    return {"misses between images, share": result["rate"]}


DIAGNOSTIC = Diagnostic(
    name="miss-rate",
    title="Between images",
    source=(
        "Chen et al. 2022 (When Vision Transformers Outperform ResNets), §4.5 and Table 6, after Zhang et al. (mixup)"
    ),
    explains="The mean of two images should be taken for one of the two. A model that sees a third class there bends "
    "between its images; the lower the share of such misses, the more it behaves like a straight line.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

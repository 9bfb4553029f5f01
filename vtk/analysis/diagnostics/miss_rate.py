"""``miss-rate``: predictions at the mean of two images that are neither class (Chen et al. 2022, Table 6)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.measurement import as_chen, on_images, sentence
from vtk.analysis.measures.miss_rate import miss_rate

_HIGH = 0.25  # Chen et al. 2022, Table 6: 21 % with strong augmentation, 40 % with SAM, 58 % with neither


def _measure(context: Context) -> dict[str, Any]:
    return miss_rate(context.model, context.batches, max_images=context.count, seed=context.config.seed).to_dict()


def _error(result: Result) -> float:
    """Return the standard error of the rate."""
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
        "Share of image pairs whose mean is classified as neither of their two classes, with its standard error, over "
        f"{runs[0].result['pairs']} pairs."
    )
    return [Picture("miss-rate", figure, caption)]


def _read(result: Result) -> list[str]:
    sentences = [
        f"The mean of two images is classified as neither of their classes for {100 * result['rate']:.1f} % of "
        f"{result['pairs']} pairs (± {100 * _error(result):.1f})."
    ]
    sentences.append(sentence(result))
    if as_chen(result) and result["rate"] >= _HIGH:
        sentences.append("A model with a low accuracy misses here too: check its accuracy first.")
        sentences.append(
            "A model that is nearly linear between images misses less: mixup trains this (`vtk finetune … --mixup "
            "0.8`), and so does sharpness-aware training (`--sam 0.1`; Chen et al. 2022)."
        )
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    return {f"misses between images, share{on_images(result)}": result["rate"]}


DIAGNOSTIC = Diagnostic(
    name="miss-rate",
    title="Miss rate between images",
    source=(
        "Chen et al. 2022 (When Vision Transformers Outperform ResNets), §4.5 and Table 6, after Zhang et al. (mixup)"
    ),
    explains=(
        "The mean of two images should be classified as one of their classes. A third class there shows that the "
        "model is not linear between its images; the lower this miss rate, the more linear it is."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

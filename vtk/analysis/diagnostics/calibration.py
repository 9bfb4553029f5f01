"""``calibration``: calibration of the model's probabilities (Park and Kim 2022, Figure F.1a)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.calibration import model_calibration

_ERRORS = 2.0  # standard errors of the accuracy: a smaller gap may be due to chance


def _measure(context: Context) -> dict[str, Any]:
    return model_calibration(
        context.model, context.batches, max_images=context.count, seed=context.config.seed
    ).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (top, bottom) = figures.new(rows=2, height=2.7)
    top.plot([0, 100], [0, 100], "--", color="#777777", linewidth=1, label="calibrated")
    for number, run in enumerate(runs):
        colour, rows = figures.COLOURS[number], [row for row in run.result["bins"] if row["count"]]
        width = 100 / len(run.result["bins"]) / len(runs)
        left = [100 * row["low"] + number * width for row in rows]
        style: dict[str, Any] = {"width": 0.92 * width, "align": "edge", "color": colour}
        label = figures.label(run.label) if len(runs) > 1 else None
        top.bar(left, [100 * row["accuracy"] for row in rows], alpha=0.75, label=label, **style)
        sure = [100 * row["confidence"] for row in rows]
        top.plot(sure, sure, "o", color=colour, markersize=5, markeredgecolor="white", markeredgewidth=0.7)
        bars = bottom.bar(left, [row["count"] for row in rows], alpha=0.75, **style)
        if len(runs) == 1:
            for text in bottom.bar_label(bars, fontsize=8, padding=2):
                text.set_bbox({"color": "white", "alpha": 0.8, "pad": 0.5})
        mean, share = 100 * run.result["confidence"], 100 * run.result["accuracy"]
        labels = [f"mean {mean:.1f} %", f"accuracy {share:.1f} %"] if len(runs) == 1 else [None, None]
        bottom.axvline(mean, color=colour, linewidth=1.3, label=labels[0])
        bottom.axvline(share, color=colour, linewidth=1.3, linestyle=":", label=labels[1])
    figures.finish(top, x="", y="correct, % of the bin", legend=True)
    figures.finish(bottom, x="confidence, %", y="images", legend=len(runs) == 1)
    top.set(xlim=(0, 100), ylim=(0, 104))
    bottom.set(xlim=(0, 100))
    bottom.margins(y=0.15)
    caption = (
        "Reliability diagram. Top: share of correct images by confidence (the probability of the most likely class); "
        "points mark the mean confidence of a bin, and a bar that ends below its point is over-confident. Bottom: "
        "images per bin; solid line, mean confidence; dotted line, accuracy."
    )
    return [Picture("calibration", figure, caption)]


def _read(result: Result) -> list[str]:
    n, accuracy = result["images"], result["accuracy"]
    gap = result["confidence"] - accuracy
    error = math.sqrt(accuracy * (1 - accuracy) / n)
    sentences = [
        f"On these {n} images the mean confidence is {100 * result['confidence']:.1f} % and the accuracy "
        f"{100 * accuracy:.1f} %; the calibration error (ECE) is {100 * result['ece']:.1f} points."
    ]
    if abs(gap) > _ERRORS * error:
        sentences.append(
            f"It is over-confident by {100 * gap:.1f} points; label smoothing and mixup lower its confidence: "
            "`vtk finetune … --smoothing 0.1 --mixup 0.8`."
            if gap > 0
            else f"It is under-confident by {-100 * gap:.1f} points; longer training, less label smoothing and no "
            "mixup raise its confidence: `vtk finetune … --epochs 20 --smoothing 0 --mixup 0`."
        )
    elif result["ece"] > result["ece_by_chance"]:
        sentences.append("It is neither over- nor under-confident on average, but it is within bins: see the diagram.")
    if result["ece"] <= result["ece_by_chance"]:
        sentences.append(
            f"By chance, a perfectly calibrated model would have up to {100 * result['ece_by_chance']:.1f} points on "
            "so few images: this error "
            + ("alone would be no evidence." if abs(gap) > _ERRORS * error else "is no evidence of miscalibration.")
        )
    if result["temperature"] is None:
        sentences.append(
            "No temperature minimises the NLL: every image is right, or the logits do not depend on the labels."
        )
    else:
        sentences.append(
            f"With temperature {result['temperature']:.2f} the ECE would be {100 * result['fitted_ece']:.1f} points "
            f"and the NLL {result['fitted_nll']:.3f} instead of {result['nll']:.3f}; the temperature was fitted on "
            "these same images, which favours it."
        )
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    numbers = {
        "ECE, points": 100 * result["ece"],
        "NLL, nats": result["nll"],
        "accuracy, %": 100 * result["accuracy"],
        "mean confidence, %": 100 * result["confidence"],
    }
    if result["temperature"] is not None:
        numbers["temperature, fitted on these images"] = result["temperature"]
        numbers["ECE with it, points"] = 100 * result["fitted_ece"]
    return numbers


DIAGNOSTIC = Diagnostic(
    name="calibration",
    title="Calibration",
    source="Park and Kim 2022 (How Do Vision Transformers Work?), Figure F.1a; Guo et al., 2017",
    explains="Of the predictions that a calibrated model makes with a confidence of 80 %, 80 % are correct. The ECE is "
    "the mean gap, in percentage points. Strong augmentation tends to make models under-confident, long training "
    "without it over-confident.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

"""``occlusion``: accuracy with the centre of every image hidden (paper B, Table 8)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.robustness_curves import (
    certainty,
    clean_lines,
    fallen,
    mean,
    nothing_to_lose,
    options,
    points,
)
from vtk.analysis.measures.occlusion import occlusion_accuracy

_PAPER = 0.5  # 112 of 224 pixels


def _measure(context: Context) -> dict[str, Any]:
    return occlusion_accuracy(context.model, context.batches, **options(context, "occlusion")).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        sides, accuracies = points(run.result["centre"])
        axes.plot(
            [100 * s for s in sides], accuracies, "o-", color=colour, markersize=4, label=figures.label(run.label)
        )
    clean_lines(axes, runs)
    axes.axvline(100 * _PAPER, color="#999999", linestyle="--", linewidth=1)
    axes.set_xlim(0, 100)
    figures.finish(axes, x="side of the hidden centre, % of the image's", y="accuracy, %", legend=len(runs) > 1)
    caption = (
        "Accuracy with a black rectangle in the centre of every image. Dotted, the accuracy without it; grey, that of "
        "guessing; dashed, the size in paper B, which hides a quarter of the area."
    )
    return [Picture("occlusion", figure, caption)]


def _read(result: Result) -> list[str]:
    if nothing := nothing_to_lose(result):
        return [nothing]
    told = [certainty(result)]
    curve = result["centre"]
    sides = curve["strengths"]
    if (paper := _at_paper(result)) is not None:
        told.append(
            f"With the centre quarter of the area black, as in paper B, {100 * paper:.1f} % are right: "
            f"{100 * (result['clean'] - paper):.1f} points fewer."
        )
    at = fallen(curve, result)
    if at is None:
        told.append(
            f"It keeps over half of its lead over guessing with {100 * max(result['areas']):.0f} % of the area hidden. "
            "So much cannot be read off the object alone: the background gives classes away. Check that they do not "
            "differ by camera, place or border."
            if sides[-1] >= 0.8
            else "It keeps over half of its lead over guessing at every size."
        )
    else:
        area = result["areas"][sides.index(at)]
        told.append(f"Half of its lead over guessing is gone once {100 * area:.0f} % of the area is hidden.")
        if at <= _PAPER:
            told.append(
                "It decides by the centre. If your objects can be covered or off-centre, train with erased rectangles "
                "and wider crops: `vtk finetune … --reprob 0.25 --crop-scale 0.3 1`."
            )
    return told


def _at_paper(result: Result) -> float | None:
    curve = result["centre"]
    pairs = dict(zip(curve["strengths"], curve["accuracies"], strict=True))
    return pairs.get(_PAPER)


def _numbers(result: Result) -> dict[str, float]:
    found = {"clean accuracy, %": 100 * result["clean"], "mean accuracy, %": 100 * mean(result["centre"])}
    if (paper := _at_paper(result)) is not None:
        found["accuracy with the centre quarter hidden, %"] = 100 * paper
    return found


DIAGNOSTIC = Diagnostic(
    name="occlusion",
    title="Occlusion",
    source="paper B (Context Broadcasting), section 4.6 and Table 8",
    explains="The centre of every image, where objects mostly are, is made black. A model that uses the whole image "
    "loses slowly; one that looks at the centre alone falls at once.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

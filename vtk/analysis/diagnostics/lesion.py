"""``lesion``: accuracy without each unit (Park and Kim 2022, Figures 10b and D.4)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.depth_plots import SHADES, WORDS, draw_by_depth
from vtk.analysis.measures.lesion import lesion_study

_SURE = 2.0  # standard errors: a smaller change may be due to the choice of images
_WORST = 3  # units that are named


def _measure(context: Context) -> dict[str, Any]:
    return lesion_study(
        context.model,
        context.batches,
        max_images=context.count,
        convolutions=context.settings.lesion_convs,
        share=context.share,
        kept=context.saved.get("rows", ()),
        save=lambda rows: context.save({"rows": rows}),
        title="lesion" if context.show_progress else "",
    ).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    def points(unit: Result) -> float | None:
        return None if unit["delta"] is None else 100 * unit["delta"]

    def doubt(unit: Result) -> float | None:
        return None if unit["error"] is None else 100 * _SURE * unit["error"]

    figure = draw_by_depth(runs, points, "Δ accuracy, points", error=doubt)
    for axes in figure.axes:
        axes.axhline(0, color="#999999", linewidth=1)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -1.0), max(high, 1.0))
    single = any(run.result.get("convolutions") for run in runs)
    passed = " A single convolution is removed by passing on its input." if single else ""
    whole = "; ".join(f"{run.label} {100 * run.result['accuracy']:.1f} %" for run in runs)
    caption = (
        "Accuracy without one unit minus that of the whole model, by depth: the unit's branch gives 0, and only the "
        f"skip connection remains.{passed} Whole model: {whole}. {SHADES} Gaps: units that cannot be removed. "
        "Vertical bars: two standard errors."
    )
    return [Picture("lesion", figure, caption)]


def _read(result: Result) -> list[str]:
    accuracy, guess = result["accuracy"], 1 / max(result["classes"], 1)
    spread = (accuracy * (1 - accuracy) / result["images"]) ** 0.5
    if accuracy - guess <= _SURE * spread:
        return [
            f"The accuracy is {100 * accuracy:.1f} %, where chance is {100 * guess:.1f} %: nothing can be lost, so the "
            "curve is not informative. Train the model first."
        ]
    units = [unit for unit in result["units"] if unit["delta"] is not None]
    hurt = sorted((u for u in units if u["delta"] < -_SURE * u["error"]), key=lambda unit: unit["delta"])
    sentences = [f"The whole model has an accuracy of {100 * accuracy:.1f} % over {result['images']} images."]
    if hurt:
        worst = ", ".join(f"{u['name']} ({_points(u['delta'])} points)" for u in hurt[:_WORST])
        sentences.append(f"The most important units are: {worst}.")
    for kind, one in _words(result).items():
        own = [unit["delta"] for unit in units if unit["kind"] == kind]
        if own:
            sentences.append(f"Without {one} it changes by {_points(sum(own) / len(own))} points on average.")
    idle = [u["name"] for u in units if abs(u["delta"]) <= _SURE * u["error"] or u["delta"] == 0]
    if idle:
        shown = ", ".join(idle[:_WORST]) + (" …" if len(idle) > _WORST else "")
        sentences.append(
            f"{len(idle)} of {len(units)} units can be removed, one at a time, without a change that is significant on "
            f"{result['images']} images: {shown}. Removing several at once may change more."
        )
    better = [u for u in units if u["delta"] > _SURE * u["error"]]
    if better:
        best = max(better, key=lambda unit: unit["delta"])
        sentences.append(f"The accuracy is higher without {best['name']} ({_points(best['delta'])} points).")
    return sentences


def _words(result: Result) -> dict[str, str]:
    """Return each kind of unit with its article."""
    single = {"conv": "a convolution"} if result.get("convolutions") else {}  # absent in results of version 0.1
    return {kind: one for kind, (one, _) in WORDS.items()} | single


def _points(delta: float) -> str:
    return f"{100 * delta:+.1f}".replace("-", "−")


def _numbers(result: Result) -> dict[str, float]:
    units = [unit for unit in result["units"] if unit["delta"] is not None]
    numbers = {"accuracy of the whole model": result["accuracy"]}
    for kind, one in _words(result).items():
        own = [unit["delta"] for unit in units if unit["kind"] == kind]
        if own:
            numbers[f"change of accuracy without {one}"] = sum(own) / len(own)
    numbers["change of accuracy without the unit it needs most"] = min(unit["delta"] for unit in units)
    return numbers


DIAGNOSTIC = Diagnostic(
    name="lesion",
    title="Lesion study",
    source="Park and Kim 2022 (How Do Vision Transformers Work?), Figures 10b and D.4; Bhojanapalli et al. 2021",
    explains=(
        "Accuracy lost when one unit is removed: far below 0, the model needs it; near 0, other units do the same "
        "work. In models with stages Park and Kim (2022) find that convolutions at the beginning of a stage and "
        "attention at its end matter most."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("lesion_convs",),
    needs=frozenset({"labels", "one-label"}),
)

"""``occlusion``: accuracy with the centre of every image hidden (Hyeon-Woo et al. 2023, Table 8)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics import robustness_curves as robustness
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.occlusion import occlusion_accuracy

_PAPER = 0.5  # 112 of 224 pixels


def _measure(context: Context) -> dict[str, Any]:
    return robustness.measure(context, occlusion_accuracy, "occlusion")


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        sides, accuracies = robustness.points(run.result["centre"])
        axes.plot(
            [100 * s for s in sides], accuracies, "o-", color=colour, markersize=4, label=figures.label(run.label)
        )
    robustness.clean_lines(axes, runs)
    axes.axvline(100 * _PAPER, color="#999999", linestyle="--", linewidth=1)
    axes.set_xlim(0, 100)
    figures.finish(axes, x="side of the hidden centre, % of the image", y="accuracy, %", legend=len(runs) > 1)
    caption = (
        "Accuracy with a black rectangle in the centre of every image. Dotted: clean accuracy. Grey: chance. Dashed: "
        "the size in Hyeon-Woo et al. (2023), a quarter of the area."
    )
    return [Picture("occlusion", figure, caption)]


def _read(result: Result) -> list[str]:
    if nothing := robustness.nothing_to_lose(result):
        return [nothing]
    sentences = [robustness.certainty(result)]
    curve = result["centre"]
    sides = curve["strengths"]
    if (paper := _at_paper(result)) is not None:
        sentences.append(
            "With a centre quarter of the area black, as in Hyeon-Woo et al. (2023), the accuracy is "
            f"{100 * paper:.1f} %: {100 * (result['clean'] - paper):.1f} points lower."
        )
    at = robustness.half_lead_strength(curve, result)
    if at is None:
        sentences.append(
            f"Over half of the lead over chance is left with {100 * max(result['areas']):.0f} % of the area hidden. "
            "The objects alone cannot explain that: the background reveals the classes. Check that they do not differ "
            "by camera, place or border."
            if sides[-1] >= 0.8
            else "Over half of the lead over chance is left at every size."
        )
    else:
        area = result["areas"][sides.index(at)]
        sentences.append(f"Half of the lead over chance is lost with {100 * area:.0f} % of the area hidden.")
        if at <= _PAPER:
            sentences.append(
                "The model relies on the centre. If your objects can be covered or off-centre, train with random "
                "erasing and smaller crops: `vtk finetune … --reprob 0.25 --crop-scale 0.3 1`."
            )
    return sentences


def _at_paper(result: Result) -> float | None:
    curve = result["centre"]
    pairs = dict(zip(curve["strengths"], curve["accuracies"], strict=True))
    return pairs.get(_PAPER)


def _numbers(result: Result) -> dict[str, float]:
    numbers = {"clean accuracy, %": 100 * result["clean"], "mean accuracy, %": 100 * robustness.mean(result["centre"])}
    if (paper := _at_paper(result)) is not None:
        numbers["accuracy with the centre quarter hidden, %"] = 100 * paper
    return numbers


DIAGNOSTIC = Diagnostic(
    name="occlusion",
    title="Occlusion",
    source=(
        "Hyeon-Woo et al. 2023 (Scratching Visual Transformer's Back with Uniform Attention), section 4.6 and Table 8"
    ),
    explains=(
        "The centre of every image, where most objects are, is made black. A model that uses the whole image loses "
        "accuracy slowly, one that uses only the centre loses it at once."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

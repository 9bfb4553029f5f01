"""``attacks``: accuracy under FGSM and PGD-10 (paper B, Table 8; paper D, Table 7)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.robustness_curves import (
    certainty,
    clean_lines,
    fallen,
    nothing_to_lose,
    options,
    points,
    tall,
)
from vtk.analysis.measures.attacks import attack_accuracy

_MOST = 192  # images: PGD takes the time of some 20 forward passes of each at every radius
_STYLES = ("o-", "s--")


def _measure(context: Context) -> dict[str, Any]:
    config = context.config
    found = attack_accuracy(
        context.model, context.batches, epsilons=config.epsilons, seed=config.seed, **options(context, "attacks", _MOST)
    )
    return found.to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new(height=tall(runs))
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        name = figures.label(run.label)
        for style, curve in zip(_STYLES, run.result["curves"], strict=True):
            x, accuracies = points(curve)
            label = f"{name}: {curve['name']}" if len(runs) > 1 else curve["name"]
            axes.plot([0, *x], [100 * run.result["clean"], *accuracies], style, color=colour, markersize=4, label=label)
    clean_lines(axes, runs)
    axes.set_xlim(left=0)
    figures.finish(axes, x="largest change of a pixel, 255ths of its range", y="accuracy, %", legend=True)
    caption = (
        "Accuracy where every pixel may be changed by at most so much to mislead the model: in one step (FGSM) or in "
        "ten (PGD), by an attacker who knows the weights. Dotted, the accuracy without attack; grey, that of guessing, "
        "below which an attack can go."
    )
    return [Picture("attacks", figure, caption)]


def _read(result: Result) -> list[str]:
    if nothing := nothing_to_lose(result):
        return [nothing]
    told = [certainty(result)]
    for curve in result["curves"]:
        pairs = zip(curve["strengths"], curve["accuracies"], strict=True)
        values = ", ".join(f"{100 * accuracy:.1f} % at {strength:g}/255" for strength, accuracy in pairs)
        told.append(f"Right under {curve['name']}: {values}.")
    pgd = result["curves"][-1]
    at = fallen(pgd, result)
    if at is None:
        told.append(
            f"It keeps over half of its lead over guessing up to {pgd['strengths'][-1]:g}/255: try larger `--epsilons`."
        )
    else:
        told.append(
            f"A change of {at:g}/255 takes half of its lead over guessing; so it is with models that were not trained "
            "against it. If somebody may mislead yours, train on attacked images (`vtk finetune … --adversarial "
            f"{max(at, 1):g}`), which costs accuracy on clean ones; paper D adds `--sam auto`, by which its ViTs gain "
            "5 to 8 points under PGD-10."
        )
    return told


def _numbers(result: Result) -> dict[str, float]:
    found = {"clean accuracy, %": 100 * result["clean"]}
    for curve in result["curves"]:
        for strength, accuracy in zip(curve["strengths"], curve["accuracies"], strict=True):
            found[f"accuracy, {curve['name']} at {strength:g}/255, %"] = 100 * accuracy
    return found


DIAGNOSTIC = Diagnostic(
    name="attacks",
    title="Attacks",
    source="FGSM: paper B (Context Broadcasting), Table 8; PGD-10: paper D (SAM), appendix B and Table 7",
    explains="Every pixel is changed by at most ε so that the loss grows: the accuracy that is left is what a model "
    f"stands in the worst case. Measured on the first {_MOST} images, as it takes many passes.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("epsilons",),
    needs=frozenset({"labels", "one-label"}),
)

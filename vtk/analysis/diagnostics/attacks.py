"""``attacks``: accuracy under FGSM and PGD-10 (Hyeon-Woo et al. 2023, Table 8; Chen et al. 2022, Table 7)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics import robustness_curves as robustness
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.attacks import attack_accuracy

_MOST = 192  # images: PGD costs about 20 forward passes per image and radius
_STYLES = ("o-", "s--")


def _measure(context: Context) -> dict[str, Any]:
    return robustness.measure(context, attack_accuracy, "attacks", _MOST, epsilons=context.settings.epsilons)


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new(height=robustness.figure_height(runs))
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        name = figures.label(run.label)
        for style, curve in zip(_STYLES, run.result["curves"], strict=True):
            x, accuracies = robustness.points(curve)
            label = f"{name}: {curve['name']}" if len(runs) > 1 else curve["name"]
            axes.plot([0, *x], [100 * run.result["clean"], *accuracies], style, color=colour, markersize=4, label=label)
    robustness.clean_lines(axes, runs)
    axes.set_xlim(left=0)
    figures.finish(axes, x="largest change of a pixel, 255ths of its range", y="accuracy, %", legend=True)
    caption = (
        "Accuracy by the largest change of a pixel, ε, that an attacker who knows the weights may make, in one step "
        "(FGSM) or in ten (PGD). Dotted: without attack. Grey: chance, below which an attack can go."
    )
    return [Picture("attacks", figure, caption)]


def _read(result: Result) -> list[str]:
    if nothing := robustness.nothing_to_lose(result):
        return [nothing]
    sentences = [robustness.certainty(result)]
    for curve in result["curves"]:
        pairs = zip(curve["strengths"], curve["accuracies"], strict=True)
        values = ", ".join(f"{100 * accuracy:.1f} % at {strength:g}/255" for strength, accuracy in pairs)
        sentences.append(f"Accuracy under {curve['name']}: {values}.")
    fgsm, pgd = result["curves"]
    if any(ten > one for one, ten in zip(fgsm["accuracies"], pgd["accuracies"], strict=True)):
        sentences.append(
            "Where PGD leaves more than FGSM, its ten steps of an eighth of ε from a random start do not reach what "
            "one step of ε reaches."
        )
    at = robustness.half_lead_strength(pgd, result)
    if at is None:
        sentences.append(
            f"Over half of the lead over chance is left at {pgd['strengths'][-1]:g}/255: try larger `--epsilons`."
        )
    else:
        sentences.append(
            f"At ε = {at:g}/255 half of the lead over chance is lost, which is common without adversarial training. If "
            "your model may be attacked, train on attacked images (`vtk finetune … --adversarial "
            f"{max(at, 1):g}`), which costs clean accuracy; Chen et al. (2022) add `--sam auto`, with which their ViTs "
            "gain 5 to 8 points under PGD-10."
        )
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    numbers = {"clean accuracy, %": 100 * result["clean"]}
    for curve in result["curves"]:
        for strength, accuracy in zip(curve["strengths"], curve["accuracies"], strict=True):
            numbers[f"accuracy, {curve['name']} at {strength:g}/255, %"] = 100 * accuracy
    return numbers


DIAGNOSTIC = Diagnostic(
    name="attacks",
    title="Adversarial attacks",
    source=(
        "FGSM: Hyeon-Woo et al. 2023 (Scratching Visual Transformer's Back with Uniform Attention), Table 8; PGD-10: "
        "Chen et al. 2022 (When Vision Transformers Outperform ResNets), appendix B and Table 7"
    ),
    explains="Every pixel is changed by at most ε so that the loss grows. What is left of the accuracy is no "
    "guarantee: another attack may leave less. "
    f"Measured on the first {_MOST} images, because it takes many passes.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("epsilons",),
    needs=frozenset({"labels", "one-label"}),
)

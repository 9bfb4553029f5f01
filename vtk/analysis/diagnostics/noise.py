"""``noise``: accuracy under Gaussian noise, shot noise and blur of growing strength (paper B, Table 9)."""

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
    tall,
)
from vtk.analysis.measures.noise import noise_accuracy

_STYLES = {"Gaussian noise": "o-", "shot noise": "s--"}
_GIVEN = {  # how a strength is told
    "Gaussian noise": "a deviation of {:g}/255",
    "shot noise": "a deviation of {:g}/255 of white",
    "Gaussian blur": "a deviation of {:g} pixels",
}


def _measure(context: Context) -> dict[str, Any]:
    seed = context.config.seed
    return noise_accuracy(context.model, context.batches, seed=seed, **options(context, "noise and blur")).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new(height=tall(runs))
    blurred, (below,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        name = figures.label(run.label)
        for curve in run.result["curves"]:
            x, accuracies = points(curve)
            if curve["name"] in _STYLES:
                label = f"{name}: {curve['name']}" if len(runs) > 1 else curve["name"]
                axes.plot(x, accuracies, _STYLES[curve["name"]], color=colour, markersize=4, label=label)
            else:
                below.plot(x, accuracies, "o-", color=colour, markersize=4, label=name)
    for one, x_label, legend in (
        (axes, "deviation, 255ths of the pixel range", True),
        (below, "deviation of the blur, pixels", len(runs) > 1),
    ):
        clean_lines(one, runs)
        one.set_xscale("log", base=2)
        ticks = one.get_lines()[0].get_xdata()
        one.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        one.minorticks_off()
        figures.finish(one, x=x_label, y="accuracy, %", legend=legend)
    end = "Dotted, the accuracy without it; grey, that of guessing."
    return [
        Picture(
            "noise", figure, f"Accuracy under Gaussian noise and shot noise; this one's deviation is of white. {end}"
        ),
        Picture("noise-blur", blurred, f"Accuracy under Gaussian blur, in pixels of the model's input. {end}"),
    ]


def _read(result: Result) -> list[str]:
    if nothing := nothing_to_lose(result):
        return [nothing]
    told = [certainty(result)]
    early = []
    for curve in result["curves"]:
        name, given = curve["name"], _GIVEN[curve["name"]]
        at = fallen(curve, result)
        last = curve["strengths"][-1]
        begun = name[0].upper() + name[1:]
        if at is None:
            told.append(f"{begun}: up to {given.format(last)} it keeps over half of its lead over guessing.")
        else:
            told.append(f"{begun}: by {given.format(at)} half of its lead over guessing is gone.")
            early += [name] if at < last else []
    if early:
        kinds = " and ".join(early)
        told.append(
            f"If your cameras give images with {kinds}: in paper B Context Broadcasting (`vtk finetune … --cb`) loses "
            "less to them, in paper D training for a flat loss (`--sam auto`). Compare with `vtk analyze --compare`."
        )
    return told


def _numbers(result: Result) -> dict[str, float]:
    means = {f"mean accuracy, {curve['name']}, %": 100 * mean(curve) for curve in result["curves"]}
    return {"clean accuracy, %": 100 * result["clean"], **means}


DIAGNOSTIC = Diagnostic(
    name="noise",
    title="Noise and blur",
    source="paper B (Context Broadcasting), Table 9",
    explains="Pixels get Gaussian noise, or the shot noise of a camera with few photons, or are blurred, ever more "
    "strongly. A robust model's curve stays high for long.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

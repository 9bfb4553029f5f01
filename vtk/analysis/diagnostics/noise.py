"""``noise``: accuracy under noise and blur of increasing strength (Hyeon-Woo et al. 2023, Table 9)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics import robustness_curves as robustness
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.noise import noise_accuracy

_STYLES = {"Gaussian noise": "o-", "shot noise": "s--"}
_GIVEN = {  # how a strength is written
    "Gaussian noise": "a deviation of {:g}/255",
    "shot noise": "a deviation of {:g}/255 of white",
    "Gaussian blur": "a deviation of {:g} pixels",
}


def _measure(context: Context) -> dict[str, Any]:
    return robustness.measure(context, noise_accuracy, "noise and blur")


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new(height=robustness.figure_height(runs))
    blurred, (below,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        name = figures.label(run.label)
        for curve in run.result["curves"]:
            x, accuracies = robustness.points(curve)
            if curve["name"] in _STYLES:
                label = f"{name}: {curve['name']}" if len(runs) > 1 else curve["name"]
                axes.plot(x, accuracies, _STYLES[curve["name"]], color=colour, markersize=4, label=label)
            else:
                below.plot(x, accuracies, "o-", color=colour, markersize=4, label=name)
    for one, x_label, legend in (
        (axes, "deviation, 255ths of the pixel range", True),
        (below, "deviation of the blur, pixels", len(runs) > 1),
    ):
        robustness.clean_lines(one, runs)
        one.set_xscale("log", base=2)
        ticks = one.get_lines()[0].get_xdata()
        one.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        one.minorticks_off()
        figures.finish(one, x=x_label, y="accuracy, %", legend=legend)
    end = "Dotted: clean accuracy. Grey: chance."
    return [
        Picture(
            "noise",
            figure,
            (f"Accuracy under Gaussian noise and shot noise (standard deviation at a white pixel). {end}"),
        ),
        Picture("noise-blur", blurred, f"Accuracy under Gaussian blur, in pixels of the model's input. {end}"),
    ]


def _read(result: Result) -> list[str]:
    if nothing := robustness.nothing_to_lose(result):
        return [nothing]
    sentences = [robustness.certainty(result)]
    early = []
    for curve in result["curves"]:
        name, given = curve["name"], _GIVEN[curve["name"]]
        at = robustness.half_lead_strength(curve, result)
        last = curve["strengths"][-1]
        begun = name[0].upper() + name[1:]
        if at is None:
            sentences.append(f"{begun}: over half of the lead over chance is left at {given.format(last)}.")
        else:
            sentences.append(f"{begun}: half of the lead over chance is lost at {given.format(at)}.")
            early += [name] if at < last else []
    if early:
        kinds = " and ".join(early)
        sentences.append(
            f"If your images have {kinds}: Context Broadcasting (`vtk finetune … --cb`; Hyeon-Woo et al. 2023) and "
            "sharpness-aware training (`--sam auto`; Chen et al. 2022) lose less accuracy. Compare with `vtk analyze "
            "--compare`."
        )
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    means = {f"mean accuracy, {curve['name']}, %": 100 * robustness.mean(curve) for curve in result["curves"]}
    return {"clean accuracy, %": 100 * result["clean"], **means}


DIAGNOSTIC = Diagnostic(
    name="noise",
    title="Noise and blur",
    source="Hyeon-Woo et al. 2023 (Scratching Visual Transformer's Back with Uniform Attention), Table 9",
    explains=(
        "Images get Gaussian noise, shot noise as of a camera with little light, or blur, at increasing strength. The "
        "curve of a robust model stays high for longer."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

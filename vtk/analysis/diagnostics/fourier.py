"""``fourier``: low and high frequencies of feature maps, by depth (Park and Kim 2022, Figures 2a, 8 and D.2)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics import depth_plots as depth
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.fourier import feature_spectra

_FEW = 0.25  # of the units of a kind: "hardly any"
_EARLY = 1 / 3  # of the depth, where Park and Kim (2022) saw attention raise high frequencies


def _measure(context: Context) -> dict[str, Any]:
    return feature_spectra(context.model, context.batches, max_images=context.count).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    high = depth.draw_by_depth(runs, lambda unit: unit["high"], "Δ log amplitude, nats")
    caption = (
        "Δ log amplitude at the highest frequency of the half diagonal, by depth: mean over images and channels of "
        "ln(|FFT| + 10⁻⁶), minus the same at frequency 0. For a map of even height h this is bin h/2 − 1, the last "
        f"below π, which Park and Kim plot as 1.0 π. {depth.SHADES}"
    )
    return [Picture("fourier", high, caption), _curves(runs)]


def _curves(runs: Sequence[Run]) -> Picture:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    figure, places = figures.new(rows=len(runs), height=figures.HEIGHT if len(runs) == 1 else 2.7)
    colours = colormaps["viridis"]
    for axes, run in zip(places, runs, strict=True):
        units = run.result["units"]
        for at, unit in zip(figures.depth(len(units)), units, strict=True):
            axes.plot(unit["frequencies"], unit["amplitudes"], color=colours(at), linewidth=1,
                      marker="o" if len(unit["frequencies"]) < 3 else None, markersize=3)  # fmt: skip
        title = figures.label(run.label) if len(runs) > 1 else ""
        figures.finish(axes, x="frequency, π per position" if axes is places[-1] else "", y="Δ log amplitude, nats",
                       title=title)  # fmt: skip
        axes.set_xlim(0, 1)
    figure.colorbar(ScalarMappable(cmap=colours), ax=places, label="normalised depth")
    caption = (
        "Δ log amplitude over frequency, one line for the output of each unit, from dark (first) to light (last). The "
        "frequency is the same along both axes (half diagonal of the transform)."
    )
    return Picture("fourier-curves", figure, caption)


def _read(result: Result) -> list[str]:
    changes = depth.steps(result, "high")
    sentences = depth.step_sentences(
        changes,
        lambda pairs: f"changes the amplitude of high frequencies by {depth.number(_mean(pairs))} nats on average",
        "lower",
    )
    sentences += _comparison(changes) + _early(result)
    known = [unit for unit in result["units"] if unit["high"] is not None]
    if known:
        last = known[-1]
        sentences.append(
            f"At the output of {last['name']} the highest frequency is at {depth.number(last['high'])} nats relative "
            "to the mean of the map."
        )
    else:
        sentences.append("Its maps have so few positions that 0 is their only frequency; give larger images.")
    return sentences + depth.without_map(result)


def _comparison(changes: dict[str, list[tuple[float, float]]]) -> list[str]:
    msa, mlp = changes.get("msa", []), changes.get("mlp", [])
    if not msa or not mlp:
        return []
    low, high = depth.share_lowered(msa) > 1 / 2, depth.share_lowered(mlp) < 1 / 2
    if low and high:
        return ["So most MSAs lower high frequencies and most MLPs raise them, as Park and Kim (2022) find for ViTs."]
    which = "MLPs do" if low else "MSAs do" if high else "MSAs and MLPs do"
    return [
        "Park and Kim (2022) find for ViTs that most MSAs lower high frequencies and most MLPs raise them; here "
        f"{which} not."
    ]


def _early(result: Result) -> list[str]:
    units = result["units"]
    first = units[: max(2, round(len(units) * _EARLY))]
    pairs = depth.steps({"units": first}, "high").get("msa", [])
    if len(pairs) < 2 or depth.share_lowered(pairs) > _FEW:
        return []
    return [
        "In the first third of the model attention raises high frequencies, as convolutions do; Park and Kim (2022) "
        "therefore use convolutions there. If you train from scratch, try `vtk train … --stem conv`."
    ]


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(behind - before for before, behind in pairs) / len(pairs)


def _numbers(result: Result) -> dict[str, float]:
    names = "high-frequency change by {}, nats", "high-frequency Δ log amplitude at the end, nats"
    return depth.step_numbers(result, depth.steps(result, "high"), _mean, "high", names)


DIAGNOSTIC = Diagnostic(
    name="fourier",
    title="Frequencies of feature maps",
    source="Park and Kim 2022 (How Do Vision Transformers Work?), Figures 2a, 8 and D.2",
    explains=(
        "Strength of fine detail in the feature maps relative to their mean: higher (nearer to 0) is more detail. "
        "Where the line falls, the unit is a low-pass filter and smooths, as attention does; where it rises, the unit "
        "sharpens, as convolutions and MLPs do."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

"""``hessian``: largest eigenvalues of each mini-batch's Hessian (Park and Kim 2022, Figures 1b and 4)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.curvature import LOWER_BOUND, OPTIONS, iteration, mean_or_none, not_converged
from vtk.analysis.diagnostics.measurement import on_images, sentence
from vtk.analysis.measures.hessian import hessian_spectrum

_MANY_NEGATIVE = 0.1  # Park and Kim (2022) call a model's loss convex whose spectrum has "a few" negative values
_CURVES = 400
_ONCE = " (the Lanczos iteration finds one that occurs several times exactly only once, `--hessian-method power` each)"


def _measure(context: Context) -> dict[str, Any]:
    settings = context.settings
    batches = context.loss_batches(settings.hessian_batch)
    return hessian_spectrum(context.model, batches, top=settings.top, **iteration(context)).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    import numpy as np

    spectra = [np.array([v for batch in run.result["values"] for v in batch]) for run in runs]
    everything = np.concatenate([*spectra, [0.0]])
    width = float(everything.max() - everything.min()) or 1.0
    x = np.linspace(everything.min() - 0.15 * width, everything.max() + 0.15 * width, _CURVES)
    figure, (axes,) = figures.new()
    for number, (colour, run, values) in enumerate(zip(figures.COLOURS, runs, spectra, strict=False)):
        density = _density(x, values, width)
        axes.plot(x, density, color=colour, label=f"{figures.label(run.label)}: {_facts(run.result)}")
        axes.fill_between(x, density, color=colour, alpha=0.15, linewidth=0)
        axes.plot(values, np.zeros_like(values), "|", color=colour, markersize=10 - 4 * number, alpha=0.8)
    axes.axvline(0, color="#999999", linewidth=1)
    figures.finish(axes, x="eigenvalue λ of the Hessian", y="density", legend=True)
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    if axes.get_legend():
        axes.get_legend().set_loc("upper left")  # not over the ticks
    once = any(run.result.get("method") == "lanczos" and len(run.result["values"][0]) > 1 for run in runs)
    caption = (
        "Density of the eigenvalues of largest magnitude over all mini-batches; each tick at the bottom is one "
        f"eigenvalue{_ONCE if once else ''}. Left of 0 the loss curves downwards; far to the right it is sharp."
    )
    return [Picture("hessian", figure, caption)]


def _density(x: Any, values: Any, width: float) -> Any:
    """Return a density estimate by a Gaussian kernel.

    The bandwidth is Silverman's for the magnitudes, because positive and negative values are two clusters whose
    distance is not their spread. It is limited to 1 to 5 percent of the axis, so that it can be seen.
    """
    import numpy as np

    sizes = np.abs(values)
    spread = float(sizes.std(ddof=1)) if len(sizes) > 1 else 0.0
    low, high = np.percentile(sizes, [25, 75])
    scale = min(spread, (high - low) / 1.34) or spread
    bandwidth = min(max(0.9 * scale * len(sizes) ** -0.2, 0.01 * width), 0.05 * width)
    kernels = np.exp(-0.5 * ((x[:, None] - values[None]) / bandwidth) ** 2)
    return kernels.mean(axis=1) / (bandwidth * np.sqrt(2 * np.pi))


def _facts(result: Result) -> str:
    positive = result["positive_mean"]
    ape = "–" if positive is None else f"{positive:.3g}"
    return f"NEP {100 * result['negative_share']:.0f} %, APE {ape}"


def _read(result: Result) -> list[str]:
    batches, negative, positive = result["values"], result["negative_share"], result["positive_mean"]
    top, upwards = len(batches[0]), lambda_max(result)
    of = "the mini-batch" if len(batches) == 1 else f"each of {len(batches)} mini-batches"
    sentences = [
        f"Of the {top} eigenvalues of largest magnitude of {of}, {100 * negative:.0f} % are negative (NEP); "
        + ("none is positive." if positive is None else f"the positive ones are {positive:.3g} on average (APE).")
    ]
    sentences.append(sentence(result))
    if upwards is not None:
        sentences.append(f"The largest curvature upwards of a mini-batch (λ_max) is {upwards:.3g} on average.")
    if negative >= _MANY_NEGATIVE:
        sentences.append(
            "So the loss curves downwards in some of its steepest directions: it is not convex here, and the model is "
            "not at a minimum of this loss. Park and Kim (2022) find this in ViTs early in training and with few "
            "images; more epochs, more images, or mean pooling instead of the class token help."
        )
    else:
        sentences.append("So the loss is close to convex in its steepest directions.")
    open_ones = {}
    if result["converged"] < 1:
        share = f"{100 * (1 - result['converged']):.0f} %"
        sentences.append(f"{share} of the eigenvalues did not converge; they are estimates.")
        open_ones["what NEP and APE are of"] = "estimates"
    if loose := _loose(result):
        whose = "" if len(batches) == 1 else f" of {loose} of {len(batches)} mini-batches"
        open_ones[f"λ_max{whose}"] = "a lower bound"
    return sentences + not_converged(result, open_ones)


def _loose(result: Result) -> int:
    """Return the number of mini-batches whose λ_max did not converge."""
    return sum(not settled for settled in result.get("lambda_max_converged", ()))


def _numbers(result: Result) -> dict[str, float]:
    end = on_images(result)
    numbers = {f"NEP, share{end}": result["negative_share"]}
    if result["positive_mean"] is not None:
        numbers[f"APE{end}"] = result["positive_mean"]
    upwards = lambda_max(result)
    if upwards is not None:
        numbers[f"λ_max of a mini-batch, mean{LOWER_BOUND if _loose(result) else ''}{end}"] = upwards
    return numbers


def lambda_max(result: Result) -> float | None:
    """Return the mean λ_max of the mini-batches; None if it is not known.

    Results of version 0.1 have the eigenvalues of largest magnitude only; the first positive one is λ_max.
    """
    return mean_or_none(result.get("lambda_max") or [
        next((value for value in batch if value is not None and value > 0), None) for batch in result["values"]
    ])  # fmt: skip


DIAGNOSTIC = Diagnostic(
    name="hessian",
    title="Hessian spectrum",
    source="Park and Kim 2022 (How Do Vision Transformers Work?), Figures 1b and 4, §2 and Appendix A.2",
    explains=(
        "The Hessian's eigenvalues are the curvatures of the loss at the weights: large positive ones mean a sharp "
        "minimum, where a small change of the weights costs much; negative ones mean that the loss is not convex."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=(*OPTIONS, "top"),
    needs=frozenset({"labels"}),
)

"""``flatness``: the loss under Gaussian noise on the weights (Chen et al. 2022, Table 1)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.measurement import on_images, sentence
from vtk.analysis.measures.flatness import average_flatness

_FAR = 2.0  # standard errors; a smaller rise may be noise
_SHARP = 1.0  # nats: the right class becomes e times less likely


def _measure(context: Context) -> dict[str, Any]:
    config = context.config
    return average_flatness(
        context.model,
        context.batches,
        sigma=config.sigma,
        draws=context.settings.draws,
        **context.loss_options(context.count),
    ).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new(height=1.2 + 0.8 * len(runs))
    labels = []
    for number, (colour, run) in enumerate(zip(figures.COLOURS, runs, strict=False)):
        result = run.result
        axes.barh(number - 0.19, result["loss"] or 0.0, 0.36, color=colour)
        error = result["standard_error"]
        axes.barh(number + 0.19, result["noisy_loss"] or 0.0, 0.36, color=colour, alpha=0.5, xerr=error, capsize=3)
        labels.append(figures.label(run.label))
    axes.set_yticks(range(len(runs)), labels)
    axes.invert_yaxis()
    figures.finish(axes, x="loss", y="")
    sigmas = " and ".join(dict.fromkeys(f"{run.result['sigma']:g}" for run in runs))
    caption = (
        f"Solid: the loss. Light: its mean under Gaussian noise of standard deviation {sigmas} on all weights, with "
        "its standard error. The larger the difference, the sharper the minimum on average."
    )
    return [Picture("flatness", figure, caption)]


def noise_rise(result: Result) -> float | None:
    """Return L^N − L, by how much noise raises the loss; None if one of them is not finite."""
    loss, noisy = result["loss"], result["noisy_loss"]
    return None if loss is None or noisy is None else float(noisy - loss)


def _read(result: Result) -> list[str]:
    loss, noisy, error, sigma = (result[name] for name in ("loss", "noisy_loss", "standard_error", "sigma"))
    if loss is None or noisy is None:
        return [
            f"With noise of standard deviation {sigma:g} on the weights the loss is not finite; try a smaller --sigma."
        ]
    rise = noisy - loss
    sentences = [
        f"Noise with standard deviation {sigma:g} on all weights changes the loss from {loss:.3g} to {noisy:.3g}"
        + ("." if error is None else f" (± {error:.2g}, {result['draws']} draws).")
    ]
    if error is not None and abs(rise) <= _FAR * error:
        sentences.append("That is within the noise of the draws: use a larger --sigma, or more --draws.")
    elif rise >= _SHARP:
        sentences.append(
            "The minimum is sharp at this noise level. Sharpness-aware training (`vtk finetune … --sam 0.1`) and "
            "strong augmentation both flatten the loss (Chen et al. 2022)."
        )
    elif rise < 0:
        sentences.append("The loss falls under noise: the model is not at a minimum of this loss.")
    sentences.append(f"{sentence(result)} Compare only results with the same --sigma.")
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    end = on_images(result)
    numbers = {
        f"loss{end}": result["loss"],
        f"loss under noise of {result['sigma']:g}{end}": result["noisy_loss"],
        f"noise rise of {result['sigma']:g}{end}": noise_rise(result),
    }
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


DIAGNOSTIC = Diagnostic(
    name="flatness",
    title="Average flatness",
    source="Chen et al. 2022 (When Vision Transformers Outperform ResNets), Table 1",
    explains="The loss when Gaussian noise is added to all weights. At a flat minimum it hardly rises. It sums up the "
    "curvature in all directions, whereas the largest Hessian eigenvalue describes the worst one only.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("sigma", "draws", "weight_decay"),
    needs=frozenset({"labels"}),
)

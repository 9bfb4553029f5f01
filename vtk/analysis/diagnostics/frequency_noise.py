"""``frequency-noise``: accuracy under noise of one frequency band (Park and Kim 2022, Figure 2b)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics import robustness_curves as robustness
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.accuracy import margin
from vtk.analysis.measures.frequency_noise import WINDOW, frequency_noise

_LOW, _HIGH = 0.3, 0.7  # of π: the lower and the upper third of the axis of Park and Kim's figure


def _measure(context: Context) -> dict[str, Any]:
    # the frequencies of a small image are further apart than the window of Park and Kim
    window = max(WINDOW, 2 / min(context.spec.size))
    return robustness.measure(context, frequency_noise, "noise by frequency", window=window)


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        x, accuracies = robustness.points(run.result["bands"])
        lost = [100 * run.result["clean"] - accuracy for accuracy in accuracies]
        axes.plot(x, lost, "o-", color=colour, markersize=4, label=figures.label(run.label))
    axes.axhline(0, color="#999999", linewidth=1)
    figures.finish(
        axes, x="centre frequency of the noise, π per pixel", y="accuracy lost, points", legend=len(runs) > 1
    )
    first = runs[0].result
    caption = (
        "Accuracy lost to noise of one frequency band, by the centre of the band, from coarse blotches (left) to "
        f"noise from pixel to pixel (right). Bands are {first['window']:.2g}π wide; all have the same root mean "
        f"square, {100 * first['rms']:g} % of the pixel range."
    )
    return [Picture("frequency-noise", figure, caption)]


def _read(result: Result) -> list[str]:
    if nothing := robustness.nothing_to_lose(result):
        return [nothing]
    low, high = (100 * lost for lost in _ends(result))
    x, accuracies = robustness.points(result["bands"])
    worst = min(range(len(x)), key=lambda i: accuracies[i])
    sentences = [
        robustness.certainty(result),
        f"Low-frequency noise (up to {_LOW:g}π) costs {low:.1f} points on average, high-frequency noise (from "
        f"{_HIGH:g}π) {high:.1f}; the worst band is at {x[worst]:g}π, with an accuracy of {accuracies[worst]:.1f} %.",
    ]
    if abs(high - low) <= 100 * margin(result["images"]):
        sentences.append(
            "The difference is within the uncertainty of so few images: the model relies no more on coarse shapes "
            "than on fine texture."
        )
    elif high > low:
        sentences.append(
            "High frequencies hurt more: the model relies on texture, as Park and Kim (2022) find for ConvNets. Their "
            "remedy is attention, in a ViT or in the last layers of a ConvNet (`vtk train … --model alternet_18`)."
        )
    else:
        sentences.append(
            "Low frequencies hurt more: the model relies on shapes rather than texture, as Park and Kim (2022) find "
            "for ViTs."
        )
    return sentences


def _ends(result: Result) -> tuple[float, float]:
    """Return the mean accuracy lost in the low and in the high bands, as fractions."""
    pairs = list(zip(result["bands"]["strengths"], result["bands"]["accuracies"], strict=True))
    low = [accuracy for centre, accuracy in pairs if centre <= _LOW]
    high = [accuracy for centre, accuracy in pairs if centre >= _HIGH]
    return result["clean"] - sum(low) / len(low), result["clean"] - sum(high) / len(high)


def _numbers(result: Result) -> dict[str, float]:
    low, high = _ends(result)
    return {
        "clean accuracy, %": 100 * result["clean"],
        "lost to low-frequency noise, points": 100 * low,
        "lost to high-frequency noise, points": 100 * high,
    }


DIAGNOSTIC = Diagnostic(
    name="frequency-noise",
    title="Noise by frequency",
    source="Park and Kim 2022 (How Do Vision Transformers Work?), section 2 and Figure 2b",
    explains=(
        "Noise of one frequency band is added to the images, equally strong in every band. Low frequencies carry "
        "shapes, high ones texture: the band that hurts most shows what the model relies on."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

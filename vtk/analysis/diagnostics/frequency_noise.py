"""``frequency-noise``: accuracy under noise of one band of frequencies (paper C, Figure 2b)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.robustness_curves import certainty, nothing_to_lose, options, points
from vtk.analysis.measures.accuracy import margin
from vtk.analysis.measures.frequency_noise import WINDOW, frequency_noise

_LOW, _HIGH = 0.3, 0.7  # of π: the lower and the upper third of the axis of paper C's figure


def _measure(context: Context) -> dict[str, Any]:
    # a small image's frequencies lie further apart than paper C's window
    window = max(WINDOW, 2 / min(context.spec.size))
    seed = context.config.seed
    found = frequency_noise(
        context.model, context.batches, window=window, seed=seed, **options(context, "noise by frequency")
    )
    return found.to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        x, accuracies = points(run.result["bands"])
        lost = [100 * run.result["clean"] - accuracy for accuracy in accuracies]
        axes.plot(x, lost, "o-", color=colour, markersize=4, label=figures.label(run.label))
    axes.axhline(0, color="#999999", linewidth=1)
    figures.finish(
        axes, x="centre frequency of the noise, π per pixel", y="accuracy lost, points", legend=len(runs) > 1
    )
    first = runs[0].result
    caption = (
        "Accuracy lost to noise of one band of frequencies, by the band's centre; on the left coarse patches, on the "
        f"right a pattern from pixel to pixel. Bands are {first['window']:.2g}π wide, and the noise of each has the "
        f"same root mean square, {100 * first['rms']:g} % of the pixel range."
    )
    return [Picture("frequency-noise", figure, caption)]


def _read(result: Result) -> list[str]:
    if nothing := nothing_to_lose(result):
        return [nothing]
    low, high = (100 * lost for lost in _ends(result))
    x, accuracies = points(result["bands"])
    worst = min(range(len(x)), key=lambda i: accuracies[i])
    told = [
        certainty(result),
        f"Noise of low frequency (to {_LOW:g}π) costs {low:.1f} points on average, noise of high frequency (from "
        f"{_HIGH:g}π) {high:.1f}; worst is the band around {x[worst]:g}π, with {accuracies[worst]:.1f} % right.",
    ]
    if abs(high - low) <= 100 * margin(result["images"]):
        told.append(
            "These are alike, as far as so few images tell: neither coarse shapes nor fine texture count for more."
        )
    elif high > low:
        told.append(
            "High frequencies hurt more, as paper C finds for ConvNets, and reads as leaning on texture. Its remedy "
            "is attention, in a ViT or in the last layers of a ConvNet (`vtk train … --model alternet_18`)."
        )
    else:
        told.append(
            "Low frequencies hurt more, as paper C finds for ViTs, and reads as leaning on shapes, not on texture."
        )
    return told


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
    source="paper C (How do ViTs work), section 2 and Figure 2b",
    explains="Noise of one band of frequencies is laid over the images, equally strong in every band. Low frequencies "
    "carry shapes, high ones texture: where noise hurts most is what the model looks at.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    needs=frozenset({"labels", "one-label"}),
)

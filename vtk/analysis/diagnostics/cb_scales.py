"""``cb-scales``: scales Λ of Context Broadcasting by layer (Hyeon-Woo et al. 2023, Figure 8)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.cb_scales import context_scales

_LITTLE = 0.01  # λ of this size adds a hundredth of the mean of all tokens
_SURE = 2.0  # standard errors over channels that lower and upper layers must differ by to be called different


def _measure(context: Context) -> dict[str, Any]:
    return context_scales(context.model).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    other, (shares,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        for where, marker in (("mlp", "o"), ("msa", "s")):
            layers = [layer for layer in run.result["layers"] if layer["where"] == where]
            if not layers:
                continue
            x = [layer["block"] for layer in layers]
            name = f"{figures.label(run.label)}, {where.upper()}"
            means = [layer["mean"] for layer in layers]
            axes.plot(x, means, f"{marker}-", color=colour, markersize=4, label=f"{name}: mean")
            low = [layer["mean"] - layer["deviation"] for layer in layers]
            high = [layer["mean"] + layer["deviation"] for layer in layers]
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, label=f"{name}: ± deviation")
            ratios = [float("nan") if layer["ratio"] is None else layer["ratio"] for layer in layers]
            shares.plot(x, ratios, f"{marker}-", color=colour, markersize=4, label=f"{name}: quantiles of |λ|")
            negative = [layer["negative"] for layer in layers]
            shares.plot(x, negative, f"{marker}--", color=colour, markersize=4, label=f"{name}: share of λ < 0")
    axes.axhline(0, color="#999999", linewidth=0.8)
    figures.finish(axes, x="block", y="λ", legend=True)
    figures.finish(shares, x="block", y="ratio; share of channels", legend=True)
    shares.set_ylim(0, 1)
    for one in (axes, shares):
        one.xaxis.get_major_locator().set_params(integer=True)
    return [
        Picture(
            "cb-scales", figure, "Λ by block: mean over channels, with its standard deviation. 0 broadcasts nothing."
        ),
        Picture(
            "cb-scales-ratio",
            other,
            "Uniformity of the magnitudes of a block's λ (10 % quantile over 90 % quantile; 1 means all equal), and "
            "the share of channels whose λ is negative.",
        ),
    ]


def _read(result: Result) -> list[str]:
    layers = result["layers"]
    size = math.sqrt(sum(layer["mean"] ** 2 + layer["deviation"] ** 2 for layer in layers) / len(layers))
    if size == 0:
        return ["Λ is 0 everywhere, its initial value: the model broadcasts nothing yet; fine-tune it."]
    sentences = []
    if size < _LITTLE:
        sentences.append(f"λ has a magnitude of {size:.2g}, near its initial 0: the model hardly broadcasts yet.")
    for where, words in (("mlp", "FFN"), ("msa", "attention")):
        own = [layer for layer in layers if layer["where"] == where]
        if not own:
            continue
        mean = sum(layer["mean"] for layer in own) / len(own)
        negative = sum(layer["negative"] for layer in own) / len(own)
        sentences.append(
            f"After the {words} λ is {mean:.3g} on average over {len(own)} layers, and negative in "
            f"{100 * negative:.0f} % of the channels."
        )
        half = len(own) // 2
        if not half:
            continue
        (lower, error), (upper, other) = (_average(part) for part in (own[:half], own[-half:]))
        if abs(upper - lower) <= _SURE * math.hypot(error, other):
            sentences.append("Lower and upper layers do not differ by more than the spread over their channels.")
        elif upper > lower:
            sentences.append("Upper layers use more of the mean than lower ones, as in the paper.")
            if upper > _LITTLE:
                sentences.append("`--cb --cb-layers upper` broadcasts there without a learned scale.")
        else:
            sentences.append("Lower layers use more of the mean than upper ones, unlike in the paper.")
    return sentences


def _average(layers: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean λ of layers and its standard error over channels."""
    variance = sum(layer["deviation"] ** 2 / layer["channels"] for layer in layers)
    return sum(layer["mean"] for layer in layers) / len(layers), math.sqrt(variance) / len(layers)


def _numbers(result: Result) -> dict[str, float]:
    layers = result["layers"]
    return {
        "mean of λ": sum(layer["mean"] for layer in layers) / len(layers),
        "negative λ, share": sum(layer["negative"] for layer in layers) / len(layers),
    }


DIAGNOSTIC = Diagnostic(
    name="cb-scales",
    title="Scales of Context Broadcasting",
    source="Hyeon-Woo et al. 2023 (Scratching Visual Transformer's Back with Uniform Attention), Figure 8",
    explains=(
        "Scaled Context Broadcasting adds λ times the mean of all tokens to each token, with one λ per channel and "
        "layer. The paper reads a high mean and uniform magnitudes as a need for dense interactions."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

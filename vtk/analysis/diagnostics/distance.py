"""``distance``: mean attention distance, by layer and head (Hyeon-Woo et al. 2023, Figure 7b)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.entropy import ranges
from vtk.analysis.measures.distance import attention_distance
from vtk.models.structure import unusual_part

_LOCAL = 0.5  # of the distance of uniform attention: a head below it attends mostly to its neighbourhood
_CHANGE = 0.1  # of uniform attention's distance; smaller differences between layers are called the same
_PREFIX = 0.3  # of the attention: patches that give more to prefix tokens hardly mix with other patches


def _measure(context: Context) -> dict[str, Any]:
    result = attention_distance(context.model, context.batches, max_images=context.count).to_dict()
    result["plain_vit"] = unusual_part(context.model) is None  # the suggestions of the reading apply to no other
    return result


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    other, (plain,) = figures.new()
    for number, (colour, run) in enumerate(zip(figures.COLOURS, runs, strict=False)):
        layers = run.result["layers"]
        x = range(1, len(layers) + 1)
        name = figures.label(run.label)
        heads = [
            (i + 0.12 * number, value) for i, layer in zip(x, layers, strict=True) for value in layer["heads"] if value
        ]
        if heads:
            axes.scatter(*zip(*heads, strict=True), color=colour, s=9, alpha=0.45, linewidths=0, label=f"{name}: heads")
        axes.plot(x, [layer["mean"] for layer in layers], "-", color=colour, label=f"{name}: mean")
        uniform = [layer["uniform"] for layer in layers]
        alone = len(runs) == 1 or all(uniform == [y["uniform"] for y in one.result["layers"]] for one in runs)
        if not alone or run is runs[-1]:
            axes.step(x, uniform, where="mid", color="#999999" if alone else colour, linestyle=":", linewidth=1,
                      label="uniform attention" if alone else f"{name}: uniform attention")  # fmt: skip
        plain.plot(x, [layer["relative"] for layer in layers], "o-", color=colour, markersize=4, label=name)
    figures.finish_by_layer(axes, x="attention layer", y="mean distance, image sides", legend=True)
    figures.finish_by_layer(plain, x="attention layer", y="relative distance, image sides", legend=len(runs) > 1)
    caption = (
        "Mean distance between a query and the patches it attends to, in image sides: dots are heads, the line is "
        "their mean; dotted: uniform attention. Class and register tokens are left out, and the rest is normalised to "
        "1."
    )
    paper = (
        "Relative distance of Hyeon-Woo et al. (2023): horizontal plus vertical distances, weighted by the "
        "unnormalised attention; attention to class and register tokens counts as distance 0."
    )
    return [Picture("distance", figure, caption), Picture("distance-relative", other, paper)]


def _shares(layers: Sequence[dict[str, Any]]) -> list[float]:
    return [layer["mean"] / layer["uniform"] if layer["uniform"] else 0.0 for layer in layers]


def _local(layer: dict[str, Any]) -> int:
    return sum(value is not None and value < _LOCAL * layer["uniform"] for value in layer["heads"])


def _read(result: Result) -> list[str]:
    layers = result["layers"]
    shares = _shares(layers)
    mean = sum(layer["mean"] for layer in layers) / len(layers)
    sentences = [
        f"The mean attention distance is {mean:.2f} image sides, {100 * sum(shares) / len(shares):.0f} % of that of "
        "uniform attention."
    ]
    heads = sum(len(layer["heads"]) for layer in layers)
    local = [_local(layer) for layer in layers]
    if any(local):
        where = ranges([i for i, count in enumerate(local, start=1) if count])
        sentences.append(
            f"{sum(local)} of {heads} heads are local (less than {_LOCAL:g} of the uniform distance), in layers "
            f"{where}."
        )
    else:
        sentences.append(f"None of the {heads} heads is local (less than {_LOCAL:g} of the uniform distance).")
    third = len(layers) // 3
    if third:
        lower, upper = sum(shares[:third]) / third, sum(shares[-third:]) / third
        if abs(upper - lower) < _CHANGE:
            sentences.append("The lower and the upper third of the layers have about the same distance.")
        else:
            more, less = ("upper", "lower") if upper > lower else ("lower", "upper")
            sentences.append(f"The {more} third of the layers has a larger distance than the {less} one.")
        if result["plain_vit"] and not any(local[:third]):
            sentences.append(
                "Lower layers have not learned local attention: with few images, a convolutional stem "
                "(`vtk train … --stem conv`) or `--local-attention 5` provides it."
            )
    away = [i for i, layer in enumerate(layers, start=1) if layer["prefix"] > _PREFIX]
    if away:
        sentences.append(
            f"In layers {ranges(away)} patches give over {100 * _PREFIX:.0f} % of their attention to class and "
            "register tokens, which have no position and do not count in the distance."
        )
    for key, why in (
        ("unplaced", "the positions of its tokens are not known"),
        ("unseen", "its weights cannot be observed"),
    ):
        if result[key]:
            sentences.append(f"Left out: the attention of {', '.join(result[key])}; {why}.")
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    layers = result["layers"]
    heads = sum(len(layer["heads"]) for layer in layers)
    return {
        "mean distance, image sides": sum(layer["mean"] for layer in layers) / len(layers),
        "mean distance, of uniform": sum(_shares(layers)) / len(layers),
        "relative distance, image sides": sum(layer["relative"] for layer in layers) / len(layers),
        "local heads, share": sum(_local(layer) for layer in layers) / heads,
    }


DIAGNOSTIC = Diagnostic(
    name="distance",
    title="Attention distance",
    source=(
        "Hyeon-Woo et al. 2023 (Scratching Visual Transformer's Back with Uniform Attention), Figure 7b; Dosovitskiy "
        "et al., 2021, Figure 7"
    ),
    explains="Distance between a patch and the patches it attends to. Heads with a small distance are local, like a "
    "convolution; heads with a large one are global. The dotted line is that of uniform attention.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

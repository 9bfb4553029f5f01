"""``distance``: mean attention distance, by layer and head (Hyeon-Woo et al. 2023, Figure 7b)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.entropy import ranges
from vtk.analysis.measures.distance import attention_distance
from vtk.models.structure import unusual_part

_LOCAL = 0.5  # a head that looks less than half as far as uniform attention sees mostly its surroundings
_CHANGE = 0.1  # of uniform attention's distance; less between lower and upper layers is called alike
_PREFIX = 0.3  # patches that give more than this of their attention to tokens without a place do not mix with patches


def _measure(context: Context) -> dict[str, Any]:
    result = attention_distance(context.model, context.batches, max_images=context.count).to_dict()
    result["plain_vit"] = unusual_part(context.model) is None  # what the reading suggests can be done with no other
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
        "Mean distance between a query and what it attends to, in sides of the image: a dot is a head, the line their "
        "mean; dotted, uniform attention. Class and register tokens are left out, the rest sums to 1."
    )
    paper = (
        "Hyeon-Woo et al.'s relative distance: sums of horizontal and vertical distances, weighted by the attention "
        "as it is; what goes to class and register tokens counts as 0."
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
        f"On average a query looks {mean:.2f} sides of the image away, {100 * sum(shares) / len(shares):.0f} % as far "
        "as uniform attention would."
    ]
    heads = sum(len(layer["heads"]) for layer in layers)
    local = [_local(layer) for layer in layers]
    if any(local):
        where = ranges([i for i, count in enumerate(local, start=1) if count])
        sentences.append(f"{sum(local)} of {heads} heads are local (less than {_LOCAL:g} of that), in layers {where}.")
    else:
        sentences.append(f"None of the {heads} heads is local (less than {_LOCAL:g} of that).")
    third = len(layers) // 3
    if third:
        lower, upper = sum(shares[:third]) / third, sum(shares[-third:]) / third
        if abs(upper - lower) < _CHANGE:
            sentences.append("The lower and the upper third of the layers look about equally far.")
        else:
            more, less = ("upper", "lower") if upper > lower else ("lower", "upper")
            sentences.append(f"The {more} third of the layers looks farther than the {less} one.")
        if result["plain_vit"] and not any(local[:third]):
            sentences.append(
                "Lower layers without local heads have not learned to look near: on few images, a convolutional stem "
                "(`vtk train … --stem conv`) or `--local-attention 5` gives what they lack."
            )
    away = [i for i, layer in enumerate(layers, start=1) if layer["prefix"] > _PREFIX]
    if away:
        sentences.append(
            f"In layers {ranges(away)} patches give over {100 * _PREFIX:.0f} % of their attention to class and "
            "register tokens, which have no place and are left out of the distance."
        )
    for key, why in (("unplaced", "where its tokens stand is not known"), ("unseen", "its weights cannot be seen")):
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
    explains="How far away from a patch lies what it attends to. Low heads look at their surroundings as a convolution "
    "does, high ones over the whole image; the dotted line is where attention to all patches alike would be.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

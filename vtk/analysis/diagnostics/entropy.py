"""``entropy``: how dense attention is, by layer (paper B, Figures 4 and 7a)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.entropy import attention_entropy
from vtk.errors import UsageError
from vtk.models.transforms.blocks import find_blocks
from vtk.models.transforms.context_broadcast import ContextBroadcast

_NEAR_UNIFORM = 0.9


def _measure(context: Context) -> dict[str, Any]:
    result = attention_entropy(context.model, context.batches, max_images=context.count).to_dict()
    result["can_broadcast"] = _can_broadcast(context.model)
    return result


def _can_broadcast(model: nn.Module) -> bool:
    """Return whether Context Broadcasting can be added: it is there in no model twice, and in no Swin or AlterNet."""
    if any(isinstance(module, ContextBroadcast) for module in model.modules()):
        return False
    try:
        return bool(find_blocks(model, "Context Broadcasting"))
    except UsageError:
        return False


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        layers = run.result["layers"]
        x = range(1, len(layers) + 1)
        name = figures.label(run.label)
        axes.plot(x, [layer["mean"] for layer in layers], "o-", color=colour, markersize=4, label=f"{name}: mean")
        axes.plot(x, [layer["percentile15"] for layer in layers], ":", color=colour, label=f"{name}: 15 % below")
        if all(layer["cls"] is not None for layer in layers):
            axes.plot(x, [layer["cls"] for layer in layers], "--", color=colour, label=f"{name}: class token")
        axes.step(x, [layer["maximum"] for layer in layers], where="mid", color="#999999", linewidth=1,
                  label="uniform attention" if run is runs[-1] else None)  # fmt: skip
    figures.finish(axes, x="attention layer", y="entropy, nats", legend=True)
    figures.from_zero(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    caption = (
        "Entropy of the attention weights by layer, over images, heads and queries; dotted, the value below which 15 % "
        "lie; dashed, the class token's. The grey line is that of uniform attention, ln of the number of keys."
    )
    return [Picture("entropy", figure, caption)]


def _read(result: Result) -> list[str]:
    layers = result["layers"]
    shares = [layer["mean"] / layer["maximum"] if layer["maximum"] else 0.0 for layer in layers]
    dense = [i for i, share in enumerate(shares, start=1) if share >= _NEAR_UNIFORM]
    mean = sum(shares) / len(shares)
    told = [f"On average attention has {100 * mean:.0f} % of the entropy of uniform attention."]
    if dense:
        upper = [i for i in dense if i > len(layers) / 2]
        told.append(
            f"It is near uniform (over {100 * _NEAR_UNIFORM:.0f} %) in layers {ranges(dense)}: they mix tokens almost "
            "as their mean would."
        )
        if len(upper) >= len(layers) / 4 and result["can_broadcast"]:
            told.append(
                "Context Broadcasting gives that mean for nothing: try `vtk finetune … --cb --cb-layers upper`."
            )
    else:
        told.append(f"No layer is near uniform (over {100 * _NEAR_UNIFORM:.0f} %).")
    if result["unseen"]:
        told.append(f"Not seen: the attention of {', '.join(result['unseen'])}.")
    return told


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted whole numbers in words, runs of three and more as a range: ``1, 2, 8–11``."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    parts = [[f"{g[0]}–{g[-1]}"] if len(g) > 2 else [str(n) for n in g] for g in groups]
    return ", ".join(part for group in parts for part in group)


def _numbers(result: Result) -> dict[str, float]:
    layers = result["layers"]
    found = {"mean entropy, nats": sum(layer["mean"] for layer in layers) / len(layers)}
    if all(layer["cls"] is not None for layer in layers):
        found["class token's entropy, nats"] = sum(layer["cls"] for layer in layers) / len(layers)
    return found


DIAGNOSTIC = Diagnostic(
    name="entropy",
    title="Attention entropy",
    source="paper B (Context Broadcasting), Figures 4 and 7a",
    explains="Entropy says over how many tokens a query spreads its attention: 0 is a single one, the grey line is all "
    "of them alike. Dense attention is what ViTs learn slowly and with effort, and what broadcasting supplies.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

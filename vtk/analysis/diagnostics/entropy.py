"""``entropy``: entropy of attention, by layer (Hyeon-Woo et al. 2023, Figures 4 and 7a)."""

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
    """Return whether Context Broadcasting can be added: only once, and not to Swin or AlterNet."""
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
        axes.plot(x, [layer["percentile15"] for layer in layers], ":", color=colour, label=f"{name}: 15th percentile")
        if all(layer["cls"] is not None for layer in layers):
            axes.plot(x, [layer["cls"] for layer in layers], "--", color=colour, label=f"{name}: class token")
        axes.step(x, [layer["maximum"] for layer in layers], where="mid", color="#999999", linewidth=1,
                  label="uniform attention" if run is runs[-1] else None)  # fmt: skip
    figures.finish_by_layer(axes, x="attention layer", y="entropy, nats", legend=True)
    caption = (
        "Entropy of the attention weights by layer: mean over images, heads and queries; dotted: 15th percentile; "
        "dashed: class token. Grey: uniform attention, ln of the number of keys."
    )
    return [Picture("entropy", figure, caption)]


def _read(result: Result) -> list[str]:
    layers = result["layers"]
    shares = [layer["mean"] / layer["maximum"] if layer["maximum"] else 0.0 for layer in layers]
    dense = [i for i, share in enumerate(shares, start=1) if share >= _NEAR_UNIFORM]
    mean = sum(shares) / len(shares)
    sentences = [f"On average attention has {100 * mean:.0f} % of the entropy of uniform attention."]
    if dense:
        upper = [i for i in dense if i > len(layers) / 2]
        sentences.append(
            f"It is near uniform (over {100 * _NEAR_UNIFORM:.0f} %) in layers {ranges(dense)}, which nearly average "
            "all tokens."
        )
        if len(upper) >= len(layers) / 4 and result["can_broadcast"]:
            sentences.append(
                "Context Broadcasting supplies that mean at no cost: try `vtk finetune … --cb --cb-layers upper`."
            )
    else:
        sentences.append(f"No layer is near uniform (over {100 * _NEAR_UNIFORM:.0f} %).")
    if result["unseen"]:
        sentences.append(f"Not observed: the attention of {', '.join(result['unseen'])}.")
    return sentences


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted integers as text, with runs of three or more as a range: ``1, 2, 8–11``."""
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
    numbers = {"mean entropy, nats": sum(layer["mean"] for layer in layers) / len(layers)}
    if all(layer["cls"] is not None for layer in layers):
        numbers["class token's entropy, nats"] = sum(layer["cls"] for layer in layers) / len(layers)
    return numbers


DIAGNOSTIC = Diagnostic(
    name="entropy",
    title="Attention entropy",
    source="Hyeon-Woo et al. 2023 (Scratching Visual Transformer's Back with Uniform Attention), Figures 4 and 7a",
    explains=(
        "The entropy measures over how many tokens a query spreads its attention: 0 is a single token, the grey line "
        "all tokens equally. ViTs learn dense attention slowly; Context Broadcasting supplies it."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

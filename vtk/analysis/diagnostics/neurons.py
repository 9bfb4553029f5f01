"""``neurons``: shares of active and of never active hidden neurons (Chen et al. 2022, Figure 2, right)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.entropy import ranges
from vtk.analysis.diagnostics.measurement import measurement
from vtk.analysis.measures.neurons import active_neurons

_LINES = {"MLP": "-", "token MLP": "--", "conv": "-."}
_HALF = 0.05  # distance from one half within which neurons look random: half of a symmetric input is above 0
_DENSER = 2.0  # ratio from which the first blocks are reported as denser
_DEAD = 0.01  # share of a block's neurons from which the block is named


def _measure(context: Context) -> dict[str, Any]:
    return active_neurons(context.model, context.batches, max_images=context.count).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    return [
        Picture(
            "neurons",
            _lines(runs, "active", "active neurons, %"),
            "Share of the hidden neurons whose activation is above 0, mean over images and positions, by block.",
        ),
        Picture(
            "neurons-never",
            _lines(runs, "never", "never active, %"),
            "Share of the hidden neurons whose activation is above 0 at no position of any image, by block.",
        ),
    ]


def _lines(runs: Sequence[Run], what: str, y: str) -> Any:
    figure, (axes,) = figures.new()
    highest = 0.0
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        kinds = [kind for kind in _LINES if any(layer["kind"] == kind for layer in run.result["layers"])]
        for kind in kinds:
            shares = {block: 100 * share for block, share in by_block(run.result, kind, what).items()}
            highest = max(highest, *shares.values())
            name = [figures.label(run.label)] if len(runs) > 1 else []
            label = ": ".join(name + ([kind] if len(kinds) > 1 else []))
            axes.plot(list(shares), list(shares.values()), f"o{_LINES[kind]}", color=colour, markersize=4, label=label)
    figures.finish(axes, x="block", y=y, legend=any(axes.get_legend_handles_labels()[1]))
    axes.set_ylim(0, max(1.1 * highest, 5.0))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def by_block(result: Result, kind: str | None, what: str) -> dict[int, float]:
    """Return a share by block, over the neurons of its layers of a kind; None means of all kinds.

    Args:
        result: of `active_neurons`.
        kind: ``MLP``, ``token MLP``, ``conv`` or None.
        what: ``active``, a share already, or ``never``, a number of neurons.
    """
    sums: dict[int, list[float]] = {}
    for layer in result["layers"]:
        if kind in (None, layer["kind"]):
            value = layer[what] * layer["neurons"] if what == "active" else layer[what]
            total = sums.setdefault(layer["block"], [0.0, 0])
            total[0] += value
            total[1] += layer["neurons"]
    return {block: value / neurons for block, (value, neurons) in sums.items()}


def _read(result: Result) -> list[str]:
    layers = result["layers"]
    active = by_block(result, None, "active")
    low, high = min(active, key=lambda b: active[b]), max(active, key=lambda b: active[b])
    sentences = [
        f"On average {100 * _mean(layers):.0f} % of the hidden neurons are active at a position: fewest in block {low} "
        f"({100 * active[low]:.0f} %), most in block {high} ({100 * active[high]:.0f} %)."
    ]
    if all(abs(layer["active"] - 0.5) < _HALF for layer in layers):
        sentences.append("About half everywhere is what random weights give: no sparsity has been learned.")
    first = max(1, len(active) // 4)
    early = [share for block, share in active.items() if block <= first]
    later = [share for block, share in active.items() if block > first]
    if early and later and _average(early) > _DENSER * _average(later):
        where = f"the first {first} blocks" if first > 1 else "the first block"
        sentences.append(
            f"In {where} it is {100 * _average(early):.0f} %, later {100 * _average(later):.0f} %. Chen et al. (2022) "
            "relate dense first layers to a sharp loss; sharpness-aware training makes them sparser: `vtk train … "
            "--sam auto`."
        )
    if measurement(result).get("images") == "training":
        sentences.append(
            "In Chen et al. (2022), on training images too, less than 10 % are active in most layers of a trained ViT."
        )
    sentences += _dead(result)
    if result["unseen"]:
        sentences.append(f"Not counted, because their activations cannot be observed: {', '.join(result['unseen'])}.")
    return sentences


def _dead(result: Result) -> list[str]:
    layers, images = result["layers"], result["images"]
    never = sum(layer["never"] for layer in layers)
    always = sum(layer["always"] for layer in layers)
    total = sum(layer["neurons"] for layer in layers)
    sentences = []
    if never:
        blocks = sorted(block for block, share in by_block(result, None, "never").items() if share >= _DEAD)
        where = (
            f" (at least {100 * _DEAD:g} % of those in block{'s' if len(blocks) > 1 else ''} {ranges(blocks)})"
            if blocks
            else ""
        )
        cut = all(layer["function"].startswith("ReLU") for layer in layers)
        sentences.append(
            f"{never:,} of {total:,} neurons ({_percent(never / total)}) are never active on these {images} images"
            + where
            + (
                ": they contribute nothing."
                if cut
                else ": they contribute only the values of their activation below 0."
            )
            + " They may be active on other images."
        )
    else:
        sentences.append(f"Each of the {total:,} neurons is active at some position of these {images} images.")
    if always:
        sentences.append(f"{always:,} ({_percent(always / total)}) are always active.")
    return sentences


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _mean(layers: Sequence[Any]) -> float:
    return float(sum(layer["active"] * layer["neurons"] for layer in layers) / sum(la["neurons"] for la in layers))


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _numbers(result: Result) -> dict[str, float]:
    layers = result["layers"]
    neurons = sum(layer["neurons"] for layer in layers)
    return {
        "active neurons, %": 100 * _mean(layers),
        "active in the first block, %": 100 * by_block(result, None, "active")[layers[0]["block"]],
        "never active, %": 100 * sum(layer["never"] for layer in layers) / neurons,
    }


DIAGNOSTIC = Diagnostic(
    name="neurons",
    title="Active neurons",
    source="Chen et al. 2022 (When Vision Transformers Outperform ResNets), section 4.4 and Figure 2, right",
    explains=(
        "Share of the hidden neurons of MLPs and convolutions whose activation is above 0. Trained ViTs are "
        "sparse. Neurons that are never active could be pruned."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

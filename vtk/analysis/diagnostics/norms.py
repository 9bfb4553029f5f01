"""``norms``: norms of weights and activations (Chen et al. 2022, Table 4 and section 4.4)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.entropy import ranges
from vtk.analysis.diagnostics.similarity import place_points
from vtk.analysis.measures.norms import OUTLIER, model_norms

_LINES = {"msa": "-", "token mlp": "-", "mlp": "--"}
_WIDE = 20.0  # ratio of values from which the axis is logarithmic
_RARE = 0.001  # share of outliers from which they are reported: one token in a thousand
_GROWN = 2.0
_HALF_OF_SQUARES = math.sqrt(0.5)


def _measure(context: Context) -> dict[str, Any]:
    return model_norms(context.model, context.batches, max_images=context.count).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    pictures = [_tokens(runs), _weights(runs)]
    return [*pictures, _hidden(runs)] if any(run.result["hidden"] for run in runs) else pictures


def _tokens(runs: Sequence[Run]) -> Picture:
    figure, (axes,) = figures.new()
    places = place_points(axes, [[token["name"] for token in run.result["tokens"]] for run in runs])
    shown: list[float] = []
    for colour, run, at in zip(figures.COLOURS, runs, places, strict=False):
        for what, line, label in (("mean", "o-", "mean"), ("cls", "--", "class token"), ("maximum", ":", "largest")):
            values = [math.nan if token[what] is None else token[what] for token in run.result["tokens"]]
            if not all(math.isnan(value) for value in values):
                axes.plot(at, values, line, color=colour, markersize=4, label=_label(runs, run, label))
                shown += [value for value in values if value > 0]
    if shown and max(shown) > _WIDE * min(shown):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        figures.from_zero(axes)
    figures.finish(axes, x="block", y="L2 norm of tokens", legend=True)
    caption = (
        "L2 norm of the tokens after the stem, the position embedding (pos) and every block: mean over images and "
        "positions, the class token on its own, and the largest norm."
    )
    return Picture("norms", figure, caption)


def _label(runs: Sequence[Run], run: Run, what: str) -> str:
    return f"{figures.label(run.label)}: {what}" if len(runs) > 1 else what


def _hidden(runs: Sequence[Run]) -> Picture:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        kinds = list(dict.fromkeys(layer["kind"] for layer in run.result["hidden"]))
        for kind, line in zip(kinds, ("-", "--", "-."), strict=False):
            values = hidden_by_block(run.result, kind)
            label = _label(runs, run, kind)
            axes.plot(list(values), list(values.values()), f"s{line}", color=colour, markersize=4, label=label)
    figures.finish_by_layer(axes, x="block", y="‖a‖ of an image", legend=True)
    caption = (
        "Norm of the hidden activations of an image, by block: ‖a‖ of Table 4 in Chen et al. (2022), root mean square "
        "over images."
    )
    return Picture("norms-hidden", figure, caption)


def hidden_by_block(result: Result, kind: str) -> dict[int, float]:
    """Return, by block, the norm of its hidden layers of a kind: the root of the sum of their squares."""
    squares: dict[int, float] = {}
    for layer in result["hidden"]:
        if layer["kind"] == kind:
            squares[layer["block"]] = squares.get(layer["block"], 0.0) + layer["norm"] ** 2
    return {block: math.sqrt(value) for block, value in squares.items()}


def _weights(runs: Sequence[Run]) -> Picture:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        weights = run.result["weights"]
        count = sum(1 for group in weights if group.startswith("block ") and ":" not in group)
        parts = [part for part in _LINES if any(f"block {k}: {part}" in weights for k in range(1, count + 1))]
        lines = [(part, _LINES[part], f": {part}") for part in parts] or [("all matrices", "-", "")]
        for part, line, suffix in lines:
            rows = [weights.get(f"block {k}{suffix}") for k in range(1, count + 1)]
            values = [row["matrices"] if row else math.nan for row in rows]
            shown = part.upper() if part in ("msa", "mlp") else part.replace("mlp", "MLP")
            axes.plot(
                range(1, count + 1), values, f"o{line}", color=colour, markersize=4, label=_label(runs, run, shown)
            )
    figures.finish_by_layer(axes, x="block", y="norm of the matrices", legend=True)
    caption = (
        "Norm (root of the sum of squares) of the weight matrices and filters by block and part, without biases, "
        "norms and scales."
    )
    return Picture("norms-weights", figure, caption)


def _read(result: Result) -> list[str]:
    whole = result["weights"]["whole"]
    sentences = [
        f"‖w‖ is {whole['norm']:.1f} over {whole['parameters']:,} weights, {whole['matrices']:.1f} of its matrices. "
        "Compare it within one architecture only; Chen et al. (2022) find it larger after sharpness-aware training."
    ]
    if whole["matrices"] < whole["norm"] * _HALF_OF_SQUARES:
        sentences.append("Most of it comes from biases, norms and scales.")
    tokens = result["tokens"]
    first, last = tokens[0], tokens[-1]
    if first["mean"] > 0:
        ratio = last["mean"] / first["mean"]
        verb = "grow" if ratio >= _GROWN else "shrink" if ratio <= 1 / _GROWN else "keep about their size"
        sentences.append(
            f"Tokens {verb} with depth: their mean norm is {first['mean']:.3g} after the stem and {last['mean']:.3g} "
            "after the last block."
        )
    if last["cls"] is not None:
        sentences.append(f"The class token has {last['cls']:.3g} there.")
    return sentences + _outliers(result)


def _outliers(result: Result) -> list[str]:
    blocks = [token for token in result["tokens"] if token["name"] not in ("stem", "pos_embed")]
    where = [i for i, token in enumerate(blocks, start=1) if token["outliers"] >= _RARE]
    if not where:
        return [
            f"After every block, fewer than one token in a thousand exceeds {OUTLIER:g} times the median norm of its "
            "image."
        ]
    worst = max(blocks, key=lambda token: token["outliers"])
    sentence = (
        f"After block{'s' if len(where) > 1 else ''} {ranges(where)} up to {100 * worst['outliers']:.2g} % of the "
        f"tokens exceed {OUTLIER:g} times the median norm of their image (largest: {worst['maximum']:.3g})"
    )
    if not result["prefix"]:
        return [f"{sentence}: single positions have much larger norms than the others."]
    return [
        f"{sentence}: a known artefact of ViTs, which store global information in patches with little content.",
        "It disturbs segmentation, attention maps and mean pooling; models with register tokens have less of it, such "
        "as `vtk finetune … --model vit_small_patch14_reg4_dinov2`.",
    ]


def _numbers(result: Result) -> dict[str, float]:
    last = result["tokens"][-1]
    return {
        "norm of all weights": result["weights"]["whole"]["norm"],
        "norm of all matrices": result["weights"]["whole"]["matrices"],
        "mean norm of the last block's tokens": last["mean"],
        "largest norm of a token": max(token["maximum"] for token in result["tokens"]),
    }


DIAGNOSTIC = Diagnostic(
    name="norms",
    title="Norms of weights and activations",
    source="Chen et al. 2022 (When Vision Transformers Outperform ResNets), Table 4 and section 4.4",
    explains=(
        "Norms of weights and activations, block by block. Between two runs of one architecture they show what "
        "training changed: Chen et al. (2022) find larger norms at flatter minima. Single tokens with very large "
        "norms dominate every mean."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

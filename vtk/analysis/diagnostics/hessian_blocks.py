"""``hessian-blocks``: largest curvature of the model, its parts and its blocks (Chen et al. 2022, Table 4)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.hessian import SHARP, log_axis
from vtk.analysis.measures.hessian import hessian_max
from vtk.analysis.probes.parameter_groups import parameter_blocks

_NAMES = {"msa": "MSA", "mlp": "MLP", "token mlp": "token MLP"}
_WIDE = 30.0  # ratio of values from which the axis is logarithmic, so that short bars are visible
_DEEPER = 2.0  # times larger; below that, shallow and deep blocks are called equally sharp


def _measure(context: Context) -> dict[str, Any]:
    config = context.config
    return hessian_max(
        context.model,
        context.loss_batches(config.hessian_batch),
        groups=parameter_blocks(context.model),
        tol=TOLERANCE,
        **context.loss_options(config.hessian_images),
        **context.step_options(),
    ).to_dict()


TOLERANCE = 1e-2
"""Relative; bars are compared by eye, for which half as many products are enough."""


def _draw(runs: Sequence[Run]) -> list[Picture]:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for run in runs for name in run.result["values"]))
    figure, (axes,) = figures.new()
    width = 0.8 / len(runs)
    sizes = [abs(v[0]) for run in runs for v in run.result["values"].values() if v[0]]
    handles, any_negative = [], False
    for number, (colour, run) in enumerate(zip(figures.COLOURS, runs, strict=False)):
        values = {name: eigenvalues[0] for name, eigenvalues in run.result["values"].items()}
        at = [names.index(name) + (number - (len(runs) - 1) / 2) * width for name in values]
        bars = axes.bar(at, [abs(v) for v in values.values()], width, color=colour)
        for bar, value in zip(bars, values.values(), strict=True):
            if value < 0:
                bar.set(facecolor="white", edgecolor=colour, hatch="////")
                any_negative = True
        handles.append(Patch(color=colour, label=figures.label(run.label)))
    if any_negative:
        handles.append(Patch(facecolor="white", edgecolor="#555555", hatch="////", label="negative"))
    if sizes and max(sizes) > _WIDE * min(sizes):
        log_axis(axes)
    axes.set_xticks(range(len(names)), [_NAMES.get(name, name) for name in names], rotation=60, ha="right", fontsize=9)
    figures.finish(axes, x="", y="|λ| of largest magnitude")
    axes.legend(handles=handles, frameon=False, fontsize=9)
    caption = (
        "Hessian eigenvalue of largest magnitude, of all parameters and of each group with the others fixed (a "
        f"diagonal block). The loss is the mean over {runs[0].result['images']} images."
    )
    return [Picture("hessian-blocks", figure, caption)]


def _read(result: Result) -> list[str]:
    values = {name: eigenvalues[0] for name, eigenvalues in result["values"].items()}
    parts = {name: value for name, value in values.items() if name != "whole"}
    sentences = [f"The largest curvature of the loss (λ_max) is {values['whole']:.3g}."]
    if values["whole"] >= SHARP:
        sentences.append(
            f"Over {SHARP:g} the minimum is sharp: in Chen et al. (2022) models trained with SAM have 21 to 42, others "
            "180 to 1,644. Try `vtk finetune … --sam 0.1`."
        )
    if parts:
        sharpest = max(parts, key=lambda name: abs(parts[name]))
        sentences.append(
            f"The part with the largest curvature is {_NAMES.get(sharpest, sharpest)} ({parts[sharpest]:.3g})."
        )
    blocks = [abs(value) for name, value in values.items() if name.startswith("block ")]
    if len(blocks) >= 4:
        quarter = max(len(blocks) // 4, 1)
        first, last = sum(blocks[:quarter]) / quarter, sum(blocks[-quarter:]) / quarter
        if first > _DEEPER * last:
            sentences.append(
                "Shallow blocks are sharper than deep ones, as Chen et al. (2022) find: curvature accumulates towards "
                "the input."
                + (
                    " Give them a lower learning rate: `vtk finetune … --layer-decay 0.75`."
                    if values["whole"] >= SHARP
                    else ""
                )
            )
        elif last > _DEEPER * first:
            sentences.append("Deep blocks are sharper than shallow ones, unlike in Chen et al. (2022).")
        else:
            sentences.append("Shallow and deep blocks are about as sharp.")
    negative = [name for name, value in values.items() if value < 0]
    if negative:
        sentences.append(f"Negative, so the loss is not convex there: {', '.join(_NAMES.get(n, n) for n in negative)}.")
    loose = [name for name, settled in result["converged"].items() if not settled]
    if loose:
        sentences.append(f"Not converged, so only an estimate: {', '.join(_NAMES.get(n, n) for n in loose)}.")
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    values = result["values"]
    return {f"λ_max of {_NAMES.get(name, name)}, loss / weight²": values[name][0]
            for name in ("whole", "embedding", "msa", "token mlp", "mlp") if name in values}  # fmt: skip


DIAGNOSTIC = Diagnostic(
    name="hessian-blocks",
    title="Curvature by part",
    source="Chen et al. 2022 (When Vision Transformers Outperform ResNets), Table 4 and Appendix F",
    explains=(
        "The largest curvature of the loss over all images at once, for the whole model and for each part with the "
        "others fixed. The weights of the part with the largest value are the most sensitive."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("hessian_images", "hessian_batch", "loss_images", "weight_decay"),
    needs=frozenset({"labels"}),
)

"""``hessian-blocks``: the largest curvature of the whole model, of its parts and of every block (paper D, Table 4)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.hessian import SHARP, log_axis
from vtk.analysis.measures.hessian import hessian_max
from vtk.analysis.probes.parameter_groups import parameter_blocks

_NAMES = {"msa": "MSA", "mlp": "MLP", "token mlp": "token MLP"}
_WIDE = 30.0  # values that differ by more are drawn on a logarithmic axis: the short bars would not be seen
_DEEPER = 2.0  # times larger; below that, shallow and deep blocks are called alike


def _measure(context: Context) -> dict[str, Any]:
    config = context.config
    return hessian_max(
        context.model,
        context.loss_batches(config.hessian_batch),
        loss=context.loss,
        groups=parameter_blocks(context.model),
        tol=TOLERANCE,
        max_images=config.hessian_images,
        seed=config.seed,
        **context.resumable(),
    ).to_dict()


TOLERANCE = 1e-2
"""Relative: bars are compared by eye, and half as many products are enough for it."""


def _draw(runs: Sequence[Run]) -> list[Picture]:
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(name for run in runs for name in run.result["values"]))
    figure, (axes,) = figures.new()
    width = 0.8 / len(runs)
    sizes = [abs(v[0]) for run in runs for v in run.result["values"].values() if v[0]]
    handles, any_negative = [], False
    for number, (colour, run) in enumerate(zip(figures.COLOURS, runs, strict=False)):
        values = {name: found[0] for name, found in run.result["values"].items()}
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
        "Eigenvalue of largest magnitude of the Hessian, and of its diagonal blocks of each group of parameters, the "
        f"others held fixed. The loss is the mean over {runs[0].result['images']} images."
    )
    return [Picture("hessian-blocks", figure, caption)]


def _read(result: Result) -> list[str]:
    values = {name: found[0] for name, found in result["values"].items()}
    parts = {name: value for name, value in values.items() if name != "whole"}
    told = [f"The largest curvature of the whole loss is {values['whole']:.3g}."]
    if values["whole"] >= SHARP:
        told.append(
            f"Over {SHARP:g} the valley is sharp: paper D's models trained with SAM have 21 to 42, those without 180 "
            "to 1,644. Try `vtk finetune … --sam 0.1`."
        )
    if parts:
        sharpest = max(parts, key=lambda name: abs(parts[name]))
        told.append(f"Of the parts, {_NAMES.get(sharpest, sharpest)} curves most ({parts[sharpest]:.3g}).")
    blocks = [abs(value) for name, value in values.items() if name.startswith("block ")]
    if len(blocks) >= 4:
        quarter = max(len(blocks) // 4, 1)
        first, last = sum(blocks[:quarter]) / quarter, sum(blocks[-quarter:]) / quarter
        if first > _DEEPER * last:
            told.append(
                "Shallow blocks are sharper than deep ones, as paper D finds: curvature adds up on the way back to "
                "the input."
                + (" Give them a lower rate: `vtk finetune … --layer-decay 0.75`." if values["whole"] >= SHARP else "")
            )
        elif last > _DEEPER * first:
            told.append("Deep blocks are sharper than shallow ones, the other way round than in paper D.")
        else:
            told.append("Shallow and deep blocks are about as sharp.")
    negative = [name for name, value in values.items() if value < 0]
    if negative:
        told.append(f"Negative, so that the loss is not convex there: {', '.join(_NAMES.get(n, n) for n in negative)}.")
    loose = [name for name, settled in result["converged"].items() if not settled]
    if loose:
        told.append(f"Did not settle, an estimate: {', '.join(_NAMES.get(n, n) for n in loose)}.")
    return told


def _numbers(result: Result) -> dict[str, float]:
    values = result["values"]
    return {f"λ_max of {_NAMES.get(name, name)}, loss / weight²": values[name][0]
            for name in ("whole", "embedding", "msa", "token mlp", "mlp") if name in values}  # fmt: skip


DIAGNOSTIC = Diagnostic(
    name="hessian-blocks",
    title="Curvature by part",
    source="paper D (When ViTs outperform ResNets), Table 4 and Appendix F",
    explains="The largest curvature of the loss over all images at once, of the whole model and of each part while the "
    "others are held fixed. The part with the largest value is the one whose weights are the most delicate.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("hessian_images", "hessian_batch", "loss_images", "weight_decay"),
    needs=frozenset({"labels"}),
)

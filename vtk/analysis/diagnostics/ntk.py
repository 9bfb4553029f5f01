"""``ntk``: condition number of the neural tangent kernel (Chen et al. 2022, Table 1 and Appendix G)."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.measurement import measurement, on_images, sentence
from vtk.analysis.measures.ntk import PAPER_BLOCK, ntk_condition
from vtk.errors import UsageError


def _measure(context: Context) -> dict[str, Any]:
    settings = context.settings
    result = ntk_condition(
        _subject(context),
        context.batches,
        max_images=context.curvature_images,
        rectified=settings.ntk_relu,
        share=context.share,
        show_progress=context.show_progress,
    ).to_dict()
    return {**result, "initial": settings.ntk_init}


def _subject(context: Context) -> nn.Module:
    if not context.settings.ntk_init:
        return context.model
    if context.fresh is None:
        raise UsageError("it is not known how to build this model with new weights; give --no-ntk-init")
    return context.fresh().float().to(context.device).eval()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        for number, values in enumerate(run.result["eigenvalues"]):
            shares = [max(value / values[0], 0.0) or None for value in values] if values[0] else []
            x = range(1, len(shares) + 1)
            label = None if number else f"{figures.label(run.label)}: κ {_kappa(run.result)}"
            axes.plot(x, shares, ".-", color=colour, alpha=0.7, label=label)
    axes.set_yscale("log")
    figures.finish(axes, x="eigenvalue, from the largest", y="share of the largest", legend=True)
    caption = (
        f"Eigenvalues of the neural tangent kernel of {runs[0].result['block_images']} images, one line per block of "
        "images. κ is the largest over the smallest; directions with small eigenvalues are learned slowly."
    )
    return [Picture("ntk", figure, caption)]


def _kappa(result: Result) -> str:
    if result["condition"] is None:
        return "not finite"
    return f"{result['condition']:,.0f}" if result["condition"] >= 100 else f"{result['condition']:.3g}"


def _read(result: Result) -> list[str]:
    size, blocks = result["block_images"], len(result["conditions"])
    of = f"{blocks} block{'s' if blocks > 1 else ''} of {size} images"
    sentences = []
    if result["condition"] is None:
        sentences.append(
            f"The kernel of {of} is numerically singular: some images are identical, or identical to the model, so "
            "that different outputs cannot be learned for them."
        )
    else:
        sentences.append(
            f"κ is {_kappa(result)}, over {of}: the slowest direction is learned this many times more slowly than the "
            "fastest."
        )
    weights = "new random weights" if result.get("initial") else "the given weights"
    activation = "ReLU in place of GELU" if result.get("rectified") else "the model's own activation"
    sentences.append(f"{sentence(result)} It is the kernel of {weights}, with {activation}.")
    if _as_chen(result):
        sentences.append(
            "Chen et al. (2022), who measure so, too, have 2,802 for ResNet-152, 4,205 for ViT-B/16 and 14,468 for "
            "Mixer-B/16 on ImageNet."
        )
    else:
        sentences.append(
            "Chen et al. (2022) measure it at initialisation, with ReLU in place of GELU, on blocks of "
            f"{PAPER_BLOCK} training images: `vtk analyze … --protocol chen`. Only numbers of one protocol compare."
        )
    return sentences


def _as_chen(result: Result) -> bool:
    """Return whether weights, activation and images are those of Chen et al. (2022, Appendix G)."""
    return (
        bool(result.get("initial")) and bool(result.get("rectified")) and result["block_images"] == PAPER_BLOCK
        and measurement(result).get("images") == "training"
    )  # fmt: skip


def _numbers(result: Result) -> dict[str, float]:
    name = f"κ of the tangent kernel{', initial' if result.get('initial') else ''}{on_images(result)}"
    return {} if result["condition"] is None else {name: result["condition"]}


DIAGNOSTIC = Diagnostic(
    name="ntk",
    title="Trainability",
    source="Chen et al. 2022 (When Vision Transformers Outperform ResNets), Table 1, §3 and Appendix G",
    explains=(
        "The neural tangent kernel describes how a training step on one image changes the output for another. Its "
        "condition number κ is the ratio of the fastest to the slowest direction of learning: the lower, the more "
        "evenly a model learns."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("hessian_images", "ntk_relu", "ntk_init"),
)

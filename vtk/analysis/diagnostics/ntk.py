"""``ntk``: condition number of the neural tangent kernel (Chen et al. 2022, Table 1 and Appendix G)."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.ntk import ntk_condition


def _measure(context: Context) -> dict[str, Any]:
    config = context.config
    return ntk_condition(
        context.model,
        context.loader(config.batch_size),
        max_images=config.hessian_images,
        share=context.share,
        show_progress=context.show_progress,
    ).to_dict()


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
    sentences.append(
        "Chen et al. (2022) measure it at initialisation, with ReLU in place of GELU and blocks of 48 images "
        "(ResNet-152 2,802, ViT-B/16 4,205, Mixer-B/16 14,468 on ImageNet). Here it is measured at the given weights; "
        "for new weights give a timm name with --no-pretrained."
    )
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    return {} if result["condition"] is None else {"κ of the tangent kernel": result["condition"]}


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
    options=("hessian_images",),
)

"""``variance``: variance of feature maps over positions, by depth (Park and Kim 2022, Figures 9 and D.1)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis.diagnostics import depth_plots as depth
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.variance import feature_variance

_STAGES = 3  # number of stages from which peaks at their ends are a pattern


def _measure(context: Context) -> dict[str, Any]:
    return feature_variance(context.model, context.batches, max_images=context.count).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure = depth.draw_by_depth(runs, lambda unit: unit["variance"], "variance over positions", log=True)
    caption = (
        "Variance of feature maps over positions, mean over images and channels, at the output of every unit. The "
        f"axis is logarithmic: equal steps are equal factors. {depth.SHADES}"
    )
    return [Picture("variance", figure, caption)]


def _read(result: Result) -> list[str]:
    known = [unit for unit in result["units"] if unit["variance"] is not None]
    if not known:
        return ["Its maps have a single position and so no variance; give larger images."]
    changes = _positive(result)
    sentences = depth.step_sentences(
        changes, lambda pairs: f"multiplies the variance by {depth.number(_factor(pairs))} (geometric mean)", "reduce"
    )
    msa = changes.get("msa", [])
    if msa:
        sentences.append(
            "That is what Park and Kim (2022) expect of attention, which averages positions."
            if depth.share_lowered(msa) > 1 / 2
            else (
                "Park and Kim (2022) expect attention to reduce the variance, because it averages positions; most "
                "MSAs here do not."
            )
        )
    sentences.append(
        f"From {known[0]['name']} to {known[-1]['name']} it goes from {depth.number(known[0]['variance'])} to "
        f"{depth.number(known[-1]['variance'])}."
    )
    return sentences + _stage_ends(result) + depth.without_map(result)


def _stage_ends(result: Result) -> list[str]:
    """Return a sentence if the variance of a ConvNet peaks at the ends of its stages."""
    units = [unit for unit in result["units"] if unit["name"] != "stem"]
    stages: list[list[Any]] = []
    for unit in units:
        if not stages or (unit["height"], unit["width"]) != (stages[-1][-1]["height"], stages[-1][-1]["width"]):
            stages.append([])
        stages[-1].append(unit)
    values = [[unit["variance"] for unit in stage] for stage in stages if len(stage) > 1]
    values = [stage for stage in values if None not in stage]
    peaks = sum(stage[-1] > max(stage[:-1]) for stage in values)
    convolutions = all(unit["kind"] in ("conv", "subsampling") for unit in units)
    if not convolutions or len(values) < _STAGES or peaks < len(values) - 1:
        return []
    return [
        f"It peaks at the end of {peaks} of {len(values)} stages, where Park and Kim (2022) put attention: try `vtk "
        "train … --model alternet_50`."
    ]


def _positive(result: Result) -> dict[str, list[tuple[float, float]]]:
    changes = depth.steps(result, "variance")
    positive = {kind: [pair for pair in pairs if min(pair) > 0] for kind, pairs in changes.items()}
    return {kind: pairs for kind, pairs in positive.items() if pairs}


def _factor(pairs: Sequence[tuple[float, float]]) -> float:
    return math.exp(sum(math.log(behind / before) for before, behind in pairs) / len(pairs))


def _numbers(result: Result) -> dict[str, float]:
    names = "factor of the variance by {}", "variance over positions at the end"
    return depth.step_numbers(result, _positive(result), _factor, "variance", names)


DIAGNOSTIC = Diagnostic(
    name="variance",
    title="Variance of feature maps",
    source="Park and Kim 2022 (How Do Vision Transformers Work?), Figures 9 and D.1",
    explains=(
        "Variance of the features over the positions of an image. A unit that lowers it averages positions, as "
        "attention does, which reduces noise; one that raises it makes positions more different, as convolutions and "
        "MLPs do."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

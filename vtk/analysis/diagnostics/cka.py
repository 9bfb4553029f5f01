"""``cka``: similarity of the features of all units, by mini-batch CKA (Park and Kim 2022, Figures 10a and D.3)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.measures.cka import feature_similarity

_SAME = 0.99  # two units whose features are nearly rotations of each other
_BLOCKS = 0.1  # excess of CKA within stages over CKA between them from which stages are called blocks


def _measure(context: Context) -> dict[str, Any]:
    return feature_similarity(context.model, context.batches, max_images=context.count).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    alone = len(runs) == 1
    figure, places = figures.new(columns=len(runs), width=4.4 if alone else 3.6, height=3.7 if alone else 3.4)
    low = min((v for run in runs for row in run.result["similarity"] for v in row if v is not None), default=0.0)
    for axes, run in zip(places, runs, strict=True):
        rows = [[math.nan if v is None else v for v in row] for row in run.result["similarity"]]
        mesh = axes.pcolormesh(rows, cmap="viridis", vmin=min(0.0, low), vmax=1)
        axes.set_aspect("equal")
        axes.set(xlabel="unit", ylabel="unit" if axes is places[0] else "")
        ticks, names = _ticks(run.result)
        axes.set_xticks(ticks, names, fontsize=8)
        axes.set_yticks(ticks, names, fontsize=8)
        axes.tick_params(length=2)
        if not alone:
            axes.set_title(figures.label(run.label), fontsize=11)
    figure.colorbar(mesh, ax=places, label="CKA", shrink=0.85)
    down = any("P" in _ticks(run.result)[1] for run in runs)
    marks = "E is the stem, P a subsampling unit." if down else "E is the stem; numbers count the units after it."
    caption = (
        "CKA between the outputs of every pair of units, in order from the stem: 1 means equal up to rotation and "
        f"scale. {marks} Bright squares along the diagonal are groups of similar units."
    )
    return [Picture("cka", figure, caption)]


def _ticks(result: Result) -> tuple[list[float], list[str]]:
    """Return ticks at the stem and at subsampling units (as Park and Kim 2022), or else at every few units."""
    kinds = result["kinds"]
    down = [i for i, kind in enumerate(kinds) if kind == "subsampling"]
    if down:
        return [0.5, *(i + 0.5 for i in down)], ["E", *("P" for _ in down)]
    step = max(1, -(-(len(kinds) - 1) // 8))
    numbers = range(0, len(kinds), step)
    return [i + 0.5 for i in numbers], ["E" if i == 0 else str(i) for i in numbers]


def _read(result: Result) -> list[str]:
    names, rows = result["names"], result["similarity"]
    near = [(rows[i][i + 1], i + 1) for i in range(len(names) - 1) if rows[i][i + 1] is not None]
    if not near:
        return ["All images have the same features, so that they cannot be compared."]
    sentences = []
    if rows[0][-1] is not None:
        sentences.append(f"The outputs of the stem and of the last unit have a CKA of {rows[0][-1]:.2f}.")
    lowest, at = min(near)
    sentences.append(f"{names[at]} changes the features most: CKA {lowest:.2f} between its input and output.")
    still = [names[i] for value, i in near if value >= _SAME]
    if still:
        sentences.append(
            f"{len(still)} of {len(near)} units hardly change the features (CKA ≥ {_SAME}); "
            "`vtk analyze … --what lesion` measures whether the model needs them."
        )
    inside, between = _block_structure(result)
    if inside is not None and between is not None:
        shown = f"{inside:.2f} within a stage and {between:.2f} between stages"
        sentences.append(
            f"Its stages form blocks (mean CKA {shown}), as Park and Kim (2022) find for all multi-stage models."
            if inside - between >= _BLOCKS
            else f"Its stages hardly form blocks: mean CKA {shown}."
        )
    if result["left_out"]:
        sentences.append(f"{result['left_out']} images in batches of fewer than four were left out.")
    return sentences


def _block_structure(result: Result) -> tuple[float | None, float | None]:
    """Return the mean CKA of pairs of units inside of a stage and of pairs of two stages; None where there are none."""
    stage, stages = 0, []
    for kind in result["kinds"]:
        stage += kind == "subsampling"
        stages.append(stage)
    pairs = [
        (stages[i] == stages[j], value)
        for i, row in enumerate(result["similarity"])
        for j, value in enumerate(row)
        if j > i and value is not None
    ]
    inside, between = ([value for same, value in pairs if same is wanted] for wanted in (True, False))
    return (sum(inside) / len(inside) if inside else None, sum(between) / len(between) if between else None)


def _numbers(result: Result) -> dict[str, float]:
    rows = result["similarity"]
    pairs = [value for i, row in enumerate(rows) for value in row[i + 1 :] if value is not None]
    near = [rows[i][i + 1] for i in range(len(rows) - 1) if rows[i][i + 1] is not None]
    numbers = {}
    if pairs:
        numbers["mean CKA of two units"] = sum(pairs) / len(pairs)
    if near:
        numbers["lowest CKA of neighbouring units"] = min(near)
    inside, between = _block_structure(result)
    if inside is not None and between is not None:
        numbers["mean CKA inside of stages"] = inside
        numbers["mean CKA between stages"] = between
    return numbers


DIAGNOSTIC = Diagnostic(
    name="cka",
    title="Similarity of features (CKA)",
    source="Park and Kim 2022 (How Do Vision Transformers Work?), Figures 10a and D.3; Nguyen et al. 2021",
    explains="Compares which images two units represent as similar: 1 if their features are equal up to rotation and "
    "scale, near 0 if they have nothing in common. In plain ViTs all units are similar; in models with stages each "
    "stage forms a block.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

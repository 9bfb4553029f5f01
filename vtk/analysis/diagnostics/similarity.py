"""``similarity``: cosine similarity of an image's tokens, by depth (Wang et al. 2022, Figure 1)."""

import math
from collections.abc import Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.entropy import ranges
from vtk.analysis.measures.similarity import token_similarity

_ALIKE = 0.9  # an angle of 26°: tokens are mostly their common mean
_FALL = 0.02  # decrease of the cosine from which the effect of the position embedding is reported


def _measure(context: Context) -> dict[str, Any]:
    return token_similarity(context.model, context.batches, max_images=context.count).to_dict()


def _draw(runs: Sequence[Run]) -> list[Picture]:
    figure, (axes,) = figures.new()
    places = place_points(axes, [list(run.result["values"]) for run in runs])
    for colour, run, at in zip(figures.COLOURS, runs, places, strict=False):
        values = [math.nan if value is None else value for value in run.result["values"].values()]
        axes.plot(at, values, "o-", color=colour, markersize=4, label=figures.label(run.label))
    figures.finish(axes, x="block", y="mean cosine of two tokens", legend=len(runs) > 1)
    low = min((v for run in runs for v in run.result["values"].values() if v is not None), default=0.0)
    axes.set_ylim(min(low - 0.05, 0.0), 1.02)
    caption = (
        "Mean cosine similarity of all pairs of tokens of an image, after the stem, after the position embedding "
        "(pos) and after every block: 1 means that all tokens have the same direction, 0 that they have nothing in "
        "common."
    )
    return [Picture("similarity", figure, caption)]


def place_points(axes: Any, names: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the positions of each model's points on the x axis (block k at k), and label the axis.

    Args:
        axes: whose x axis it is.
        names: of each model's points, as `vtk.analysis.probes.depth_points.depth_points` gives them.
    """
    table = any("pos_embed" in one for one in names)
    special = {"stem": -1 if table else 0, "pos_embed": 0}
    places = []
    for one in names:
        blocks = iter(range(1, len(one) + 1))
        places.append([special[name] if name in special else next(blocks) for name in one])
    last = max((place[-1] for place in places if place), default=1)
    step = max(1, -(-last // 12))
    words = {
        special[name]: {"stem": "stem", "pos_embed": "pos"}[name] for one in names for name in one if name in special
    }
    ticks = [*sorted(words), *range(step, last + 1, step)]
    axes.set_xticks(ticks, [words.get(tick, str(tick)) for tick in ticks])
    for tick, text in zip(ticks, axes.get_xticklabels(), strict=True):
        text.set_rotation(90 if tick in words else 0)
    return places


def _read(result: Result) -> list[str]:
    values: dict[str, float | None] = result["values"]
    blocks = [value for name, value in values.items() if name not in ("stem", "pos_embed")]
    stem, table = values.get("stem"), values.get("pos_embed")
    known = [(i, value) for i, value in enumerate(blocks, start=1) if value is not None]
    sentences = []
    if known:
        before = f"{stem:.2f} after the stem and " if stem is not None else ""
        sentences.append(
            f"Two tokens of an image have a mean cosine of {before}{known[-1][1]:.2f} after block {known[-1][0]}."
        )
    if stem is not None and table is not None and stem - table >= _FALL:
        sentences.append(
            f"The position embedding makes tokens more different, as in Wang et al. (2022): from {stem:.2f} to "
            f"{table:.2f}."
        )
    alike = [i for i, value in known if value >= _ALIKE]
    if alike:
        sentences.append(
            f"After {_blocks(alike)} it is over {_ALIKE}: tokens are nearly equal there, so single positions carry "
            "little information of their own. Classification of whole images does not need it; segmentation and patch "
            "retrieval do."
        )
    elif known:
        highest = max(known, key=lambda pair: pair[1])
        sentences.append(
            f"It is nowhere over {_ALIKE}; tokens are most similar after block {highest[0]} ({highest[1]:.2f})."
        )
    early = [i for i in alike if i <= max(1, len(blocks) // 4)]
    if early and table is not None:
        sentences.append(
            "They are similar from the first blocks on; the convolutional stem of Wang et al. (2022) makes them more "
            "different: try `vtk train … --stem conv`."
        )
    lone = [i for i, value in enumerate(blocks, start=1) if value is None]
    if lone:
        sentences.append(f"After {_blocks(lone)} an image has a single position, and so no pairs.")
    return sentences


def _blocks(numbers: Sequence[int]) -> str:
    return f"block{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _numbers(result: Result) -> dict[str, float]:
    values = [value for value in result["values"].values() if value is not None]
    numbers = {}
    if values:
        numbers = {"highest cosine of tokens": max(values), "cosine of the last block's tokens": values[-1]}
    return numbers


DIAGNOSTIC = Diagnostic(
    name="similarity",
    title="Token similarity",
    source="Wang et al. 2022 (Scaled ReLU Matters for Training Vision Transformers), equation 5 and Figure 1",
    explains=(
        "Similarity of the tokens of one image at each depth. At 1 all tokens have the same direction and positions "
        "are lost; at low values each token carries its own information. Wang et al. (2022) find that convolutional "
        "stems and position embeddings make tokens more different."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
)

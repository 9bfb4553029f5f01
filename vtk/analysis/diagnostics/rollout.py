"""``rollout``: attention rollout to the class token (Abnar and Zuidema 2020), drawn over images."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.map_figures import chosen_images, draw_maps
from vtk.analysis.diagnostics.overlays import patches_and_half, result_of, shares
from vtk.analysis.measures.rollout import attention_rollout
from vtk.models.transforms.context_broadcast import ContextBroadcast

_UNIFORM = 0.4  # 0.5 is uniform


def _measure(context: Context) -> dict[str, Any]:
    held = chosen_images(context)
    result = result_of(attention_rollout(context.model, held), context, held)
    result["broadcasts"] = any(isinstance(module, ContextBroadcast) for module in context.model.modules())
    return result


def _whose(result: Result) -> str:
    return "the class token" if result["query"] == "class token" else "the mean of all patches (no class token)"


def _draw(runs: Sequence[Run]) -> list[Picture]:
    names = list(dict.fromkeys(_whose(run.result) for run in runs))
    what = (
        f"the attention rollout to {' and '.join(names)} through all layers (mean over heads, skip connections "
        "weighted one half)"
    )
    return draw_maps("rollout", runs, what)


def _read(result: Result) -> list[str]:
    if (means := patches_and_half(result)) is None:
        return [f"Nothing of {_whose(result)} comes from any patch."]
    patches, half = means
    sentences = [
        f"Through all layers {100 * patches:.0f} % of {_whose(result)} comes from patches; half of that from "
        f"{100 * half:.0f} % of them (mean over {len(result['images'])} images)."
    ]
    if half > _UNIFORM:
        sentences.append("That is near uniform (50 %): the layers mix all patches, and the maps show little.")
    if result["broadcasts"]:
        sentences.append("Context Broadcasting also adds the mean of all tokens, which rollout ignores.")
    return sentences


DIAGNOSTIC = Diagnostic(
    name="rollout",
    title="Attention rollout",
    source="Abnar and Zuidema, 2020 (Quantifying Attention Flow in Transformers)",
    explains=(
        "The product of the attention of all layers, with a skip connection of weight one half in each: it shows from "
        "which patches the class token is computed. FFNs and values are ignored; parallel branches are averaged."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=partial(shares, patches="rollout on patches, share", half="patches that hold half of it, share"),
    options=("overlay_images",),
)

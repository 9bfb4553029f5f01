"""``rollout``: what reaches the class token through all layers (Abnar and Zuidema, 2020), drawn over images."""

from collections.abc import Sequence
from typing import Any

from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.map_figures import chosen_images, draw_maps
from vtk.analysis.diagnostics.overlays import mean_of, result_of, shares
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
    what = f"what reaches {' and '.join(names)} through all layers: rollout, mean over heads, skip connections as half"
    return draw_maps("rollout", runs, what)


def _read(result: Result) -> list[str]:
    half, patches = mean_of(result, "half"), mean_of(result, "patches")
    if half is None or patches is None:
        return [f"Nothing of {_whose(result)} comes from any patch."]
    told = [
        f"Through all layers {100 * patches:.0f} % of {_whose(result)} comes from patches; half of that from "
        f"{100 * half:.0f} % of them (mean over {len(result['images'])} images)."
    ]
    if half > _UNIFORM:
        told.append("That is near uniform (50 %): the layers mix all patches, and the map tells little of one place.")
    if result["broadcasts"]:
        told.append("Context Broadcasting mixes the mean of all tokens in too, which rollout does not count.")
    return told


def _numbers(result: Result) -> dict[str, float]:
    return shares(result, "rollout on patches, share", "patches that hold half of it, share")


DIAGNOSTIC = Diagnostic(
    name="rollout",
    title="Attention rollout",
    source="Abnar and Zuidema, 2020 (Quantifying Attention Flow in Transformers)",
    explains="The attention of all layers multiplied, half of each layer being its skip connection: from which patches "
    "the class token is made. FFNs and values have no part in it; branches of a parallel block count with their mean.",
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("overlay_images",),
)

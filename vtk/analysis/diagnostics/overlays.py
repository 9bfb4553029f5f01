"""``overlays``: attention of the class token in the last layer, drawn over images."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.map_figures import chosen_images, draw_heads, draw_maps, encode_picture
from vtk.analysis.measures.overlays import AttentionMaps, attention_maps

_FEW = 0.15  # share of the patches: half of the attention on fewer is called concentrated
_UNIFORM = 0.4  # 0.5 is uniform; above this a map shows little
_PATCHES = 0.5  # below it, most of the attention is on prefix tokens, which have no position


def result_of(maps: AttentionMaps, context: Context, held: Sequence[Any]) -> dict[str, Any]:
    """Return maps and their images as a result that can be drawn without the images' files."""
    result = maps.to_dict()
    pictures = [encode_picture(pixels) for images, _ in held for pixels in context.pixels(images)]
    for image, picture in zip(result["images"], pictures, strict=True):
        image["picture"] = picture
    return result


def mean_of(result: Result, key: str) -> float | None:
    """Return the mean of a value over the images that have it; None if none has it."""
    values = [image[key] for image in result["images"] if image[key] is not None]
    return sum(values) / len(values) if values else None


def shares(result: Result, patches: str, half: str) -> dict[str, float]:
    """Return the two headline numbers of maps under the given names, without those that are not defined."""
    numbers = {patches: mean_of(result, "patches"), half: mean_of(result, "half")}
    return {name: value for name, value in numbers.items() if value is not None}


def query_name(result: Result) -> str:
    """Return a phrase for the query whose attention a result shows."""
    return {
        "class token": "the class token",
        "mean of all queries": "the mean of all queries (the model has no class token)",
        "single query": "the query that pools all tokens",
    }[result["query"]]


def _measure(context: Context) -> dict[str, Any]:
    held = chosen_images(context)
    return result_of(attention_maps(context.model, held), context, held)


def _draw(runs: Sequence[Run]) -> list[Picture]:
    names = list(dict.fromkeys(query_name(run.result) for run in runs))
    pictures = draw_maps("overlays", runs, f"the attention of {' and '.join(names)} in the last layer, mean over heads")
    for number, run in enumerate(runs, start=1):
        if len(run.result["images"][0]["heads"]) > 1:
            pictures.append(draw_heads("overlays", run, number if len(runs) > 1 else None))
    return pictures


def patches_and_half(result: Result) -> tuple[float, float] | None:
    """Return the share of the attention on patches, and of patches that hold half of it; None if there are none."""
    patches, half = mean_of(result, "patches"), mean_of(result, "half")
    return None if patches is None or half is None else (patches, half)


def _read(result: Result) -> list[str]:
    if (means := patches_and_half(result)) is None:
        return [f"In {result['layer']}, {query_name(result)} attends to no patch."]
    patches, half = means
    sentences = [
        f"In {result['layer']}, {query_name(result)} gives {100 * patches:.0f} % of its attention to patches; half of "
        f"that goes to {100 * half:.0f} % of them (mean over {len(result['images'])} images)."
    ]
    if patches < _PATCHES:
        sentences.append("Most of it goes to class and register tokens, so the maps show the smaller part.")
    if half < _FEW:
        sentences.append(
            "The attention is concentrated: check whether it is on the object of the class or on its context."
        )
    elif half > _UNIFORM:
        sentences.append("That is near uniform (50 %): the maps show little about what the model attends to.")
    return sentences


DIAGNOSTIC = Diagnostic(
    name="overlays",
    title="Attention of the class token",
    source="Dosovitskiy et al., 2021; Caron et al., 2021 (attention of the last layer)",
    explains=(
        "Attention of the last layer over the patches of real images. It shows what is mixed into the token that is "
        "classified, not why a class was chosen: by the last layer a patch also holds information from other patches."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=partial(shares, patches="attention on patches, share", half="patches that hold half of it, share"),
    options=("overlay_images",),
)

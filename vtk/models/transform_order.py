"""Orders the transforms of a model whose weights file already has some."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vtk.card import Transform
from vtk.errors import DataError
from vtk.models.weights.base import Base

Transforms = tuple[Transform, ...]

_ADAPT, _STEM = "adapt_input", "replace_stem"


def order_changes(base: Base, requested: Sequence[Transform], in_chans: int) -> tuple[Transforms, Transforms]:
    """Return the transforms up to the last one that the base was made with, and those after it.

    The file's transforms come first, in their order, whether requested or not: its tensors have the names after them,
    and would compute something else without them.

    Args:
        base: with the transforms of its file.
        requested: transforms of the new model.
        in_chans: input channels; other than 3 adapts the stem first, or after a stem that the base has.

    Raises:
        DataError: other transforms are requested than the file has.
    """
    own = base.transforms
    adapt = next((t for t in requested if t.op == _ADAPT), None)
    if not own:
        first = () if in_chans == 3 or adapt else (Transform(_ADAPT, {"in_chans": in_chans}),)
        return (), (*first, *requested)
    if adapt is None and in_chans != 3:
        adapt = Transform(_ADAPT, {"in_chans": in_chans})
    present = {t.op: t for t in own}
    rest = [t for t in requested if t not in own and t.op != _ADAPT]
    if other := next((t for t in rest if t.op in present), None):
        raise DataError(
            f"{base.file} was made with `{other.op}` {present[other.op].args}, and {other.args} is requested; request "
            "the same or nothing, or give weights without it"
        )
    if _ADAPT in present and adapt != present[_ADAPT]:
        channels = present[_ADAPT].args.get("in_chans")
        raise DataError(
            f"the stem of {base.file} is for {channels} channels, not {in_chans}; give --in-chans {channels}"
        )
    if adapt is None or _ADAPT in present:
        return own, tuple(rest)
    return (own, (adapt, *rest)) if _STEM in present else ((adapt, *own), tuple(rest))


def describe_changes(
    base: Base, changes: tuple[Transforms, Transforms], requested: Sequence[Transform], model: nn.Module,
    key_map: Mapping[str, str | None],
) -> list[str]:  # fmt: skip
    """Return notes for the user: transforms of the file that were not requested, and untrained weights of a stem.

    Args:
        base: of the model.
        changes: the result of `order_changes`.
        requested: transforms of the model.
        model: after the transforms.
        key_map: from its keys to the base's.
    """
    before, after = changes
    brought = [t for t in before if t not in requested and t.op != _ADAPT]
    notes = [f"{base.file} was made with `{t.op}` {t.args}, and so is this model" for t in brought]
    stem = next((t.args["stem"] for t in after if t.op == _STEM), None)
    if stem is not None and not base.ref.source.startswith("random:"):
        kept = "patch_embed.proj.proj." if getattr(model.patch_embed, "kept", False) else None
        new = [
            p.numel()
            for name, p in model.named_parameters()
            if name.startswith("patch_embed.") and key_map[name] is None and not (kept and name.startswith(kept))
        ]
        notes.append(f"stem {stem}: {sum(new):,} weights are randomly initialised")
    return notes


def unchanged(base: Base, state: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of transform tensors of the base's file whose values the model still has."""
    own = {key: value.to(state[key].dtype) for key, value in base.transform_tensors.items() if key in state}
    return frozenset(key for key, value in own.items() if torch.equal(value, state[key]))

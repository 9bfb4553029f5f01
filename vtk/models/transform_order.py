"""Which transforms a model gets, in which order, where the file of its weights was made with some already."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vtk.card import Transform
from vtk.errors import DataError
from vtk.models.weights.base import Base

Transforms = tuple[Transform, ...]

_ADAPT, _STEM = "adapt_input", "replace_stem"


def order_changes(base: Base, asked: Sequence[Transform], in_chans: int) -> tuple[Transforms, Transforms]:
    """Return the transforms up to the last one that the base was made with, and those after it.

    What a file was made with comes first, in its own order, whether or not it is asked for: its tensors have the names
    from afterwards, and without it they would compute something else.

    Args:
        base: with the transforms of its file.
        asked: for the new model.
        in_chans: channels of its images; other than 3 adapts the stem, before everything else, or after a stem that
            the base brings.

    Raises:
        DataError: something else is asked for than the file was made with.
    """
    own = base.transforms
    adapt = next((t for t in asked if t.op == _ADAPT), None)
    if not own:
        first = () if in_chans == 3 or adapt else (Transform(_ADAPT, {"in_chans": in_chans}),)
        return (), (*first, *asked)
    if adapt is None and in_chans != 3:
        adapt = Transform(_ADAPT, {"in_chans": in_chans})
    made = {t.op: t for t in own}
    rest = [t for t in asked if t not in own and t.op != _ADAPT]
    if other := next((t for t in rest if t.op in made), None):
        raise DataError(
            f"{base.file} was made with `{other.op}` {made[other.op].args}, and {other.args} is asked for; ask for the "
            "same or for nothing, or give weights from before it"
        )
    if _ADAPT in made and adapt != made[_ADAPT]:
        channels = made[_ADAPT].args.get("in_chans")
        raise DataError(
            f"the stem of {base.file} is for {channels} channels, not {in_chans}; give --in-chans {channels}"
        )
    if adapt is None or _ADAPT in made:
        return own, tuple(rest)
    return (own, (adapt, *rest)) if _STEM in made else ((adapt, *own), tuple(rest))


def describe_changes(
    base: Base, changes: tuple[Transforms, Transforms], asked: Sequence[Transform], model: nn.Module,
    key_map: Mapping[str, str | None],
) -> list[str]:  # fmt: skip
    """Return notes for the user: what the file brings that was not asked for, and how much of a stem is untrained.

    Args:
        base: of the model.
        changes: what `order_changes` returned.
        asked: for the model.
        model: after them.
        key_map: from its keys to the base's.
    """
    before, after = changes
    brought = [t for t in before if t not in asked and t.op != _ADAPT]
    notes = [f"{base.file} was made with `{t.op}` {t.args}, and so is this model" for t in brought]
    stem = next((t.args["stem"] for t in after if t.op == _STEM), None)
    if stem is not None and not base.ref.source.startswith("random:"):
        kept = "patch_embed.proj.proj." if stem.startswith("1proj") else None
        new = [
            p.numel()
            for name, p in model.named_parameters()
            if name.startswith("patch_embed.") and key_map[name] is None and not (kept and name.startswith(kept))
        ]
        notes.append(f"stem {stem}: {sum(new):,} weights start untrained")
    return notes


def unchanged(base: Base, state: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the tensors that transforms made for the file of the base, where a model has their values still."""
    own = {key: value.to(state[key].dtype) for key, value in base.made.items() if key in state}
    return frozenset(key for key, value in own.items() if torch.equal(value, state[key]))

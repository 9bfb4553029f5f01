"""Compares a pack with its base, or with another pack."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vtk.errors import UsageError
from vtk.packs.load import Task, load_task


@dataclass(frozen=True)
class Change:
    """Relative change of one part of a model.

    Attributes:
        part: block or top-level module.
        tensors: of the part that differ.
        total: tensors of the part.
        relative: ‖a − b‖₂ / ‖b‖₂ over the part's tensors of equal shape; NaN where the reference is all zero.
        shape_differs: tensors that cannot be compared.
    """

    part: str
    tensors: int
    total: int
    relative: float
    shape_differs: int


@dataclass(frozen=True)
class Diff:
    """The difference of two sets of weights, and the bytes they share value for value (fp32)."""

    changes: tuple[Change, ...]
    shared_bytes: int
    total_bytes: int
    shared_ffn: int
    total_ffn: int


def diff_task(a: Path, b: Path | None = None, *, base: Path | None = None) -> Diff:
    """Compare pack ``a`` with pack ``b``, or with its own base.

    Raises:
        UsageError: the packs are of different models, or ``a`` is a bundle and there is nothing else to compare with.
        DataError: a pack is damaged or its base is not found.
    """
    first = load_task(a, base=base)
    if b is None:
        assert first.base is not None
        if first.bundled:
            raise UsageError(
                f"{a} is a bundle, which holds only what its pack needs of the base; compare it with another pack, or "
                "give --base FILE"
            )
        return diff_tensors(first.model.state_dict(), first.base.tensors)
    second = load_task(b, base=base)
    _check_same(first, second)
    return diff_tensors(first.model.state_dict(), second.model.state_dict())


def diff_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Diff:
    """Compare two state dicts; tensors that only one has are counted as differing."""
    parts: dict[str, list[str]] = {}
    for key in a:
        parts.setdefault(_part(key), []).append(key)
    changes, shared, ffn_shared, ffn_total = [], 0, 0, 0
    for part, keys in parts.items():
        moved = square = norm = 0.0
        differ = shapes = 0
        for key in keys:
            is_ffn = ".mlp." in key and ".cb." not in key  # Λ of Context Broadcasting is the task's
            ffn_total += is_ffn
            if key not in b or a[key].shape != b[key].shape:
                shapes += 1
                continue
            x, y = a[key].double(), b[key].double()
            square, norm = float((x - y).square().sum()), norm + float(y.square().sum())
            moved += square
            if torch.equal(a[key].float(), b[key].float()):
                shared += a[key].numel() * 4
                ffn_shared += is_ffn
            else:
                differ += 1
        relative = (moved / norm) ** 0.5 if norm else float("nan")
        changes.append(Change(part, differ + shapes, len(keys), relative, shapes))
    total = sum(v.numel() * 4 for v in a.values())
    return Diff(tuple(changes), shared, total, ffn_shared, ffn_total)


def _part(key: str) -> str:
    names = key.split(".")
    return ".".join(names[:2]) if len(names) > 2 and names[1].isdigit() else names[0]


def _check_same(a: Task, b: Task) -> None:
    if a.card.model != b.card.model or a.card.transforms != b.card.transforms:
        raise UsageError(
            f"the packs are of different models ({a.card.model.name} {a.card.model.kwargs}, {b.card.model.name} "
            f"{b.card.model.kwargs}); compare packs of one model"
        )

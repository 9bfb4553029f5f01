"""Checks the factors of a pack against its card: names, ranks, scales, shapes, types and the size of the values.

Nothing here needs the base or a model, so it holds for every reader. What only these tell is refused by
`vtk.packs.load`: a matrix of another shape, or one that does not start from the base.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from vtk.card import FACTORS_SCHEMA, MAX_NUMBER, Card
from vtk.errors import DataError
from vtk.models.devices import DTYPES
from vtk.packs.config import PackDtype

PARTS = (":a", ":b", ":a:scale", ":b:scale")
"""Ends of the names of a matrix's tensors."""
WRONG = "the pack was edited or its files mixed"

Pair = tuple[int, int]
_MAX_SCALE = 1e6
_MAX_CHANGE = 1e30
"""Far above any weight, and far below the largest fp32 number: finite factors may have a product that is not."""
_DIGEST = re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"[\w.]+")


@dataclass(frozen=True)
class Fact:
    """What a card says of one matrix: `vtk.packs.factors.card_facts` writes it.

    Attributes:
        rank: of the factors.
        scale: of their product.
        start: sha256 of the base's tensor where ``base_tensors.json`` has none.
    """

    rank: int
    scale: float
    start: str | None = None


def read_facts(card: Card, where: str | Path) -> dict[str, Fact]:
    """Return what a card says of its pack's factors, by the names of the matrices; nothing for most packs.

    Raises:
        DataError: an impossible value, or a schema that contradicts it; ``where`` names the pack.
    """
    facts = card.pack.get("factors", {})
    if not isinstance(facts, Mapping) or bool(facts) != (card.schema >= FACTORS_SCHEMA):
        raise DataError(f"{where}: its card's `schema` {card.schema} and `pack.factors` contradict each other; {WRONG}")
    if facts and card.pack.get("dtype") not in get_args(PackDtype):
        known = ", ".join(get_args(PackDtype))
        raise DataError(f"{where}: its card's `pack.dtype` is {_show(card.pack.get('dtype'))}; known: {known}; {WRONG}")
    return {name: _read_fact(name, fact, where) for name, fact in facts.items()}


def _read_fact(name: str, fact: Any, where: str | Path) -> Fact:
    if not _NAME.fullmatch(name):
        raise DataError(f"{where}: its card lists factors of {_show(name)}, which is no name of a parameter; {WRONG}")
    rank, scale, start = (fact.get(k) for k in ("rank", "scale", "start")) if isinstance(fact, Mapping) else [None] * 3
    if type(rank) is not int or not 0 <= rank <= MAX_NUMBER:
        raise DataError(f"{where}: the rank of `{name}` is {_show(rank)}; it is from 0 to {MAX_NUMBER}; {WRONG}")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= _MAX_SCALE:
        raise DataError(f"{where}: the scale of `{name}` is {_show(scale)}; it is a number, at most 1e6; {WRONG}")
    if start is not None and (not isinstance(start, str) or not _DIGEST.fullmatch(start)):
        raise DataError(f"{where}: the start of `{name}` is {_show(start)}, which is no SHA-256; {WRONG}")
    return Fact(rank, float(scale), start)


def read_layout(card: Card, where: str | Path) -> tuple[Pair | None, Pair | None]:
    """Return the grid of the base's position table in patches and its images' size, where factors start from it.

    Height first; None where the base did not say (`vtk.models.weights.base.Base`).

    Raises:
        DataError: neither a pair of numbers nor absent.
    """
    layout: Any = card.pack.get("start_layout", {})
    grid, size = (layout.get(name) for name in ("grid", "size")) if isinstance(layout, Mapping) else ((), ())
    for pair in (grid, size):
        whole = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(side) is int for side in pair)
        if pair is not None and not (whole and 1 <= min(pair) and max(pair) <= MAX_NUMBER):
            raise DataError(f"{where}: its card's `pack.start_layout` is {_show(layout)}; {WRONG}")
    return grid and tuple(grid), size and tuple(size)


def check_parts(name: str, fact: Fact, dtype: str, parts: list[Tensor | None], where: str | Path) -> None:
    """Refuse factors that are not what their card says.

    Args:
        name: of the matrix.
        fact: of the card.
        dtype: of the card: ``fp32``, ``bf16`` or ``int8``.
        parts: tensors of the file under the names of `PARTS`, None where there is none.
        where: names the pack in messages.

    Raises:
        DataError: absent, or of another shape or type; values that are not finite, or whose product is not.
    """
    a, b, *scales = parts
    rank, kind = fact.rank, torch.int8 if dtype == "int8" else DTYPES[dtype]
    if rank == 0:
        if any(part is not None for part in parts):
            raise DataError(f"{where} holds factors of `{name}`, which has rank 0 by its card; {WRONG}")
        return
    if a is None or b is None:
        raise DataError(f"{where} lacks the factors of `{name}`, of rank {rank} by its card; {WRONG}")
    if (a.ndim, b.ndim) != (2, 2) or len(a) != rank or b.shape[1] != rank or {a.dtype, b.dtype} != {kind}:
        raise DataError(
            f"{where}: the factors of `{name}` are {_type(a)} and {_type(b)}; by its card they are ({rank}, columns) "
            f"and (rows, {rank}) in {kind}; {WRONG}"
        )
    for scale in scales:
        if (scale is not None) != (dtype == "int8") or (
            scale is not None and (tuple(scale.shape) != (rank,) or scale.dtype != torch.float32)
        ):
            found = "absent" if scale is None else _type(scale)
            raise DataError(f"{where}: scales of the factors of `{name}` are {found}; int8 has ({rank},) in fp32, and "
                            f"other types none; {WRONG}")  # fmt: skip
    for values in parts:
        if values is not None and values.is_floating_point() and not bool(values.isfinite().all()):
            raise DataError(f"{where}: the factors of `{name}` hold numbers that are not finite; training went wrong")
    largest = _largest(a, scales[0], 1) * _largest(b, scales[1], 0)
    if float(largest.sum()) * abs(fact.scale) > _MAX_CHANGE:
        raise DataError(f"{where}: the factors of `{name}` make a change beyond {_MAX_CHANGE:g}; training went wrong")


def check_names(
    facts: Mapping[str, Fact], keys: Callable[[str], str | None], hashed: Collection[str], where: str | Path
) -> None:
    """Refuse factors that start from no tensor of the base, whose values would be chance.

    Args:
        facts: of the card, by the names of the matrices.
        keys: name in the model to name in the base, or None.
        hashed: names of the base's tensors in ``base_tensors.json``.
        where: names the pack in messages.

    Raises:
        DataError: names the matrix.
    """
    for name, fact in facts.items():
        key = keys(name)
        if key is None or (key in hashed) == (fact.start is not None):
            what = "names two starts" if key in hashed else "no tensor of its base is their start"
            raise DataError(f"{where} holds factors of `{name}`, and {what}; {WRONG}")


def _largest(values: Tensor, scale: Tensor | None, axis: int) -> Tensor:
    """Return the largest absolute value of each component, in fp64."""
    if not values.numel():
        return torch.zeros(values.shape[1 - axis], dtype=torch.float64)
    largest = values.double().abs().amax(dim=axis)
    return largest if scale is None else largest * scale.double().abs()


def _type(values: Tensor) -> str:
    return f"{tuple(values.shape)} in {values.dtype}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

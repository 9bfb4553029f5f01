"""Reads what a card says of its pack's factors, and checks it; without torch and without tensors."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from vtk.card import FACTORS_SCHEMA, MAX_NUMBER, Card
from vtk.errors import DataError
from vtk.packs.config import PackDtype

WRONG = "the pack was edited or its files mixed"

_MAX_SCALE = 1e6
_DIGEST = re.compile("[0-9a-f]{64}")
_NAME = re.compile(r"[\w.]+")
Pair = tuple[int, int]


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


@dataclass(frozen=True)
class Ranks:
    """Ranks of a pack's matrices.

    Attributes:
        matrices: their number, without tables that are those of the base.
        low: the lowest rank.
        mean: the mean; of `vtk tasks compress` that of the weights, by their size.
        high: the highest rank.
    """

    matrices: int
    low: int
    mean: float
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.mean:.1f} ({self.low}-{self.high})"


def ranks_of(card: Card, where: str | Path) -> Ranks | None:
    """Return the ranks of a card's factors, without tables left as the base's; None for a pack without factors.

    Raises:
        DataError: as `read_facts`.
    """
    # a position table of rank 0 is that of the base
    ranks = [fact.rank for fact in read_facts(card, where).values() if fact.rank or fact.start is None]
    if not ranks:
        return None
    made = _number(card, "compression", "mean_rank")
    mean = sum(ranks) / len(ranks) if made is None or not min(ranks) <= made <= max(ranks) else made
    return Ranks(len(ranks), min(ranks), mean, max(ranks))


def drop_of(card: Card) -> float | None:
    """Return by how much compression lowered the judged accuracy, as a fraction; None where nothing was measured."""
    drop = _number(card, "compression", "judged", "drop")
    return drop if drop is None or -1 <= drop <= 1 else None


def _number(card: Card, *path: str) -> float | None:
    """Return a number inside the card's ``pack``; None where there is none."""
    found: Any = card.pack
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, (int, float)) and abs(found) <= MAX_NUMBER else None


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


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

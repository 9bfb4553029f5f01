"""Low-rank changes of matrices, as a pack stores them: W = start + scale · b · a, with a (r, K) and b (F, r).

The start is the model's value as created from the base; a position table's is that of the base, resampled to the task's
size. A parameter of more than two axes counts as a matrix of all its axes but the last, by the last. The file has
``NAME:a`` and ``NAME:b``, in int8 with one fp32 scale for each of the r components, ``NAME:a:scale`` and
``NAME:b:scale``. The card lists every such matrix under ``pack.factors``; one of rank 0 has no tensors. All other
tensors of such a pack are exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vtk.card import FACTORS_SCHEMA, Card
from vtk.errors import DataError
from vtk.models.devices import DTYPES
from vtk.models.weights.files import read_safetensors
from vtk.packs.cards import TENSORS, find_pack, read_card, read_hashes

FactorDtype = Literal["fp32", "bf16", "int8"]
PARTS = (":a", ":b", ":a:scale", ":b:scale")
"""Ends of the names of a matrix's tensors."""

_STEPS = 127
_MAX_SCALE = 1e6


@dataclass(frozen=True, eq=False)
class Factors:
    """The change of one matrix (F, K).

    Attributes:
        a: (r, K), floating point, or int8 with scales.
        b: (F, r), the type of ``a``.
        scale: of the product; α / r of a LoRA adapter.
        a_scale: (r,) fp32, of the rows of an int8 ``a``; None otherwise.
        b_scale: (r,) fp32, of the columns of an int8 ``b``; None otherwise.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None

    @classmethod
    def of(cls, change: Tensor, rank: int | None = None) -> "Factors":
        """Cut a change (…, K) to its ``rank`` largest singular values, computed in fp64; all of them by default.

        Both factors take the square root of each singular value, so that neither needs a wider range than the other.
        """
        flat = change.detach().cpu().double().reshape(-1, change.shape[-1])
        u, s, vh = torch.linalg.svd(flat, full_matrices=False)
        r = len(s) if rank is None else min(rank, len(s))
        root = s[:r].sqrt()
        return cls((root[:, None] * vh[:r]).to(change.dtype), (u[:, :r] * root).to(change.dtype))

    @property
    def rank(self) -> int:
        """r."""
        return len(self.a)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in (self.a, self.b, self.a_scale, self.b_scale) if t is not None)

    def values(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return a (r, K) and b (F, r) in a floating type, all scales in them."""
        wide = torch.promote_types(dtype, torch.float32)
        a, b = self.a.to(wide), self.b.to(wide)
        if self.a_scale is not None and self.b_scale is not None:
            a, b = a * self.a_scale.to(wide)[:, None], b * self.b_scale.to(wide)
        return a.to(dtype), (b * self.scale if self.scale != 1 else b).to(dtype)

    def change(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the change (F, K), computed in fp32, or in fp64 for it."""
        a, b = self.values(torch.promote_types(dtype, torch.float32))
        return (b @ a).to(dtype)

    def to(self, dtype: FactorDtype) -> "Factors":
        """Return the same change in another type; int8 has one scale for each component of a and of b."""
        if dtype != "int8":
            kind = DTYPES[dtype]
            if self.a_scale is None:
                return Factors(self.a.to(kind), self.b.to(kind), self.scale)
            a, b = Factors(self.a, self.b, 1.0, self.a_scale, self.b_scale).values()
            return Factors(a.to(kind), b.to(kind), self.scale)
        if self.a_scale is not None:
            return self
        a, b = self.a.float(), self.b.float()
        a_scale, b_scale = (_step(t, axis) for t, axis in ((a, 1), (b, 0)))
        codes_a = (a / _above_zero(a_scale)[:, None]).round().clamp(-_STEPS, _STEPS).to(torch.int8)
        codes_b = (b / _above_zero(b_scale)).round().clamp(-_STEPS, _STEPS).to(torch.int8)
        return Factors(codes_a, codes_b, self.scale, a_scale, b_scale)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the file of the matrix ``name``; none of rank 0."""
        parts = (self.a, self.b, self.a_scale, self.b_scale)
        named = zip(PARTS, parts, strict=True)
        return {name + end: t.contiguous() for end, t in named if t is not None} if self.rank else {}


@dataclass(frozen=True)
class PackTensors:
    """What a pack's own files hold, without its base.

    Attributes:
        path: folder of the pack.
        card: of the pack.
        hashes: sha256 of every tensor of the base.
        dense: tensors by their names in the model, as stored.
        factors: of the matrices stored as factors, by name.
    """

    path: Path
    card: Card
    hashes: Mapping[str, str]
    dense: Mapping[str, Tensor]
    factors: Mapping[str, Factors]


def read_pack(path: str | Path, card: Card | None = None) -> PackTensors:
    """Read the files of a pack; neither the base is needed nor a model built.

    Args:
        path: folder of the pack.
        card: of it, where it was read.

    Raises:
        DataError: no pack, or a damaged one.
    """
    folder = find_pack(Path(path))
    card = card or read_card(folder)
    hashes = read_hashes(folder)
    stored, _ = read_safetensors(folder / TENSORS)
    dense, factors = split_tensors(stored, card, folder)
    return PackTensors(folder, card, hashes, dense, factors)


def card_facts(factors: Mapping[str, Factors], starts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return ``pack.factors`` of the card.

    Args:
        factors: by name.
        starts: sha256 of the base's tensor, for names of which ``base_tensors.json`` has none (position tables).
    """
    return {
        name: {"rank": f.rank, "scale": f.scale, **({"start": starts[name]} if name in starts else {})}
        for name, f in sorted(factors.items())
    }  # fmt: skip


def starts_of(card: Card) -> dict[str, str]:
    """Return the hashes of base tensors that `card_facts` recorded, by name in the model."""
    facts = card.pack.get("factors", {})
    return {name: fact["start"] for name, fact in facts.items() if isinstance(fact, Mapping) and "start" in fact}


def split_tensors(
    stored: Mapping[str, Tensor], card: Card, where: str | Path
) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """Separate a pack's factors from its other tensors.

    Args:
        stored: tensors of the file.
        card: of the pack.
        where: names the pack in messages.

    Raises:
        DataError: the card and the tensors do not agree, or factors have impossible shapes, types or values.
    """
    facts = card.pack.get("factors", {})
    if not isinstance(facts, Mapping) or bool(facts) != (card.schema >= FACTORS_SCHEMA):
        raise DataError(
            f"{where}: its card's `schema` {card.schema} and `pack.factors` contradict each other; {_WRONG}"
        )
    dense, factors = dict(stored), {}
    for name, fact in facts.items():
        rank, scale = _read_fact(name, fact, where)
        if name in dense:
            raise DataError(f"{where} holds `{name}` both whole and as factors; {_WRONG}")
        parts = [dense.pop(name + end, None) for end in PARTS]
        factors[name] = _checked(name, rank, scale, parts, where)
    if odd := next((name for name in dense if name.endswith(PARTS)), None):
        raise DataError(f"{where} holds `{odd}`, which its card does not list among the factors; {_WRONG}")
    return dense, factors


_WRONG = "the pack was edited or its files mixed"


def _read_fact(name: str, fact: Any, where: str | Path) -> tuple[int, float]:
    rank, scale = (fact.get("rank"), fact.get("scale", 1.0)) if isinstance(fact, Mapping) else (None, None)
    if type(rank) is not int or rank < 0 or not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise DataError(f"{where}: its card has no rank and scale for `{name}`; {_WRONG}")
    if not math.isfinite(scale) or abs(scale) > _MAX_SCALE:
        raise DataError(f"{where}: the scale of `{name}` is {scale}; {_WRONG}")
    return rank, float(scale)


def _checked(name: str, rank: int, scale: float, parts: list[Tensor | None], where: str | Path) -> Factors:
    a, b, a_scale, b_scale = parts
    if rank == 0 and all(part is None for part in parts):
        return Factors(torch.empty(0, 0), torch.empty(0, 0), scale)
    if a is None or b is None:
        raise DataError(f"{where} lacks the factors of `{name}`, of rank {rank} by its card; {_WRONG}")
    if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank or a.dtype != b.dtype:
        raise DataError(
            f"{where}: the factors of `{name}` are {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}; by its "
            f"card they are ({rank}, columns) and (rows, {rank}) of one type; {_WRONG}"
        )
    coded = a.dtype == torch.int8
    if not coded and a.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise DataError(f"{where}: the factors of `{name}` are {a.dtype}; they are floating point or int8; {_WRONG}")
    for values in (a_scale, b_scale):
        if (values is not None) != coded or (values is not None and tuple(values.shape) != (rank,)):
            raise DataError(f"{where}: the scales of the factors of `{name}` do not fit its {a.dtype}; {_WRONG}")
    for values in parts:
        if values is not None and values.is_floating_point() and not bool(values.isfinite().all()):
            raise DataError(
                f"{where}: the factors of `{name}` hold numbers that are not finite; its training went wrong"
            )
    return Factors(a, b, scale, a_scale, b_scale)


def _step(values: Tensor, axis: int) -> Tensor:
    return values.abs().amax(dim=axis) / _STEPS if values.numel() else values.new_zeros(values.shape[1 - axis])


def _above_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))

"""Low-rank changes of matrices, as a pack stores them: W = start + scale · b · a, with a (r, K) and b (F, r).

The start is the model's value as created from the base; a position table's is that of the base, resampled to the task's
size. A parameter of more than two axes counts as a matrix of all its axes but the last, by the last. The file has
``NAME:a`` and ``NAME:b``, in int8 with one fp32 scale for each of the r components, ``NAME:a:scale`` and
``NAME:b:scale``. The card lists every such matrix under ``pack.factors``; one of rank 0 has no tensors. All other
tensors of such a pack are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vtk.card import Card
from vtk.errors import DataError
from vtk.models.devices import DTYPES
from vtk.models.weights.base import base_id
from vtk.models.weights.files import read_safetensors
from vtk.models.weights.torch_file import NARROW
from vtk.packs.cards import CARD, HASHES, TENSORS, find_pack, read_card, read_hashes
from vtk.packs.factor_checks import PARTS, check_parts
from vtk.packs.factor_facts import WRONG, check_names, read_facts, read_layout
from vtk.packs.int8 import SCALE
from vtk.text import printable

FactorDtype = Literal["fp32", "bf16", "int8"]
_STEPS = 127


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

        Raises:
            DataError: the change holds numbers that are not finite.
        """
        if not bool(change.isfinite().all()):
            raise DataError("a change of a matrix holds numbers that are not finite; its training went wrong")
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
        a, b = self.matrices(torch.promote_types(dtype, torch.float32))
        return a.to(dtype), (b * self.scale if self.scale != 1 else b).to(dtype)

    def matrices(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return a (r, K) and b (F, r) in fp32 or fp64, the scales of int8 in them, but not `scale`."""
        a, b = self.a.to(dtype), self.b.to(dtype)
        if self.a_scale is not None and self.b_scale is not None:
            a, b = a * self.a_scale.to(dtype)[:, None], b * self.b_scale.to(dtype)
        return a, b

    def change(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the change (F, K), computed in fp32, or in fp64 for it; (0, 0) for a rank 0 read from a file."""
        a, b = self.matrices(torch.promote_types(dtype, torch.float32))
        product = b @ a  # scaled after it, as PEFT does, so that its merge has the same bits
        return (product * self.scale if self.scale != 1 else product).to(dtype)

    def to(self, dtype: FactorDtype) -> "Factors":
        """Return the same change in another type; int8 has one scale for each component of a and of b."""
        if dtype != "int8":
            kind = DTYPES[dtype]
            if self.a_scale is None:
                return Factors(self.a.to(kind), self.b.to(kind), self.scale)
            a, b = self.matrices()
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
    """Read the files of a pack and check them; neither the base is needed nor a model built.

    Args:
        path: folder of the pack, or of its run.
        card: of it, where it was read.

    Raises:
        DataError: no pack, or a damaged one.
    """
    pack = read_files(find_pack(Path(path)), card)
    check_trained(pack)
    return pack


def read_files(folder: Path, card: Card | None = None) -> PackTensors:
    """Read the files of a pack's folder as `read_pack` does, without `check_trained`.

    Raises:
        DataError: as `read_pack`.
    """
    card, hashes = card or read_card(folder), read_hashes(folder)
    if card.base is None or base_id(hashes) != card.base.id:
        raise DataError(f"{folder}: {CARD} and {HASHES} name different bases; the pack was edited")
    stored, _ = read_safetensors(folder / TENSORS)
    dense, factors = split_tensors(stored, card, folder)
    if factors:
        read_layout(card, folder)
        if not card.transforms:  # else names in the base are others, which only the model tells: `base_needs`
            check_names(read_facts(card, folder), lambda name: name, hashes, folder)
    for name, value in dense.items():
        if value.dtype in NARROW or value.is_complex():
            raise DataError(f"{folder}: `{printable(name)}` holds {value.dtype}, as no pack does; {WRONG}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise DataError(f"{folder}: `{printable(name)}` holds numbers that are not finite; its training went wrong")
    return PackTensors(folder, card, hashes, dense, factors)


def check_trained(pack: PackTensors) -> None:
    """Refuse a pack without a tensor that its card says was trained.

    Raises:
        DataError: names the tensor.
    """
    held = {name.removesuffix(SCALE) for name in pack.dense} | pack.factors.keys()
    if lost := sorted(set(pack.card.pack.get("trained", ())) - held):
        raise DataError(
            f"{pack.path} lacks `{lost[0]}`, which its card says was trained; the file is truncated or of another pack"
        )


def merge_factors(model: nn.Module, factors: Mapping[str, Factors], where: str | Path) -> None:
    """Add changes to the parameters of a model as created from its base, in place.

    Raises:
        DataError: the model has no such matrix, or one of another shape.
    """
    state = model.state_dict()
    with torch.no_grad():
        for name, change in factors.items():
            check_matrix(name, change, state.get(name), where)
            if change.rank:
                value = state[name]
                value += change.change(value.dtype).reshape(value.shape)


def check_matrix(name: str, change: Factors, value: Tensor | None, where: str | Path) -> None:
    """Refuse a change that does not fit the model's tensor ``value``, None where the model has none of this name.

    Raises:
        DataError: no matrix, or one of another shape; ``where`` names the pack.
    """
    if value is None:
        raise DataError(f"{where} holds factors of `{name}`, which its model does not have; {WRONG}")
    if value.ndim < 2 or not value.is_floating_point():
        raise DataError(
            f"{where} holds factors of `{name}`, which is no matrix but {value.dtype} of shape {tuple(value.shape)}; "
            f"{WRONG}"
        )
    shape = (value[..., 0].numel(), value.shape[-1])
    if change.rank and (len(change.b), change.a.shape[1]) != shape:
        raise DataError(
            f"{where}: the factors of `{name}` make a matrix {(len(change.b), change.a.shape[1])}, by its card it is "
            f"{shape}; {WRONG}"
        )


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
    return {name: fact.start for name, fact in read_facts(card, "the card").items() if fact.start is not None}


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
    dense, factors = dict(stored), {}
    for name, fact in read_facts(card, where).items():
        if name in dense:
            raise DataError(f"{where} holds `{name}` both whole and as factors; {WRONG}")
        parts = [dense.pop(name + end, None) for end in PARTS]
        check_parts(name, fact, card.pack["dtype"], parts, where)
        a, b, a_scale, b_scale = parts
        none = torch.empty(0, 0)
        factors[name] = Factors(none if a is None else a, none if b is None else b, fact.scale, a_scale, b_scale)
    if factors and (odd := next((name for name in dense if ":" in name), None)):
        raise DataError(f"{where} holds `{printable(odd)}`, which its card does not list among the factors; {WRONG}")
    return dense, factors


def _step(values: Tensor, axis: int) -> Tensor:
    return values.abs().amax(dim=axis) / _STEPS if values.numel() else values.new_zeros(values.shape[1 - axis])


def _above_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))

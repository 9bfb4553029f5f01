"""Checks the factors of a pack's file against its card: shapes, types and the size of the values.

Nothing here needs the base or a model, so it holds for every reader.
"""

from pathlib import Path

import torch
from torch import Tensor

from vtk.errors import DataError
from vtk.models.devices import DTYPES
from vtk.packs.factor_facts import WRONG, Fact

PARTS = (":a", ":b", ":a:scale", ":b:scale")
"""Ends of the names of a matrix's tensors."""

_MAX_CHANGE = 1e30
"""Far above any weight, and far below the largest fp32 number: finite factors may have a product that is not."""


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
    if not len(b) or not a.shape[1] or rank > max(len(b), a.shape[1]):
        raise DataError(
            f"{where}: the factors of `{name}` have rank {rank}, beyond both sides of their matrix "
            f"({len(b)}, {a.shape[1]}); {WRONG}"
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


def _largest(values: Tensor, scale: Tensor | None, axis: int) -> Tensor:
    """Return the largest absolute value of each component, in fp64."""
    largest = values.double().abs().amax(dim=axis)
    return largest if scale is None else largest * scale.double().abs()


def _type(values: Tensor) -> str:
    return f"{tuple(values.shape)} in {values.dtype}"

"""Tables that depend on the size of an image alone: made at its first call, kept for the next ones."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vtk.fused.onednn_prepack import observed

Grid = tuple[int, int]
"""Height and width in patches."""

MOST = 32
"""Sizes whose tables are kept."""

Stamps = tuple[tuple[int, int], ...]


class SizeCache:
    """Tables by grid, each with the state of what it was made of."""

    def __init__(self) -> None:
        self._kept: dict[Grid, tuple[Stamps, Tensor]] = {}

    def __reduce__(self) -> tuple[type["SizeCache"], tuple[()]]:
        """Copy and pickle as empty."""
        return SizeCache, ()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        """Whether there is no room for a further size."""
        return len(self._kept) >= MOST

    def __contains__(self, grid: object) -> bool:
        return grid in self._kept

    def get(self, grid: Grid, state: Stamps, make: Callable[[], Tensor]) -> Tensor:
        """Return the table of a grid.

        What was made of other values is written anew in its place, where CUDA graphs read it. Nothing is kept of a
        pass that somebody records, whose tensors may hold no values.

        Args:
            grid: the key.
            state: of what it is made of; see `stamps`.
            make: makes it.
        """
        if observed():
            return make()
        kept = self._kept.get(grid)
        if kept is not None and kept[0] == state:
            return kept[1]
        with torch.inference_mode(False), torch.no_grad():  # it outlives this call, and is read by others
            table = make()
        if kept is not None and kept[1].shape == table.shape:
            kept[1].copy_(table)
            table = kept[1]
        self._kept[grid] = state, table
        return table

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


def stamps(*sources: Tensor | nn.Module | None) -> Stamps:
    """Return which values tensors, and modules' tensors, have, as far as autograd's counter says.

    A pass that somebody records has tensors without contents and keeps no table: then there are none.
    """
    if observed():
        return ()
    return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in _tensors(sources))


def _tensors(sources: Iterable[Any]) -> Iterable[Tensor]:
    for source in sources:
        if isinstance(source, nn.Module):
            yield from source.parameters()
            yield from source.buffers()
        elif source is not None:
            yield source

"""Tables that follow from parameters: those of the model's own size, and of others, made at the size's first call."""

import abc
from collections.abc import Callable, Iterable
from typing import Any, Self

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


class Derived(nn.Module, abc.ABC):
    """A module with tables that follow from its tensors and are written anew, where graphs read them, when one changes.

    A subclass makes them in its ``__init__`` and then calls `note`.
    """

    _made_of: Stamps = ()

    @abc.abstractmethod
    def sources(self) -> Stamps:
        """Return the state of all that the tables are made of; see `stamps`."""

    @abc.abstractmethod
    def derive(self) -> None:
        """Write the tables anew, in place."""

    def note(self) -> None:
        """Take the tables to be those of the tensors as they are."""
        self._made_of = self.sources()

    def follow(self) -> None:
        """Write the tables anew if a tensor has changed in place, as far as autograd's counter says."""
        if observed() or (state := self.sources()) == self._made_of:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.derive()
        self._made_of = state

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.note()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.note()  # of a copy, whose tensors are elsewhere


def derive_again(module: Derived, incompatible_keys: Any) -> None:
    """Write the tables of a module anew, whose state dict was loaded."""
    with torch.no_grad():
        module.derive()
    module.note()


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
            for module in source.modules():
                yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        elif source is not None:
            yield source

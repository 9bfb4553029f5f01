"""Cuts changes at a threshold, and shows a model what a file of the factors would hold."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.packs.compression.changes import Change, ranks_at
from vtk.packs.factors import FactorDtype, Factors


@dataclass(frozen=True, eq=False)
class Trial:
    """A model, and the changes of its matrices.

    Attributes:
        model: of the pack, fp32; its matrices are overwritten by `show`.
        full: the pack's own values of the matrices.
        start: their values as created from the base.
        changes: from start to full.
        dtype: of the stored factors.
    """

    model: nn.Module
    full: Mapping[str, Tensor]
    start: Mapping[str, Tensor]
    changes: Mapping[str, Change]
    dtype: FactorDtype

    @classmethod
    def of(
        cls, model: nn.Module, start: Mapping[str, Tensor], changes: Mapping[str, Change], dtype: FactorDtype
    ) -> "Trial":
        """Take the pack's values from the model; ``start`` has those from the base."""
        device = next(model.parameters()).device
        full = {name: value.detach().clone() for name, value in model.state_dict().items() if name in changes}
        return cls(model, full, {name: start[name].detach().to(device) for name in changes}, changes, dtype)

    def cut(self, threshold: float) -> dict[str, Factors]:
        """Return the factors at a threshold, fp32; matrices that they would not make smaller are left out."""
        ranks = ranks_at(self.changes, threshold)
        found = {}
        for name, change in self.changes.items():
            if change.pays(ranks[name], self.dtype):
                exact = change.cut(ranks[name])
                found[name] = Factors(exact.a.float(), exact.b.float())
        return found

    def stored(self, factors: Mapping[str, Factors]) -> dict[str, Factors]:
        """Return factors as a file holds them."""
        return {name: f.to(self.dtype) for name, f in factors.items()}

    @torch.no_grad()
    def show(self, stored: Mapping[str, Factors]) -> nn.Module:
        """Return the model with these factors; its other matrices are exact."""
        state = self.model.state_dict()
        for name, value in self.full.items():
            if name not in stored:
                state[name].copy_(value)
                continue
            moved = self.start[name].clone()
            if stored[name].rank:
                moved += stored[name].change().to(moved.device).reshape(moved.shape)
            state[name].copy_(moved)
        return self.model

    def restore(self) -> nn.Module:
        """Return the model with the pack's own values."""
        return self.show({})

    def nbytes(self, stored: Mapping[str, Factors], others: int) -> int:
        """Return the bytes of a pack's tensors.

        Args:
            stored: its factors.
            others: bytes of the tensors that are no matrix of `changes`.
        """
        exact = sum(value.numel() * 4 for name, value in self.full.items() if name not in stored)
        return others + exact + sum(f.nbytes for f in stored.values())


def mean_rank(factors: Mapping[str, Factors], changes: Mapping[str, Change], among: Collection[str]) -> float:
    """Return the rank that would take as many numbers in every one of some matrices."""
    names = [name for name in among if name in factors]
    cost = sum(changes[name].cost for name in names)
    return sum(factors[name].rank * changes[name].cost for name in names) / cost if cost else 0.0

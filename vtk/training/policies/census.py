"""Counts trained and frozen weights, per part of the model."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from vtk import console
from vtk.training.policies.policy import GROUPS, Group, group_names

_TITLES: dict[Group, str] = {
    "attention": "attention",
    "lora": "LoRA factors",
    "head": "head",
    "position": "position table",
    "stem": "stem",
    "ffn": "FFN",
    "norm": "norms",
    "context": "Context Broadcasting (Λ)",
    "other": "other (class token, LayerScale…)",
}


@dataclass(frozen=True)
class CensusRow:
    """One part of the model: numbers of weights and of tensors, trained and frozen."""

    group: Group
    trained: int
    frozen: int
    trained_tensors: int
    frozen_tensors: int


@dataclass(frozen=True)
class Census:
    """Trained and frozen weights per part.

    Attributes:
        policy: name of the policy that chose.
        rows: one per part that has weights.
        names: names of the trained tensors, sorted.
    """

    policy: str
    rows: tuple[CensusRow, ...]
    names: tuple[str, ...]

    @property
    def trained(self) -> int:
        """Number of trained weights."""
        return sum(row.trained for row in self.rows)

    @property
    def total(self) -> int:
        """Number of weights."""
        return self.trained + sum(row.frozen for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "policy": self.policy,
            "trained": self.trained,
            "total": self.total,
            "trained_tensors": len(self.names),
            "groups": {
                row.group: {
                    "trained": row.trained,
                    "frozen": row.frozen,
                    "trained_tensors": row.trained_tensors,
                    "frozen_tensors": row.frozen_tensors,
                }
                for row in self.rows
            },
            "names": list(self.names),
        }

    def print(self, title: str | None = None) -> None:
        """Print the table for people, by default under the policy's name."""
        rows = [(_TITLES[r.group], f"{r.trained:,}", f"{r.frozen:,}", r.trained_tensors) for r in self.rows]
        share = console.percent(self.trained / max(1, self.total))
        rows.append((f"all ({share} trained)", f"{self.trained:,}", f"{self.total - self.trained:,}", len(self.names)))
        console.table(
            title or f"Weights under --train {self.policy}", ("part", "trained", "frozen", "trained tensors"), rows
        )


def take_census(model: nn.Module, trained: Collection[str], policy: str) -> Census:
    """Count the parameters of ``model``, given the names of the trained ones."""
    groups = group_names(model)
    parameters = dict(model.named_parameters())
    rows = []
    for group in GROUPS:
        inside = {n: p.numel() for n, p in parameters.items() if groups[n] == group}
        live = {n: count for n, count in inside.items() if n in trained}
        if inside:
            total = sum(inside.values())
            done = sum(live.values())
            rows.append(CensusRow(group, done, total - done, len(live), len(inside) - len(live)))
    return Census(policy, tuple(rows), tuple(sorted(set(trained) & parameters.keys())))

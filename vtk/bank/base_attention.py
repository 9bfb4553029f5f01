"""The base's own attention weights, which the changes of all tasks with factors refer to."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vtk.bank.base_model import BaseModel
from vtk.bank.fold_changes import LayerFold, read_layers
from vtk.bank.folded import Weights
from vtk.bank.plain_changes import unfolded
from vtk.models.packed.forward import attention_modules, own_weights
from vtk.models.packed.low_rank import LowRankMatrix
from vtk.models.packed.structure import MATRICES
from vtk.packs.factors import PackTensors
from vtk.packs.load import Task


@dataclass(frozen=True, eq=False)
class BaseAttention:
    """Attention weights of the base.

    Attributes:
        weights: of each attention module, or of each folded block, on the bank's device and in its dtype.
        layers: folds a task's own tensors, block by block; None if the bank is not folded.
        whole: whether all of the base's attention was there; of a bundle that has only what its pack needs, biases may
            be absent.
        has: names of the tensors of the base that were there.
        resident: whether calls read these very tensors; else a store has copies.
    """

    weights: tuple[Mapping[str, Tensor], ...]
    layers: tuple[LayerFold, ...] | None
    has: frozenset[str]
    whole: bool
    resident: bool

    @classmethod
    def of(
        cls, model: BaseModel, same: Task, folded: Weights | None, dtype: torch.dtype, device: torch.device | None
    ) -> "BaseAttention":
        """Read the base's attention.

        Args:
            model: the base.
            same: the base as a task that changes nothing.
            folded: its folded weights; None for a bank that is not folded.
            dtype: of the bank.
            device: where calls read these tensors; None where a store copies them from the CPU.
        """
        timm: Any = same.model
        place = device or torch.device("cpu")
        modules = attention_modules(timm.blocks)
        needed = {model.keys(f"{m.name}.{key}") for m in model.modules for key in (*m.small, *_parts(m.matrices))}
        whole, resident = needed - {None} <= model.has, device is not None
        if folded is None:
            plain = tuple({key: t.detach().to(place, dtype) for key, t in own_weights(a).items()} for _, a in modules)
            return cls(plain, None, model.has, whole, resident)
        weights: Any = tuple({key: t.to(place) for key, t in part.items()} for part in folded)  # type: ignore[union-attr]
        layers = read_layers(timm, weights, dtype)
        layers = tuple(
            dataclasses.replace(layer, base={key: t.to(place) for key, t in layer.base.items()}) for layer in layers
        )
        return cls(weights, layers, model.has, whole, resident)

    def task(self) -> Weights:
        """Return the base's weights as those of a task that changed none: its matrices are not its own."""
        bases = {id(t) for t in self.tensors()}
        return tuple(
            {key: LowRankMatrix(t) if id(t) in bases else t for key, t in part.items()} for part in self.weights
        )

    def supplies(self, model: BaseModel, pack: PackTensors) -> bool:
        """Return whether the matrices that a pack leaves or changes were there."""
        names = {f"{m.name}.{key}" for m in model.modules for key in _parts(m.matrices)} - pack.dense.keys()
        return {model.keys(name) for name in names} - {None} <= self.has

    def weights_of(self, model: BaseModel, pack: PackTensors, dtype: torch.dtype) -> Weights | None:
        """Return a task's attention weights on the CPU, as changes of the base's where the pack has factors.

        None where a matrix is neither: some rows of it are the task's own and others changes.
        """
        plains: list[dict[str, Any]] = [module.plain(pack.dense, pack.factors) for module in model.modules]
        if any(value is None for plain in plains for value in plain.values()):
            return None
        if self.layers is None:
            return tuple(unfolded(p, base, dtype) for p, base in zip(plains, self.weights, strict=True))
        found, first = [], 0
        with torch.no_grad():
            for layer in self.layers:
                mine = plains[first : first + len(layer.branches)]
                first += len(layer.branches)
                if any(len({isinstance(p.get(key), Tensor) for p in mine}) > 1 for key in MATRICES):
                    return None
                found.append(layer.folded(mine, dtype))
        return tuple(found)

    def tensors(self) -> list[Tensor]:
        """Return the matrices that tasks refer to, and the vectors that their changes in int8 share."""
        if self.layers is None:
            return [t for part in self.weights for key, t in part.items() if key in MATRICES]
        found = [t for layer in self.layers for t in layer.base.values()]
        for branch in (branch for layer in self.layers for branch in layer.branches):
            found += [t for t in (branch.affine.weight, branch.outputs, branch.scale) if t is not None]
        return found


def _parts(matrices: Mapping[str, tuple[tuple[str, int], ...]]) -> list[str]:
    return [name for parts in matrices.values() for name, _ in parts]

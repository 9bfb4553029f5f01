"""The changes of a pack's matrices, decomposed once: any ranks can then be cut from them."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk.errors import UsageError
from vtk.models.create import Created
from vtk.models.task_parameters import head_names, position_names
from vtk.packs.factors import FactorDtype, Factors
from vtk.packs.load import Task, build_from_card, start_base

ITEM = {"fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of a number of stored factors."""

_SCALES = 8  # bytes of the two fp32 scales of each component in int8
_EXACT = 4  # bytes of a number that is not stored as a factor
_RIDGE = 1e-2


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one matrix (F, K), as Σ_j of components, the most important first.

    Attributes:
        shape: of the matrix, F and K.
        left: (F, m) fp64.
        right: (m, K) fp64; component j is the outer product of ``left[:, j]`` and ``right[j]``.
        weight: (m,) fp64, falling: the root of what the model loses with each component, in the unit of the threshold.
        whole: (F, K) fp64, the change itself.
    """

    shape: tuple[int, int]
    left: Tensor
    right: Tensor
    weight: Tensor
    whole: Tensor

    @classmethod
    def of(cls, whole: Tensor, sides: tuple[Tensor, Tensor] | None = None) -> "Change":
        """Decompose a change (F, K).

        Args:
            whole: the change.
            sides: second moments of the loss's gradient, (F, F) and (K, K) (`vtk.packs.compression.moments`). With them
                the components are those that matter least to the model's predictions when they are left out, by a
                Kronecker approximation; without them those of the singular values, as shares of the whole change.
        """
        whole = whole.detach().cpu().double()
        shape = (whole.shape[0], whole.shape[1])
        if sides is None:
            left, values, right = decompose(whole)
            return cls(shape, left * values, right, values / values.norm().clamp_min(1e-300), whole)
        lower, upper = (_root(side) for side in sides)
        left, values, right = decompose(lower.T @ whole @ upper)
        left = torch.linalg.solve_triangular(lower.T, left, upper=True) * values
        right = torch.linalg.solve_triangular(upper, right, upper=False, left=False)
        return cls(shape, left, right, values, whole)

    @property
    def cost(self) -> int:
        """Numbers that a component takes."""
        return sum(self.shape)

    def scores(self) -> Tensor:
        """Return (m,): what a component is worth by what it takes, which one threshold divides."""
        return self.weight / math.sqrt(self.cost)

    def cut(self, rank: int) -> Factors:
        """Return the first components as factors in fp64, both with the same norm of each component."""
        left, right = self.left[:, :rank], self.right[:rank]
        norms = left.norm(dim=0).clamp_min(1e-150), right.norm(dim=1).clamp_min(1e-150)
        balance = (norms[0] / norms[1]).sqrt()
        return Factors(right * balance[:, None], left / balance)

    def pays(self, rank: int, dtype: FactorDtype) -> bool:
        """Return whether factors take fewer bytes than the exact matrix."""
        each = ITEM[dtype] * self.cost + (_SCALES if dtype == "int8" else 0)
        return rank * each < _EXACT * math.prod(self.shape)

    def error(self, factors: Factors) -> float:
        """Return ‖change − factors‖ / ‖change‖."""
        kept = factors.change(torch.float64) if factors.rank else torch.zeros_like(self.whole)
        return float((self.whole - kept).norm() / self.whole.norm())


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition of an fp64 matrix, from the eigenvectors of its smaller square.

    It is several times faster than torch's; its product is exact also where small singular values are not.
    """
    if matrix.shape[0] < matrix.shape[1]:
        left, values, right = decompose(matrix.T)
        return right.T, values, left.T
    _, vectors = torch.linalg.eigh(matrix.T @ matrix)
    vectors = vectors.flip(1)
    images = matrix @ vectors
    values = images.norm(dim=0)
    values, order = values.sort(descending=True)
    return images[:, order] / values.clamp_min(1e-300), values, vectors[:, order].T


def _root(moment: Tensor) -> Tensor:
    """Return the lower Cholesky factor of a second moment, with a ridge where few images leave it singular."""
    ridge = _RIDGE * moment.diagonal().mean().clamp_min(1e-30)
    return torch.linalg.cholesky(moment + ridge * torch.eye(len(moment), dtype=moment.dtype))


def flat(tensor: Tensor) -> Tensor:
    """Return a parameter as the matrix that factors are of: all axes but the last, by the last."""
    return tensor.reshape(-1, tensor.shape[-1])


def create_start(task: Task) -> Created:
    """Return the model of a pack as created from its base, from which changes are counted.

    Raises:
        UsageError: a bundle, which lacks the base's values of what its pack holds, or a checkpoint.
    """
    if task.base is None:
        raise UsageError(f"{task.path} is a checkpoint, which has no base; give a pack")
    if task.bundled:
        raise UsageError(
            f"{task.path} is a bundle, which lacks the base's values of the tensors that its pack holds; give "
            "--base FILE"
        )
    assert task.card.base is not None
    # the reference stays the pack's: this base may have been read from a copy that only this machine has
    same = task.base.ref.id == task.card.base.id
    ref = task.card.base if same else task.base.ref
    base = dataclasses.replace(task.base, ref=ref)
    return build_from_card(task.card, base=start_base(base, task.card, task.path))


def changed_matrices(task: Task, created: Created) -> dict[str, Tensor]:
    """Return the changes (F, K), in fp64, of the weight matrices and position tables that the pack moved.

    The classifier, biases, norms, prefix tokens and what the base does not have are not among them: they stay exact.

    Raises:
        UsageError: there are none.
    """
    state, start = task.model.state_dict(), created.model.state_dict()
    found: dict[str, Tensor] = {}
    for name in _names(task.carried, created):
        change = flat(state[name].double()) - flat(start[name].double())
        if bool(change.any()):
            found[name] = change
    if not found:
        raise UsageError(f"{task.path} changes no matrix of its base: there is nothing to compress")
    return found


def _names(carried: Collection[str], created: Created) -> list[str]:
    heads, positions = head_names(created.model), position_names(created.model)
    parameters = {name: p for name, p in created.model.named_parameters() if name in carried and name not in heads}
    known = created.base.tensors
    return sorted(
        name for name, p in parameters.items()
        if created.key_map.get(name) in known and p.is_floating_point()
        and ((name in positions and p.ndim > 1) or (name.endswith("weight") and p.ndim == 2))
    )  # fmt: skip


def ranks_at(changes: Mapping[str, Change], threshold: float) -> dict[str, int]:
    """Return how many components of each matrix reach a threshold."""
    return {name: int((change.scores() >= threshold).sum()) for name, change in changes.items()}


def threshold_for(changes: Mapping[str, Change], mean_rank: float) -> float:
    """Return the threshold at which factors take as many numbers as ``mean_rank`` in every matrix would.

    A matrix counts with its full rank where that is less, as of a table of few positions.
    """
    scores = torch.cat([change.scores() for change in changes.values()])
    costs = torch.cat([torch.full_like(c.scores(), c.cost) for c in changes.values()])
    order = scores.argsort(descending=True, stable=True)
    budget = sum(min(mean_rank, *change.shape) * change.cost for change in changes.values())
    inside = int((costs[order].cumsum(0) <= budget * (1 + 1e-12)).sum())
    if inside == len(order):
        return 0.0
    return float(scores[order[inside - 1]]) if inside else float(scores.max()) * (1 + 1e-9)

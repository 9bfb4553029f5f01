"""The weights of one layer of all tasks on a device, as the kernels of a call of many tasks read them.

Tasks of whole matrices have slots in a stack, where the base's matrix has one too; of a task with factors, arenas have
the factors and another stack its biases and norms. A call of both multiplies all rows by the stack's matrices, rows of
tasks with factors by the base's, and adds the changes to these rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.bank.arenas import Arena
from vtk_kernels.choices import choose
from vtk_kernels.grouped_linear import grouped_linear
from vtk_kernels.grouped_low_rank import grouped_low_rank
from vtk_kernels.low_rank_linear import low_rank_linear


@dataclass(frozen=True)
class Slot:
    """Where a call finds the weights of a task.

    Attributes:
        group: of its whole matrix in the stacks, or of the base's; of a call of factors alone 0.
        own: of its biases and norms, in what `SmallStack.of_call` returns.
        thin: of its factors; None for whole matrices.
    """

    group: int
    own: int
    thin: int | None = None

    @classmethod
    def whole(cls, slot: int) -> "Slot":
        """Return the place of a task whose weights are all in slot ``slot``."""
        return cls(slot, slot)


@dataclass(frozen=True)
class Factored:
    """Factors of a matrix of all tasks in one type: an arena as `grouped_low_rank` takes it.

    Attributes:
        a, b, spans, rank, scale, x_scale, y_scale: as of `Arena`.
    """

    a: Tensor
    b: Tensor
    spans: Tensor
    rank: int
    scale: Tensor | None
    x_scale: Tensor | None
    y_scale: Tensor | None

    @classmethod
    def of(cls, arena: Arena) -> "Factored":
        """Return an arena as it is now."""
        return cls(arena.a, arena.b, arena.spans, arena.rank, arena.scale, arena.x_scale, arena.y_scale)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Factored":
        """Return the same of other tensors."""
        scales = (None if t is None else change(t) for t in (self.scale, self.x_scale, self.y_scale))
        return Factored(change(self.a), change(self.b), change(self.spans), self.rank, *scales)


@dataclass(frozen=True)
class GroupedMatrix:
    """A matrix (F, K) of all tasks.

    Attributes:
        base: (F, K), of the base.
        bias: (S, F), of each task with factors.
        factors: of these tasks, by type.
        stack: (D, F, K), whole matrices; None where no task has any.
        stack_bias: (D, F), biases of these, 0 in the base's slot.
    """

    base: Tensor
    bias: Tensor
    factors: tuple[Factored, ...]
    stack: Tensor | None = None
    stack_bias: Tensor | None = None

    def multiply(self, x: Tensor, whole: Tensor | None, thin: Tensor, card: str | None = None) -> Tensor:
        """Multiply each row by its task's matrix, and add its bias.

        Args:
            x: (T, K).
            whole: tile map of all rows by `Slot.group`; None for a call of tasks with factors alone.
            thin: tile map by `Slot.thin` of the rows of tasks with factors.
            card: name of the device, for `vtk_kernels.choices`.

        Returns:
            (T, F); rows of no task are finite where theirs of ``x`` are.
        """
        if whole is not None:
            assert self.stack is not None
            y = grouped_linear(x, self.stack, self.stack_bias, whole)
        elif len(self.factors) == 1 and self._choice(x, card) == "epilogue":
            f = self.factors[0]
            return low_rank_linear(
                x, self.base, f.a, f.b, f.spans, thin, f.rank, self.bias, f.scale, f.x_scale, f.y_scale
            )
        else:
            y = F.linear(x, self.base)
        bias: Tensor | None = self.bias
        for f in self.factors:
            grouped_low_rank(y, x, f.a, f.b, f.spans, thin, f.rank, bias, f.scale, f.x_scale, f.y_scale)
            bias = None
        return y

    def _choice(self, x: Tensor, card: str | None) -> str:
        features, size = self.base.shape
        return choose("grouped_low_rank", len(x), features, size, x.dtype, card)

    def map(self, change: Callable[[Tensor], Tensor]) -> "GroupedMatrix":
        """Return the same of other tensors."""
        made = {
            name: None if value is None else change(value)
            for name, value in vars(self).items() if name != "factors"
        }  # fmt: skip
        factors = tuple(f.map(change) for f in self.factors)
        return replace(self, **made, factors=factors)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SmallStack:
    """Biases or norms of all tasks of one layer.

    Attributes:
        thin: (S, …), of tasks with factors.
        whole: (D, …), of the others; None where there are none.
    """

    thin: Tensor
    whole: Tensor | None = None

    def of_call(self, mixed: bool) -> Tensor:
        """Return the stack that `Slot.own` counts in: of a mixed call whole ones first."""
        return torch.cat([self.whole, self.thin]) if mixed and self.whole is not None else self.thin

    def map(self, change: Callable[[Tensor], Tensor]) -> "SmallStack":
        """Return the same of other tensors."""
        return SmallStack(change(self.thin), None if self.whole is None else change(self.whole))

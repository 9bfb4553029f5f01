"""Base of the folded halves of a block: x ← x + Σᵢ fᵢ(norm(x)) over P parallel branches, as few and wide products.

A stage yields pairs (activation, matrix): its output is Σ activation · matrixᵀ + bias. Merged, there is one pair and
the sum over the branches happens in the accumulator of one product of length P·A. Split, each branch is a pair of its
own: on a CPU whose cache cannot hold the wide activation that moves fewer bytes. Source: Touvron et al. 2022, eq. 1–2,
for the branches; LayerNorm's affine part, 1/√D and LayerScale are inside the matrices.
"""

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.norms import NormSpec
from vtk.fused.stage_input import Pair, Reading
from vtk_kernels.choices import ChoiceTableError, layers


@dataclass(frozen=True)
class Plan:
    """How a forward pass runs.

    Attributes:
        kernels: with the Triton operations, else with torch.
        device_name: on which card's measured choices.
        ln_folded: of a pass with kernels: stages that can, read raw tokens (five kernels a block); else a kernel
            normalises them (seven). None for what the model says.
        counters: (n,), int32, 0 between kernels, for products that finish themselves; None: none does.
    """

    kernels: bool
    device_name: str | None = None
    ln_folded: bool | None = False
    counters: Tensor | None = field(default=None, compare=False)


def check_choices() -> None:
    """Refuse a choice table of the environment that cannot be used, before any work.

    Raises:
        UsageError: the one that VTK_CHOICES names cannot.
    """
    try:
        layers()
    except ChoiceTableError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Context:
    """Context Broadcasting at one place: ½x + ½mean(x), or x + scale ⊙ mean(x) (Hyeon-Woo et al. 2023, CB and CB_S)."""

    scale: Tensor | None


def frozen(value: Tensor | None) -> Any:
    """Return a parameter that no optimiser trains, or None; a copy, lest it change with the model it comes from."""
    return None if value is None else nn.Parameter(value.clone(memory_format=torch.contiguous_format), False)


class Stage(nn.Module, abc.ABC):
    """What every stage has.

    Attributes:
        norm: how its input is normalised; all branches alike.
        branches: P.
        bias: (C), the sum over the branches.
        front, end: Context Broadcasting of the normalised input, and of the output.
    """

    bias: Tensor

    def __init__(self, norm: NormSpec, branches: int, bias: Tensor, front: Context | None, end: Context | None) -> None:
        super().__init__()
        self.norm, self.branches = norm, branches
        self.bias = frozen(bias)
        self.front, self.front_scale = front is not None, frozen(front.scale if front else None)
        self.end, self.end_scale = end is not None, frozen(end.scale if end else None)

    @property
    def reads_raw(self) -> bool:
        """Whether it can do without normalised tokens: only matrices read its norm's output."""
        return not self.front

    @abc.abstractmethod
    def pairs(
        self, h: Reading, queries: int | None, plan: Plan, split: bool, ropes: Sequence[Tensor] = ()
    ) -> Iterator[Pair]:
        """Yield (activation (B, N', K), matrix (C, K)); the activation raw where the product is to normalise it.

        Args:
            h: normalised tokens (B, N, C); or, where `reads_raw`, raw ones, which are never split.
            queries: compute only the first so many tokens of the output; None for all.
            plan: of the forward pass.
            split: one pair per branch.
            ropes: the model's rotary tables for these images, (R, D) or (H, R, D) each.
        """

    @abc.abstractmethod
    def widest(self) -> int:
        """Return the number of columns of the widest activation, all branches together."""

    @abc.abstractmethod
    def hidden(self) -> int:
        """Return the width of the FFNs' hidden layer, all branches together; 0 for none."""


def context_mean(x: Tensor, scale: Tensor | None) -> Tensor:
    """Broadcast the mean token of x (B, N, C): ½x + ½mean, or x + scale ⊙ mean."""
    mean = x.mean(1, keepdim=True)
    return 0.5 * (x + mean) if scale is None else x + scale * mean

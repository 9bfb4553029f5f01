"""Scaled ReLU (Wang et al. 2022): β·max(x + α, 0), as a module, and read from BatchNorm with ReLU."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vtk.errors import UsageError


class AlphaBeta(NamedTuple):
    """Shift α and scale β of each channel, both (C)."""

    alpha: Tensor
    beta: Tensor


class ScaledReLU(nn.Module):
    """β·max(x + α, 0) with a trained α and β per channel (Wang et al. 2022, "Scaled ReLU Structure").

    Initialised as a plain ReLU (α = 0, β = 1), like a BatchNorm with ReLU with respect to its normalised input.

    Args:
        channels: C.
        device: of the parameters.
        dtype: of the parameters.
        last: whether channels are the last axis, as of tokens, not the second one, as of maps.

    Attributes:
        alpha: (C).
        beta: (C).
    """

    def __init__(
        self, channels: int, device: torch.device | None = None, dtype: torch.dtype | None = None, *,
        last: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.last = last
        self.alpha = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, …) to (B, C, …), or (B, …, C) to (B, …, C)."""
        shape = (-1,) if self.last else (-1, *[1] * (x.ndim - 2))
        return self.beta.view(shape) * torch.relu(x + self.alpha.view(shape))

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return str(len(self.alpha))


def read_scaled_relu(norm: nn.Module) -> AlphaBeta:
    """Return α = bias ÷ weight and β = weight of a BatchNorm that a ReLU follows (Wang et al. 2022, eq. 1).

    With x̂ the normalised input, ReLU(weight·x̂ + bias) = β·max(x̂ + α, 0) in every channel whose weight is above 0. For
    a negative weight the paper's form does not hold (the left side is never negative, the right side never positive),
    and for 0 there is no α: such channels have NaN for both.

    Args:
        norm: BatchNorm of any kind with weight and bias (C).

    Raises:
        UsageError: another kind of module, or one without weight and bias.
    """
    if not isinstance(norm, nn.modules.batchnorm._NormBase) or norm.weight is None or norm.bias is None:
        raise UsageError(f"{type(norm).__name__} is not a BatchNorm with weight and bias, from which α and β are read")
    weight, bias = norm.weight.detach(), norm.bias.detach()
    valid = weight > 0
    return AlphaBeta((bias / weight).where(valid, torch.nan), weight.where(valid, torch.nan))

"""Weights of a model that only infers."""

from typing import Any

import torch
from torch import Tensor, nn


def frozen(value: Tensor | None) -> Any:
    """Return a parameter that no optimiser trains, or None; a copy, lest it change with the model it comes from."""
    return None if value is None else nn.Parameter(value.clone(memory_format=torch.contiguous_format), False)

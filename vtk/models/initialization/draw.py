"""Draws initial weights by the table, under the scheme ``papers`` or that of version 0.1.

The scheme is a context of the code that builds a model: ``with initial_weights("0.1"): …``. Layers call `reset` from
their ``reset_parameters``. With "0.1" they draw the numbers that version 0.1 drew from the same seed.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from timm.layers import trunc_normal_
from torch import Tensor, nn

from vtk.card import InitName
from vtk.models.initialization.table import CUT, TABLE, Distribution, Draw


def _uniform(tensor: Tensor, deviation: float) -> None:
    bound = math.sqrt(3) * deviation
    nn.init.uniform_(tensor, -bound, bound)


def _cut_normal(tensor: Tensor, deviation: float) -> None:
    bound = deviation / CUT
    nn.init.trunc_normal_(tensor, std=bound, a=-bound, b=bound)


_DISTRIBUTIONS: Mapping[Distribution, Callable[[Tensor, float], Any]] = {
    "uniform": _uniform,
    "normal": lambda tensor, deviation: nn.init.normal_(tensor, std=deviation),
    "truncated": lambda tensor, deviation: nn.init.trunc_normal_(tensor, std=deviation),
    "truncated (timm)": lambda tensor, deviation: trunc_normal_(tensor, std=deviation),
    "cut normal": _cut_normal,
}
_scheme: ContextVar[InitName] = ContextVar("vtk_initial_weights", default="papers")


def scheme() -> InitName:
    """Return the scheme in force; ``papers`` outside of `initial_weights`."""
    return _scheme.get()


@contextlib.contextmanager
def initial_weights(name: InitName) -> Iterator[None]:
    """Build models with the initial weights of ``name`` within the context."""
    token = _scheme.set(name)
    try:
        yield
    finally:
        _scheme.reset(token)


def reset(layer: nn.Module, kind: str) -> None:
    """Draw weight and bias of a layer anew, in place.

    Args:
        layer: a linear layer or convolution, with or without bias.
        kind: a key of `TABLE`.
    """
    row, old = TABLE[kind], scheme() == "0.1"
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    fans = fan(weight)
    _fill(weight, (old and row.old_weight) or row.weight, fans)
    if isinstance(bias, Tensor):
        draw = (old and row.old_bias) or row.bias
        assert draw is not None
        _fill(bias, draw, fans)


def reset_tensor(parameter: Tensor, kind: str) -> None:
    """Draw a parameter that belongs to no layer anew, in place."""
    row = TABLE[kind]
    _fill(parameter, (scheme() == "0.1" and row.old_weight) or row.weight, fan(parameter))


def fan(weight: Tensor) -> tuple[int, int]:
    """Return fan_in and fan_out of a weight of a linear layer or convolution; (1, 1) for a vector."""
    if weight.ndim < 2:
        return 1, 1
    kernel = weight.shape[2:].numel()
    return weight.shape[1] * kernel, weight.shape[0] * kernel


def _fill(tensor: Tensor, draw: Draw, fans: tuple[int, int]) -> None:
    if draw.distribution == "constant":
        nn.init.constant_(tensor, draw.mean)
    else:
        _DISTRIBUTIONS[draw.distribution](tensor, draw.deviation(*fans))

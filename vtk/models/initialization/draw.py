"""Draws initial weights by the table, under the scheme ``papers`` or that of version 0.1.

The scheme is a context of the code that builds a model: ``with initial_weights("0.1"): …``. Layers call `reset` from
their ``reset_parameters``. With "0.1" they draw the numbers that version 0.1 drew from the same seed. The context keeps
what was drawn, so that a run can say which layers the scheme decides.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
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
Drawn = list[tuple[str, Tensor]]
"""Kinds of `TABLE` and the tensors that were drawn by them."""
_scheme: ContextVar[InitName] = ContextVar("vtk_initial_weights", default="papers")
_drawn: ContextVar[Drawn | None] = ContextVar("vtk_drawn", default=None)


def scheme() -> InitName:
    """Return the scheme in force; ``papers`` outside of `initial_weights`."""
    return _scheme.get()


@contextlib.contextmanager
def initial_weights(name: InitName) -> Iterator[Drawn]:
    """Build models with the initial weights of ``name`` within the context, which lists what it draws."""
    drawn: Drawn = []
    scheme_before, drawn_before = _scheme.set(name), _drawn.set(drawn)
    try:
        yield drawn
    finally:
        _scheme.reset(scheme_before)
        _drawn.reset(drawn_before)


def decided_kinds(drawn: Drawn, tensors: Collection[Tensor]) -> tuple[str, ...]:
    """Return the kinds of ``drawn`` that the schemes draw differently, and that some of ``tensors`` still are."""
    left = {id(tensor) for tensor in tensors}
    kinds = {kind for kind, tensor in drawn if id(tensor) in left}
    return tuple(kind for kind in TABLE if kind in kinds and TABLE[kind].changed)


def describe_init(name: InitName, kinds: Collection[str]) -> str | None:
    """Return a line on the scheme and the kinds of layers that it decides; None where there are none."""
    return f"initial weights of {', '.join(kinds)}: {name} (--init)" if kinds else None


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
    _note(kind, weight)
    if isinstance(bias, Tensor):
        draw = (old and row.old_bias) or row.bias
        assert draw is not None
        _fill(bias, draw, fans)


def reset_tensor(parameter: Tensor, kind: str) -> None:
    """Draw a parameter that belongs to no layer anew, in place."""
    row = TABLE[kind]
    _fill(parameter, (scheme() == "0.1" and row.old_weight) or row.weight, fan(parameter))
    _note(kind, parameter)


def redraw(layer: nn.Module | Tensor, kind: str) -> None:
    """Draw a layer, or a parameter, over timm's draw; version 0.1 left it as timm draws it."""
    if scheme() != "0.1":
        reset_tensor(layer, kind) if isinstance(layer, Tensor) else reset(layer, kind)
    else:
        tensors = (layer,) if isinstance(layer, Tensor) else layer.parameters(recurse=False)
        _note(kind, *tensors)


def fan(weight: Tensor) -> tuple[int, int]:
    """Return fan_in and fan_out of a weight of a linear layer or convolution; (1, 1) for a vector."""
    if weight.ndim < 2:
        return 1, 1
    kernel = weight.shape[2:].numel()
    return weight.shape[1] * kernel, weight.shape[0] * kernel


def _note(kind: str, *tensors: Tensor | None) -> None:
    if (drawn := _drawn.get()) is not None:
        drawn += [(kind, tensor) for tensor in tensors if tensor is not None]


def _fill(tensor: Tensor, draw: Draw, fans: tuple[int, int]) -> None:
    if draw.distribution == "constant":
        nn.init.constant_(tensor, draw.mean)
    else:
        _DISTRIBUTIONS[draw.distribution](tensor, draw.deviation(*fans))

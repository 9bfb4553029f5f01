"""Registers changes of an architecture that packs store, and applies them when a pack is loaded.

A transform is ``apply(model, **args) -> {key of the new state dict: key of the base, or None}``. None marks a new
tensor of the transform: it is always trained and stored in the pack. Transforms run after the base is loaded.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from timm.models import adapt_input_conv
from torch import nn

from vtk.card import Transform
from vtk.errors import DataError, UsageError

Apply = Callable[..., dict[str, str | None]]
_REGISTRY: dict[str, Apply] = {}
_MODULES = (
    "alternet.transform", "stems.replace", "transforms.context_layers", "transforms.extra_block",
    "transforms.local_attention", "transforms.mlp_layers", "transforms.parallel_blocks", "transforms.smoothing",
    "transforms.softmax_free", "transforms.squeeze_excite", "transforms.uniform_heads",
)  # fmt: skip
"""Modules of `vtk.models` that register transforms."""


def register(op: str) -> Callable[[Apply], Apply]:
    """Register a transform under the name that packs store."""

    def decorator(function: Apply) -> Apply:
        _REGISTRY[op] = function
        return function

    return decorator


def apply_transforms(
    model: nn.Module, transforms: Sequence[Transform], key_map: Mapping[str, str | None]
) -> dict[str, str | None]:
    """Apply transforms in order, in place, and return the map from final keys to base keys.

    Args:
        model: with the base already loaded.
        transforms: in order.
        key_map: from the model's keys to base keys before the first transform.

    Raises:
        DataError: a transform that this version does not have, or wrong arguments.
        UsageError: a transform that does not fit the model.
    """
    current = dict(key_map)
    for module in _MODULES if transforms else ():
        importlib.import_module(f"vtk.models.{module}")
    for transform in transforms:
        if transform.op not in _REGISTRY:
            known = ", ".join(sorted(_REGISTRY))
            raise DataError(f"transform `{transform.op}` is not in this version; known: {known}; upgrade vtk")
        apply = _REGISTRY[transform.op]
        try:
            inspect.signature(apply).bind(model, **transform.args)
        except TypeError as error:
            raise DataError(f"transform `{transform.op}` with {transform.args}: {error}; was it edited?") from error
        step = apply(model, **transform.args)
        current = {new: None if old is None else current[old] for new, old in step.items()}
    return current


@register("adapt_input")
def adapt_input(model: nn.Module, *, in_chans: int) -> dict[str, str | None]:
    """Change the number of input channels; weights are summed or repeated from those of RGB (timm's rule).

    Args:
        model: a timm model whose first convolution is named in ``pretrained_cfg["first_conv"]``.
        in_chans: channels of the new input.

    Raises:
        UsageError: the model names no single first convolution.
    """
    if not isinstance(in_chans, int) or in_chans < 1:
        raise UsageError(f"`in_chans` is {in_chans!r}; allowed is at least 1")
    name: Any = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    old = model.get_submodule(name) if isinstance(name, str) else None
    if not isinstance(old, nn.Conv2d):
        raise UsageError(f"{type(model).__name__} has no single first convolution to adapt to {in_chans} channels")
    if old.in_channels != 3:
        raise UsageError(f"`{name}` takes {old.in_channels} channels; only weights for 3 can be adapted to {in_chans}")
    new = nn.Conv2d(in_chans, old.out_channels, old.kernel_size, old.stride, old.padding, bias=old.bias is not None)  # type: ignore[arg-type]
    # new parameters, since a model on the meta device has other tensors
    new.weight = nn.Parameter(adapt_input_conv(in_chans, old.weight.detach()))
    new.bias = None if old.bias is None else nn.Parameter(old.bias.detach())
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)
    return {key: None if key == f"{name}.weight" else key for key in model.state_dict()}

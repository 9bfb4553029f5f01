"""Finds valid image sizes by running a model on the meta device: windows and stages restrict them beyond the patch."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import nn

from vtk.errors import UsageError
from vtk.models import parallel_models as parallel
from vtk.models.meta_model import shapes_only
from vtk.models.structure import unusual_part

Size = tuple[int, int]

_TRIES = 24  # sizes tried for the two in a message; a tenth of a second each
_UNIT = 32
_known: dict[tuple[str, str, Size], str | None] = {}


def refuse_size(name: str, size: Size, kwargs: Mapping[str, Any], step: Size) -> None:
    """Refuse a size that a model with windows or stages does not support, before data or weights are read.

    Args:
        name: timm model name.
        size: height and width in pixels, multiples of ``step``.
        kwargs: arguments of timm.
        step: height and width of a patch.

    Raises:
        UsageError: the message names the nearest smaller and larger valid sizes.
    """
    why = size_fault(name, size, kwargs)
    if why is None:
        return
    valid = valid_sizes(name, size, kwargs, step)
    if not valid and not any(size_fault(name, near, kwargs) is None for near in _own_size(name, kwargs)):
        return  # it fails at its own size too, so the size is not the cause
    hint = f"use {valid or 'the size of its weights'}"
    raise UsageError(f"`--img-size` {size[0]} {size[1]}: `{name}` does not support it ({why}); {hint}")


def valid_sizes(name: str, size: Size, kwargs: Mapping[str, Any], step: Size) -> str:
    """Return the valid sizes near ``size`` as text; empty if none was found."""
    found = nearest_sizes(name, size, kwargs, step)
    return " or ".join(f"{h} {w}" if h != w else str(h) for h, w in found)


def size_fault(name: str, size: Size, kwargs: Mapping[str, Any]) -> str | None:
    """Return why a model does not support images of ``size``; None if it does."""
    key = (name, repr(sorted(kwargs.items())), size)
    if key not in _known:
        _known[key] = _try(name, size, kwargs)
    return _known[key]


def nearest_sizes(name: str, size: Size, kwargs: Mapping[str, Any], step: Size) -> list[Size]:
    """Return the nearest valid sizes below and above, of those tried.

    Args:
        name: timm model name.
        size: requested size; of a square only squares are tried.
        kwargs: arguments of timm.
        step: height and width of a patch.
    """
    own = _own_size(name, kwargs) or [size]
    units = [(math.lcm(patch, _UNIT) if patch < _UNIT else patch, max(side // 2, 1)) for patch, side in
             zip(step, own[0], strict=True)]  # fmt: skip
    found = []
    for up in (False, True):
        near = (pair for pair in _near(size, units, up) if size_fault(name, pair, kwargs) is None)
        found += list(itertools.islice(near, 1))
    return found


def _near(size: Size, units: list[Size], up: bool) -> list[Size]:
    """Return sizes by distance from ``size``, with sides that are multiples of one of their ``units``."""
    axes = []
    for side, (patch, half) in zip(size, units, strict=True):
        sides = {k * unit for unit in (patch, half) for k in range(1, 4 * side // unit + 2)}
        axes.append(sorted((s for s in sides if (s > side if up else s < side)), key=lambda s: abs(s - side)))
    if size[0] == size[1]:
        return [(side, side) for side in axes[0][: _TRIES // 2] if side in axes[1]]
    # one axis may be valid already
    wide = [([side, *axis])[: _TRIES // 4] for side, axis in zip(size, axes, strict=True)]
    pairs = sorted(itertools.product(*wide), key=lambda pair: abs(pair[0] - size[0]) + abs(pair[1] - size[1]))
    return [(height, width) for height, width in pairs[1 : _TRIES // 2]]


def _own_size(name: str, kwargs: Mapping[str, Any]) -> list[Size]:
    config = timm.get_pretrained_cfg(name)
    return [(config.input_size[1], config.input_size[2])] if config is not None else []


def _try(name: str, size: Size, kwargs: Mapping[str, Any]) -> str | None:
    try:
        with shapes_only():
            try:
                model = parallel.build(name, **{**kwargs, "img_size": size})
            except TypeError as error:
                if "img_size" not in str(error):
                    raise
                model = parallel.build(name, **kwargs)
                if not hasattr(model, "patch_embed"):
                    return None  # a convolutional network takes any size and has no argument for it
            if unusual_part(model) is None or any(isinstance(m, nn.RNNBase) for m in model.modules()):
                return None  # the first takes every multiple of its patch; an RNN would run step by step
            config: Any = model.pretrained_cfg
            channels = kwargs.get("in_chans") or config["input_size"][0]
            model.eval()(torch.zeros(1, channels, *size))
    except NotImplementedError:
        return None  # an operator that needs values: unknown until training
    except UsageError as error:  # from a model of this toolkit; `refuse_size` adds sizes
        return str(error).partition(": ")[2].partition(";")[0] or str(error)
    except Exception as error:  # whatever timm raises if windows or stages do not fit
        text = " ".join(str(error).split())
        if "meta" in text:
            return None  # also an operator that needs values
        shapes = isinstance(error, RuntimeError) or not text  # torch's message about shapes does not help users
        return "its windows or stages do not fit" if shapes else text[:120].rstrip(" .:;,")
    return None

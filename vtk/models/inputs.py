"""Sizes and preprocessing: what the weights expect, and what a model can take."""

import difflib
import math
from collections.abc import Mapping
from typing import Any

import timm
from torch import nn

from vtk.card import MIN_CROP, InputSpec
from vtk.errors import UsageError, VtkError
from vtk.models import parallel
from vtk.models.shapes import shapes_only

Size = int | tuple[int, int] | None

# building even an empty model takes 0.2 s, and every command asks several times for the same one
_KEPT = 8
_blank: dict[tuple[str, str], nn.Module] = {}


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width); one number means a square."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def blank_model(name: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a model without memory for its weights, to ask about shapes; the same one each time: do not change it.

    Raises:
        UsageError: timm does not know the name or refuses an argument.
    """
    key = (name, repr(sorted((kwargs or {}).items())))
    if key not in _blank:
        parallel.register(name)
        try:
            with shapes_only():
                model = timm.create_model(name, **(kwargs or {}))
        except Exception as error:  # timm raises many kinds for a wrong name or value
            raise model_error(name, kwargs or {}, error) from error
        while len(_blank) >= _KEPT:
            _blank.pop(next(iter(_blank)))
        _blank[key] = model
    return _blank[key]


def model_error(name: str, kwargs: Mapping[str, Any], error: Exception) -> VtkError:
    """Turn what timm raised while building a model into one line."""
    if not timm.is_model(name.split(".")[0].removeprefix("hf_hub:").removeprefix("hf-hub:")):
        if hint := parallel.name_hint(name):
            return UsageError(f"timm has no model `{name}`; {hint}")
        close = difflib.get_close_matches(name.split(".")[0], timm.list_models(), n=3)
        near = f"near names: {', '.join(close)}" if close else "see timm.list_models()"
        return UsageError(f"timm has no model `{name}`; {near}")
    text = f"{type(error).__name__}: {error}"
    return UsageError(f"timm cannot build `{name}` with {dict(kwargs) or 'no arguments'}: {text}")


def check_size(name: str, img_size: Size, kwargs: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Return the (height, width) a model will be built for, before any data or weights are read.

    Raises:
        UsageError: a side is not a multiple of the patch; the message names the two nearest sizes that are.
    """
    model = blank_model(name, kwargs)
    config = getattr(model, "pretrained_cfg", None) or {}
    if img_size is None:
        embed = getattr(model, "patch_embed", None)
        own = getattr(embed, "img_size", None) or config.get("input_size", (3, 224, 224))[1:]
        return pair(own if isinstance(own, int) else tuple(own))
    sides = pair(img_size)
    if min(sides) < 1:
        raise UsageError(f"`--img-size` {sides[0]} {sides[1]}: both sides must be at least 1 pixel")
    steps = pair(_stride(model))
    for axis, side, step in zip(("height", "width"), sides, steps, strict=True):
        if side % step:
            low, high = side // step * step, (side // step + 1) * step
            valid = f"{low} or {high}" if low else str(high)
            what = f"{axis} {side} is not a multiple of the patch of `{name}` ({step})"
            raise UsageError(f"`--img-size`: {what}; use {valid}")
    return sides


def _stride(model: nn.Module) -> int | tuple[int, int]:
    """Pixels per token, per axis; 1 for models that are not cut into patches."""
    embed = getattr(model, "patch_embed", None)
    if embed is None:
        return 1
    ratio = getattr(embed, "feat_ratio", None)
    try:
        value = ratio(as_scalar=False) if callable(ratio) else getattr(embed, "patch_size", 1)
    except TypeError:
        value = ratio() if callable(ratio) else 1
    return value if isinstance(value, int) else (int(value[0]), int(value[1]))


def input_spec(
    name: str, kwargs: Mapping[str, Any] | None = None, img_size: Size = None, in_chans: int = 3, **overrides: Any
) -> InputSpec:
    """Return the preprocessing the weights of ``name`` were trained with, at another size if asked.

    Args:
        name: timm model name; a tag after the dot selects the weights.
        kwargs: arguments for timm.
        img_size: pixels, height first.
        in_chans: channels.
        overrides: ``mean``, ``std``, ``interpolation``, ``crop_pct``, ``resize_mode``; None keeps the default.

    Raises:
        UsageError: unknown name, impossible size, or statistics that do not fit ``in_chans``.
    """
    height, width = check_size(name, img_size, kwargs)
    config = getattr(blank_model(name, kwargs), "pretrained_cfg", None) or {}
    values: dict[str, Any] = {
        "mean": _channels(config.get("mean", (0.5,) * 3), in_chans),
        "std": _channels(config.get("std", (0.5,) * 3), in_chans),
        "interpolation": config.get("interpolation") or "bicubic",
        "crop_pct": float(config.get("crop_pct") or 1.0),
    }
    values.update({k: v for k, v in overrides.items() if v is not None})
    for key in ("mean", "std"):
        if len(values[key]) != in_chans:
            raise UsageError(f"`--{key}` has {len(values[key])} values; the input has {in_chans} channels")
        if not all(map(math.isfinite, values[key])):
            raise UsageError(f"`--{key}` {values[key]}: every value must be a finite number")
    if min(values["std"]) <= 0:
        raise UsageError(f"`--std` {values['std']}: every value must be above 0")
    if not MIN_CROP <= values["crop_pct"] <= 1:
        raise UsageError(f"`--crop-pct` is {values['crop_pct']}; allowed is {MIN_CROP} to 1")
    return InputSpec(height=height, width=width, in_chans=in_chans, **values)


def _channels(values: tuple[float, ...], in_chans: int) -> tuple[float, ...]:
    """Statistics for another number of channels: the mean over the colours stands for each."""
    values = tuple(float(v) for v in values)
    return values if len(values) == in_chans else (sum(values) / len(values),) * in_chans

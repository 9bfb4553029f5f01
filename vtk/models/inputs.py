"""Preprocessing of pretrained weights, and checks of image sizes."""

import difflib
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import timm
from torch import nn

from vtk.card import MIN_CROP, InputSpec
from vtk.errors import UsageError, VtkError
from vtk.models import parallel_models as parallel
from vtk.models.meta_model import shapes_only
from vtk.models.stems.own import own_stem, shape_of
from vtk.models.structure import unusual_part
from vtk.models.valid_sizes import refuse_size, valid_sizes

Size = int | tuple[int, int] | None

# building even an empty model takes 0.2 s, and every command needs the same one several times
_KEPT = 8
_blank: dict[tuple[str, str], nn.Module] = {}


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width); one number means a square.

    Raises:
        UsageError: neither one number nor two.
    """
    sides = [size] * 2 if isinstance(size, Integral) else size
    if isinstance(sides, (list, tuple)) and len(sides) == 2:
        if all(isinstance(side, Integral) and not isinstance(side, bool) for side in sides):
            return int(sides[0]), int(sides[1])
    raise UsageError(f"`img_size` is {size!r:.80}; allowed is one side in pixels, or height and width")


def blank_model(name: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a model on the meta device, for its shapes; it is cached, do not change it.

    Raises:
        UsageError: unknown to timm, or with an invalid argument.
    """
    key = (name, repr(sorted((kwargs or {}).items())))
    if key not in _blank:
        parallel.register(name)
        try:
            with shapes_only():
                model = timm.create_model(name, **(kwargs or {}))
        except VtkError:
            raise
        except Exception as error:  # timm raises many types for a wrong name or value
            raise model_error(name, kwargs or {}, error) from error
        while len(_blank) >= _KEPT:
            _blank.pop(next(iter(_blank)))
        _blank[key] = model
    return _blank[key]


def model_error(name: str, kwargs: Mapping[str, Any], error: Exception) -> VtkError:
    """Return timm's error while building a model as one line."""
    if not timm.is_model(name.split(".")[0].removeprefix("hf_hub:").removeprefix("hf-hub:")):
        if hint := parallel.name_hint(name):
            return UsageError(f"timm has no model `{name}`; {hint}")
        close = difflib.get_close_matches(name.split(".")[0], timm.list_models(), n=3)
        near = f"similar names: {', '.join(close)}" if close else "see timm.list_models()"
        return UsageError(f"timm has no model `{name}`; {near}")
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return UsageError(f"timm cannot build `{name}` with {dict(kwargs) or 'no arguments'}: {text}")


def check_size(name: str, img_size: Size, kwargs: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Return the (height, width) that a model will be built for, before data or weights are read.

    Raises:
        UsageError: a side is not a multiple of the patch, or does not fit the model's windows or stages; the message
            names the nearest valid sizes.
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
            if unusual_part(model):  # its windows and stages may support neither
                valid = valid_sizes(name, sides, kwargs or {}, steps) or valid
            what = f"{axis} {side} is not a multiple of the patch of `{name}` ({step})"
            raise UsageError(f"`--img-size`: {what}; use {valid}")
    if sides != tuple(config.get("input_size", (0, 0, 0))[1:]):
        refuse_size(name, sides, kwargs or {}, steps)
    return sides


def patch_side(name: str, kwargs: Mapping[str, Any] | None = None) -> int:
    """Return pixels per token along a side (the larger of two); 0 for a model without patches."""
    step = max(pair(_stride(blank_model(name, kwargs))))
    return step if step > 1 else 0


def _stride(model: nn.Module) -> int | tuple[int, int]:
    """Return pixels per token, per axis; 1 for models without patches."""
    embed = getattr(model, "patch_embed", None)
    if embed is None:
        return 1
    ratio = getattr(embed, "feat_ratio", None)
    try:
        value = ratio(as_scalar=False) if callable(ratio) else _patch(embed)
    except TypeError:
        value = ratio() if callable(ratio) else 1
    return value if isinstance(value, int) else (int(value[0]), int(value[1]))


def _patch(embed: nn.Module) -> int | tuple[int, int]:
    """Return the stride of patches: those of PVT overlap, so that its ``patch_size`` is larger."""
    if own_stem(embed) == "conv":  # VOLO: its projection is behind a convolution of stride 2
        return shape_of(embed).patch
    conv = getattr(embed, "proj", None)
    return conv.stride if isinstance(conv, nn.Conv2d) else getattr(embed, "patch_size", 1)  # type: ignore[return-value]


def input_spec(
    name: str, kwargs: Mapping[str, Any] | None = None, img_size: Size = None, in_chans: int = 3, **overrides: Any
) -> InputSpec:
    """Return the preprocessing that the weights of ``name`` were trained with, optionally at another size.

    Args:
        name: timm model name; a tag after the dot selects the weights.
        kwargs: arguments of timm.
        img_size: pixels, height first.
        in_chans: input channels.
        overrides: ``mean``, ``std``, ``interpolation``, ``crop_pct``, ``resize_mode``; None keeps the default. One
            value of ``mean`` or ``std`` is for all channels.

    Raises:
        UsageError: unknown name, unsupported size, or statistics that do not fit ``in_chans``.
    """
    height, width = check_size(name, img_size, kwargs)
    config = getattr(blank_model(name, kwargs), "pretrained_cfg", None) or {}
    values: dict[str, Any] = {
        "mean": channel_values(config.get("mean", (0.5,) * 3), in_chans),
        "std": channel_values(config.get("std", (0.5,) * 3), in_chans),
        "interpolation": config.get("interpolation") or "bicubic",
        "crop_pct": float(config.get("crop_pct") or 1.0),
    }
    values.update({k: v for k, v in overrides.items() if v is not None})
    for key in ("mean", "std"):
        if len(values[key]) == 1:
            values[key] = tuple(values[key]) * in_chans
        if len(values[key]) != in_chans:
            channels = f"{in_chans} channel{'s' * (in_chans > 1)}"
            raise UsageError(
                f"`--{key}` has {len(values[key])} values; the input has {channels}; give one value, or one per channel"
            )
        if not all(map(math.isfinite, values[key])):
            raise UsageError(f"`--{key}` {values[key]}: every value must be a finite number")
    if min(values["std"]) <= 0:
        raise UsageError(f"`--std` {values['std']}: every value must be above 0")
    if not MIN_CROP <= values["crop_pct"] <= 1:
        raise UsageError(f"`--crop-pct` is {values['crop_pct']}; allowed is {MIN_CROP} to 1")
    return InputSpec(height=height, width=width, in_chans=in_chans, **values)


def channel_values(values: tuple[float, ...], in_chans: int) -> tuple[float, ...]:
    """Return statistics for another number of channels, matching the weights of the transform ``adapt_input``.

    The first channels keep those of RGB; further ones repeat them in order, as timm repeats the weights. One or two
    channels (grey, opacity) have the mean over RGB.
    """
    values = tuple(float(v) for v in values)
    if in_chans > len(values) > 1:
        return tuple(values[c % len(values)] for c in range(in_chans))
    return values if len(values) == in_chans else (sum(values) / len(values),) * in_chans

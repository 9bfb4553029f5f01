"""Opens sources in memory: a loaded `Task`, or any module that maps images to logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UsageError
from vtk.models.create import facts_of
from vtk.models.inputs import channel_values, pair
from vtk.packs.load import Task
from vtk.runtime.module_copy import copy_module, first_line
from vtk.runtime.source import Source, pack_name

_PROBED = 2
"""Images of the first forward pass: with one image, a model that confuses batch and features would pass."""


def open_task(task: Task) -> Source:
    """Return a source of a loaded task; its model is read whenever the source is run."""
    kind, name = ("checkpoint", task.path.stem) if task.base is None else ("pack", pack_name(task.path))
    return Source(kind, name, task.path, task.card, held=task)  # type: ignore[arg-type]


def open_module(
    module: nn.Module, *, img_size: int | tuple[int, int] | None = None, classes: Sequence[str] | None = None
) -> Source:
    """Return a source of a module.

    Its input is read from timm's ``pretrained_cfg`` (a dict with ``input_size``, ``mean`` and ``std``),
    ``patch_embed.img_size`` and the channels of its first convolution; its number of classes from a forward pass.

    Args:
        module: maps (B, C, H, W) to (B, classes), both floating. It is read whenever the source runs, and not changed.
        img_size: pixels, height first, if the module does not have it.
        classes: names of its outputs.

    Raises:
        UsageError: its image size is unknown, it cannot be copied, or it does not return logits.
    """
    inner = _unwrap(module)
    facts = facts_of(inner)
    config = _config(inner)
    size = _size(inner, config, img_size)
    spec = facts.input if facts is not None and size == facts.input.size else None
    probe = copy_module(inner)
    if spec is None:
        chans, count = _count_outputs(probe, _channels(probe, config), size)
        spec = _spec(config, size, chans)
    else:
        _, count = _count_outputs(probe, (spec.in_chans,), size)
    if classes is not None and len(classes) != count:
        raise UsageError(f"`classes` has {len(classes)} names, {type(inner).__name__} gives {count} logits; name each")
    names = tuple(map(str, classes)) if classes is not None else tuple(map(str, range(count)))
    if len(set(names)) != count:
        raise UsageError("`classes` names one class twice; give different names")
    model = facts.spec if facts is not None else ModelSpec(str(config.get("architecture") or type(inner).__name__))
    transforms = facts.transforms if facts is not None else ()
    notes: tuple[str, ...] = ()
    if facts is None and not (config.get("mean") and config.get("std")):
        notes = (
            f"{type(inner).__name__} does not say how its images are normalised: mean 0.5 and std 0.5 are taken; a "
            "dict `pretrained_cfg` with `mean` and `std` as its attribute says it",
        )
    return Source(
        "module", type(inner).__name__, None, Card(model, spec, names, transforms=transforms),
        described=classes is not None, notes=notes, held=inner,
    )  # fmt: skip


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside of ``torch.compile``, DataParallel or DistributedDataParallel."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def _config(module: nn.Module) -> dict[str, Any]:
    """Return timm's config of the weights, under its present or older name; empty without one."""
    for name in ("pretrained_cfg", "default_cfg"):
        found: Any = getattr(module, name, None)
        found = found.to_dict() if hasattr(found, "to_dict") else found
        if isinstance(found, dict) and found:
            return found
    return {}


def _size(module: nn.Module, config: dict[str, Any], requested: int | tuple[int, int] | None) -> tuple[int, int]:
    if requested is None:  # the size it was built for comes before the size its weights were trained at
        requested = getattr(getattr(module, "patch_embed", None), "img_size", None)
    if requested is None and len(config.get("input_size") or ()) == 3:
        requested = tuple(config["input_size"][1:])
    if requested is None:
        raise UsageError(f"{type(module).__name__} does not say the size of its images; give img_size=(height, width)")
    height, width = pair(requested)
    if min(height, width) < 1:
        raise UsageError(f"`img_size` {height} {width}: both sides must be at least 1 pixel")
    return height, width


def _channels(module: nn.Module, config: dict[str, Any]) -> tuple[int, ...]:
    """Return possible numbers of input channels, the likeliest first: pixels may be rearranged before a convolution."""
    first = next((m.in_channels for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    configured = config["input_size"][0] if len(config.get("input_size") or ()) == 3 else None
    return tuple(dict.fromkeys(n for n in (first, configured, 3) if n is not None))


def _count_outputs(module: nn.Module, channels: Sequence[int], size: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of input channels and of classes."""
    name, failure = type(module).__name__, ""
    for chans in channels:
        try:
            images = torch.zeros(_PROBED, chans, *size)
            with torch.inference_mode(), torch.random.fork_rng(devices=[]):
                logits = module(images)
        except Exception as error:  # a module of the user's raises whatever it likes
            failure = failure or f"images ({_PROBED}, {chans}, {size[0]}, {size[1]}): {first_line(error)}"
            continue
        if not isinstance(logits, Tensor):
            raise UsageError(f"{name} gives a {type(logits).__name__}, not one tensor of logits; wrap it in a module "
                             "that returns them")  # fmt: skip
        if logits.ndim != 2 or len(logits) != _PROBED or not logits.shape[1] or not logits.is_floating_point():
            raise UsageError(f"{name} gives {logits.dtype} {tuple(logits.shape)} for {_PROBED} images, not logits "
                             "(images, classes); wrap it in a module that returns them")  # fmt: skip
        return chans, logits.shape[1]
    raise UsageError(f"{name} fails on {failure}; give its own img_size=(height, width)")


def _spec(config: dict[str, Any], size: tuple[int, int], chans: int) -> InputSpec:
    half = (0.5, 0.5, 0.5)
    return InputSpec(
        height=size[0], width=size[1], in_chans=chans, mean=channel_values(config.get("mean") or half, chans),
        std=channel_values(config.get("std") or half, chans),
        interpolation=config.get("interpolation") or "bicubic", crop_pct=float(config.get("crop_pct") or 1.0),
    )  # fmt: skip

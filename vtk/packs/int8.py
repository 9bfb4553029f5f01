"""Packs in int8: the update of each trained matrix relative to the base, as integers from -127 to 127.

Each row (output channel) has one fp32 scale, ``NAME:scale``. Training changes weights little, so the steps are finer
than those of the weights themselves would be. Everything else stays fp32: vectors, position embeddings, and matrices
that the base does not have (rounding the small classifier alone would change the logits 20 times more than rounding all
attention).
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.errors import DataError

SCALE = ":scale"
_STEPS = 127
_IMAGES = 4


def quantise(
    tensors: Mapping[str, Tensor], trained: Collection[str], start: Callable[[str], Tensor | None]
) -> dict[str, Tensor]:
    """Return the tensors that an int8 pack stores.

    Args:
        tensors: of the pack, at full precision.
        trained: names among which the matrices are stored in eight bits.
        start: name in the model to the base's tensor, or None.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu()
        if not value.is_floating_point():
            stored[name] = value.clone(memory_format=torch.contiguous_format)
            continue
        value = value.float()
        first = start(name) if name in trained and value.ndim == 2 and value.numel() else None
        moved = None if first is None or first.shape != value.shape else value - first.detach().cpu().float()
        if moved is None or not bool(moved.isfinite().all()):
            stored[name] = value.clone(memory_format=torch.contiguous_format)
            continue
        scale = moved.abs().amax(dim=1) / _STEPS
        steps = moved / torch.where(scale > 0, scale, torch.ones_like(scale))[:, None]
        stored[name] = steps.round().clamp(-_STEPS, _STEPS).to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def differences(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the tensors that are stored as differences from the base."""
    return frozenset(name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE))


def expand(
    tensors: Mapping[str, Tensor], start: Callable[[str], Tensor | None], where: str | Path
) -> dict[str, Tensor]:
    """Return the tensors of a pack, with int8 expanded to fp32.

    Args:
        tensors: of `quantise`; other tensors are returned unchanged.
        start: name in the model to the base's tensor.
        where: names the pack in messages.

    Raises:
        DataError: a scale without its matrix, or shapes that do not match.
    """
    full = {k: v for k, v in tensors.items() if not k.endswith(SCALE)}
    for key in tensors.keys() - full.keys():
        name, scale = key.removesuffix(SCALE), tensors[key]
        steps = tensors.get(name)
        if steps is None or steps.dtype != torch.int8 or steps.ndim != 2 or scale.shape != steps.shape[:1]:
            found = "no matrix" if steps is None else f"{steps.dtype} of shape {tuple(steps.shape)}"
            raise DataError(
                f"{where}: `{key}` of shape {tuple(scale.shape)} belongs to {found}; the pack was edited or its files "
                "mixed"
            )
        first = start(name)
        if first is None or first.shape != steps.shape:
            raise DataError(
                f"{where}: `{name}` is stored as a difference and the base has none of shape {tuple(steps.shape)}; "
                "the pack was edited or its files mixed"
            )
        full[name] = first.detach().cpu().float() + steps.float() * scale.float()[:, None]
    return full


def drift(
    model: nn.Module, exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor], spec: InputSpec
) -> dict[str, Any]:
    """Measure the rounding error: per tensor, and in the logits of random images.

    Args:
        model: takes the tensors; it holds ``exact`` before, ``rounded`` afterwards. In eval mode, fp32, on the CPU.
        exact: the pack's tensors.
        rounded: the same tensors as read from the file.
        spec: size of the images.

    Returns:
        ``max_relative`` (per tensor that changed: largest error over largest value), ``logits_cosine`` (the least of
        the images) and ``logits_relative`` (largest error over largest logit).
    """
    relative = {}
    for name, value in exact.items():
        error = float((rounded[name].double() - value.detach().cpu().double()).abs().max()) if value.numel() else 0.0
        if error:
            relative[name] = error / float(value.detach().abs().max())
    images = torch.randn(
        _IMAGES, spec.in_chans, spec.height, spec.width, generator=torch.Generator().manual_seed(0)
    )  # fmt: skip
    with torch.inference_mode():
        before = model(images).double()
        model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in rounded.items()}, strict=False)
        after = model(images).double()
    return {
        "max_relative": relative,
        "logits_cosine": float(nn.functional.cosine_similarity(before, after, dim=-1).min()),
        "logits_relative": float((after - before).abs().max() / before.abs().max().clamp_min(1e-30)),
    }

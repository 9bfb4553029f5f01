"""Normalisation without its affine part, which is folded into the next linear layer."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, RmsNorm
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk_kernels.norm import norm as kernel_norm

_LAYER = (nn.LayerNorm, LayerNorm)
_RMS = (RmsNorm, nn.RMSNorm)
POST_NORM = "its norms stand behind attention and FFN, where no matrix can take them"
"""Why a block with norms behind its parts is refused."""

_WIDE = ("LayerNormFp32", "RmsNormFp32")
"""timm's norms that compute in fp32 whatever the input: the statistics are fp32 here anyway."""


@dataclass(frozen=True)
class NormSpec:
    """A normalisation over the last axis without weight and bias: its kind and the number added to the variance."""

    kind: Literal["layer", "rms"]
    eps: float


@dataclass(frozen=True)
class Affine:
    """What follows the normalisation: ``weight`` (C) and ``bias`` (C), ones and zeros where a norm has none."""

    weight: Tensor
    bias: Tensor


def read_norm(module: Any, like: Tensor, where: str) -> tuple[NormSpec, Affine]:
    """Take a normalisation apart.

    Args:
        module: a LayerNorm or RMSNorm of torch or timm over the last axis.
        like: device and dtype of the result (fp32 or fp64).
        where: its name in the model, for the message.

    Raises:
        UsageError: another kind of normalisation.
    """
    kind = type(module)
    wide = kind.__name__ in _WIDE and kind.__module__.startswith("timm.")
    if kind in _LAYER or (wide and isinstance(module, nn.LayerNorm)):
        name: Literal["layer", "rms"] = "layer"
    elif kind in _RMS or wide:
        name = "rms"
    else:
        raise refusal(where, module, "only LayerNorm and RMSNorm can be folded")
    shape: tuple[int, ...] = tuple(module.normalized_shape)
    if len(shape) != 1:
        raise refusal(where, module, f"it normalises {len(shape)} axes and only the last one can be folded")
    eps = module.eps
    if eps is None:  # torch.nn.RMSNorm's default depends on the type it runs in
        raise refusal(where, module, "its eps is None; give it a number")
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    ones = torch.ones(shape, dtype=like.dtype, device=like.device)
    return NormSpec(name, float(eps)), Affine(
        weight=ones if weight is None else weight.detach().to(like.dtype),
        bias=torch.zeros_like(ones) if bias is None else bias.detach().to(like.dtype),
    )


def read_linear(layer: Any, like: Tensor, where: str) -> tuple[Tensor, Tensor]:
    """Return weight (rows, columns) and bias (rows), zeros where there is none, of a linear layer.

    Raises:
        UsageError: not `torch.nn.Linear` itself: an adapter or a parametrization computes more than its weight says.
    """
    if type(layer) is not nn.Linear:
        raise refusal(where, layer, "only torch.nn.Linear is known here (merge adapters and parametrizations first)")
    weight = layer.weight.detach().to(like.dtype)
    return weight, like.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().to(like.dtype)


def normalize(x: Tensor, spec: NormSpec, kernels: bool) -> Tensor:
    """Normalise the last axis of ``x``, by the kernel where ``kernels`` says so."""
    if kernels:
        return kernel_norm(x, spec.eps, rms=spec.kind == "rms")[0]
    if spec.kind == "rms":
        return F.rms_norm(x, x.shape[-1:], eps=spec.eps)
    return F.layer_norm(x, x.shape[-1:], eps=spec.eps)


def normalize_parts(x: Tensor, spec: NormSpec, parts: int, plan: Any = None) -> Tensor:
    """Normalise each of so many equal parts of the last axis of ``x`` by itself, with kernels as the plan says."""
    kernels = plan is not None and plan.kernels
    if parts == 1:
        return normalize(x, spec, kernels)
    return normalize(x.unflatten(-1, (parts, -1)), spec, kernels).flatten(-2)


def refusal(where: str, module: nn.Module, reason: str) -> UsageError:
    """Return the error for a part that cannot be fused: its name, its class, why, and what to do."""
    return UsageError(
        f"cannot fuse `{where}` ({type(module).__name__}): {reason}; use the back-end eager or compile, "
        "or export without --fuse"
    )

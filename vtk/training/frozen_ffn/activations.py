"""Activations of frozen FFNs, their gradients, and their slopes in bytes.

GELU by the error function, or by tanh, GELU ≈ u σ(1.702 u), SiLU(u) = u σ(u)    (Hendrycks, Gimpel, 2016)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.frozen_ffn.parts import Activation
from vtk_kernels._gelu import LOW, STEP

_QUICK = 1.702


def activate(u: Tensor, kind: Activation) -> Tensor:
    """Return the activation of ``u``, by torch's autograd."""
    if kind in ("gelu", "gelu_tanh"):
        return F.gelu(u, approximate="tanh" if kind == "gelu_tanh" else "none")
    return F.silu(u) if kind == "silu" else u * torch.sigmoid(_QUICK * u)


def activate_(u: Tensor, kind: str) -> Tensor:
    """Return the activation of ``u``, in its memory."""
    if kind == "gelu":
        return torch.ops.aten.gelu_(u)  # type: ignore[no-any-return]
    if kind == "gelu_tanh":
        return torch.ops.aten.gelu_(u, approximate="tanh")  # type: ignore[no-any-return]
    if kind == "silu":
        return torch.ops.aten.silu_(u)  # type: ignore[no-any-return]
    return u.mul_(torch.sigmoid(_QUICK * u))


def activation_backward_(g: Tensor, u: Tensor, kind: str) -> Tensor:
    """Return g ⊙ act′(u), in the memory of ``u``."""
    if kind in ("gelu", "gelu_tanh"):
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward.grad_input(g, u, approximate=approximate, grad_input=u)  # type: ignore[no-any-return]
    if kind == "silu":
        return torch.ops.aten.silu_backward.grad_input(g, u, grad_input=u)  # type: ignore[no-any-return]
    share = torch.sigmoid(_QUICK * u)
    return u.mul_(1 - share).mul_(_QUICK).add_(1).mul_(share).mul_(g)


def slope_bytes(u: Tensor, kind: str) -> Tensor:
    """Return act′(u) in uint8, as `vtk_kernels.linear_gelu_backward` reads it; its error is at most half a step."""
    wide = u.to(torch.promote_types(u.dtype, torch.float32), copy=True)
    slope = activation_backward_(torch.ones_like(wide), wide, kind)
    return ((slope - LOW) / STEP).round_().clamp_(0, 255).to(torch.uint8)

"""Context Broadcasting around the attention and FFNs that the memory modes run."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vtk.models.transforms.context_broadcast import ContextBroadcast, find_context_broadcast
from vtk.training.frozen_ffn._bodies import affine
from vtk.training.frozen_ffn.parts import affine_of

Each = Callable[[nn.Module, Tensor], Tensor]
"""Applies a module that looks at an image as a whole, or draws a number for it, to the tokens of every image."""


def whole(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module to the tokens (B, N, C) of one task: the `Each` of a batch."""
    y: Tensor = module(x)
    return y


def context_of(module: Any) -> tuple[ContextBroadcast | None, str | None]:
    """Return the Context Broadcasting of a module and its place, both None without it."""
    return find_context_broadcast(module), getattr(module, "cb_placement", None)


def each_input(
    norm: Any, x_hat: Tensor, context: ContextBroadcast | None, each: Each
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what a module is given as (tokens, γ, β); with Context Broadcasting before it γ and β are applied."""
    gamma, beta = affine_of(norm)
    if context is None:
        return x_hat, gamma, beta
    return each(context, affine(x_hat, gamma, beta)).to(x_hat.dtype), None, None


def broadcast(mlp: Any, h: Tensor, context: ContextBroadcast, placement: str | None, each: Each) -> Tensor:
    """Run an FFN with Context Broadcasting, image by image; without it, the FFN is of its class's base."""
    if placement == "mid":
        hidden = mlp.norm(mlp.drop1(mlp.act(mlp.fc1(h))))
        y: Tensor = mlp.drop2(mlp.fc2(each(context, hidden)))
        return y
    plain: Any = type(mlp).__bases__[0]
    if placement == "front":
        return plain.forward(mlp, each(context, h))  # type: ignore[no-any-return]
    return each(context, plain.forward(mlp, h))

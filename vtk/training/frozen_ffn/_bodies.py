"""Code shared by the operators of this package: their bodies, and the gradient of a linear layer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def body(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function``, whose first argument is a tensor or a list of them, the body of an operator.

    An operator's forward runs inside the caller's autocast and its backward outside of it, so the two would compute in
    different types. Here types are chosen before the operator is called, and its body has no autocast.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        first = first if isinstance(first, Tensor) else first[0]
        kind = first.device.type
        with torch.no_grad():
            if not torch.is_autocast_enabled(kind):  # entering autocast costs as much as a small kernel
                return function(*args, **kwargs)
            with torch.autocast(kind, enabled=False):
                return function(*args, **kwargs)

    return run


def affine(x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    """Return x_hat ⊙ gamma + beta in the type of ``x_hat`` (..., C); ``gamma`` and ``beta`` (C) may be None."""
    if gamma is None:
        return x_hat if beta is None else (x_hat + beta).to(x_hat.dtype)
    product = x_hat * gamma if beta is None else torch.addcmul(beta, x_hat, gamma)
    return product.to(x_hat.dtype)


def linear_gradients(
    g: Sequence[Tensor], x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor],
    need_x: bool, need_w: Sequence[bool], need_b: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of ``x_hat``, of the bias and of each w of y = (x_hat ⊙ gamma + beta) · wᵀ + b.

    Args:
        g: (..., Fᵢ), gradient of y of each of the layers side by side.
        x_hat: (..., C); read only for the gradients of ``w``.
        gamma: (C), or None.
        beta: (C), or None.
        w: (Fᵢ, C) of each.
        need_x: compute the first; one that is not computed comes back empty. Likewise the others.
        need_w: of each layer.
        need_b: the bias, (ΣF).
    """
    rows = [one.flatten(0, -2) for one in g]
    gx = g[0].new_empty(0)
    if need_x:
        gx = rows[0] @ w[0]
        for one, weight in zip(rows[1:], w[1:], strict=True):
            gx.addmm_(one, weight)
        gx = gx.view(*g[0].shape[:-1], w[0].shape[1])
        if gamma is not None:
            gx.mul_(gamma)
    h = affine(x_hat, gamma, beta).flatten(0, -2) if any(need_w) else x_hat
    gw = [one.T @ h if need else one.new_empty(0) for one, need in zip(rows, need_w, strict=True)]
    gb = torch.cat([one.sum(0) for one in rows]) if need_b else g[0].new_empty(0)
    return [gx, gb, *gw]

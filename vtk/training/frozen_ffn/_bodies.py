"""Code shared by the operators of this package: their bodies, and the gradient of a linear layer."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def body(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function``, whose first argument is a tensor, the body of an operator.

    An operator's forward runs inside the caller's autocast and its backward outside of it, so the two would compute in
    different types. Here types are chosen before the operator is called, and its body has no autocast.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
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
    g: Tensor, x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Tensor, need_x: bool, need_w: bool,
    need_b: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``x_hat``, ``w`` and the bias of y = (x_hat ⊙ gamma + beta) · wᵀ + b.

    Args:
        g: (..., F), gradient of y.
        x_hat: (..., C); read only for the gradient of ``w``.
        gamma: (C), or None.
        beta: (C), or None.
        w: (F, C).
        need_x: compute the first of the three; one that is not computed comes back empty. Likewise the others.
        need_w: the second.
        need_b: the third.
    """
    rows = g.flatten(0, -2)
    gx = (rows @ w).view(*g.shape[:-1], w.shape[1]) if need_x else g.new_empty(0)
    if need_x and gamma is not None:
        gx.mul_(gamma)
    gw = rows.T @ affine(x_hat, gamma, beta).flatten(0, -2) if need_w else g.new_empty(0)
    gb = rows.sum(0) if need_b else g.new_empty(0)
    return gx, gw, gb


def fake_gradients(g: Tensor, w: Tensor, need_x: bool, need_w: bool, need_b: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like those of `linear_gradients`."""
    gx = g.new_empty((*g.shape[:-1], w.shape[1])) if need_x else g.new_empty(0)
    return gx, w.new_empty(w.shape) if need_w else w.new_empty(0), w.new_empty(w.shape[0] if need_b else 0)

"""Code shared by the operators of this package: their bodies, and the affine part of a norm."""

import functools
from collections.abc import Callable
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

"""Linear layers behind a norm whose affine part is frozen: only x_hat is kept, and only for trained layers.

    y = (x_hat ⊙ γ + β) · wᵀ + b

Layers side by side (queries, keys and values) are one operator: the affine part is applied once for all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.frozen_ffn._bodies import affine, body


@torch.library.custom_op("vtk_training::affine_linear", mutates_args=())
@body
def _affine_linear(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor], b: Tensor | None
) -> list[Tensor]:
    return linears(affine(x_hat, gamma, beta), w, b)


@_affine_linear.register_fake
def _(x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor], b: Tensor | None) -> list[Tensor]:
    return [x_hat.new_empty((*x_hat.shape[:-1], one.shape[0])) for one in w]


@torch.library.custom_op("vtk_training::affine_linear_backward", mutates_args=())
@body
def _affine_linear_backward(
    g: Sequence[Tensor], x_hat: Tensor | None, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor],
    need_x: bool, need_w: Sequence[bool], need_b: bool,
) -> list[Tensor]:  # fmt: skip
    return linear_gradients(g, g[0] if x_hat is None else x_hat, gamma, beta, w, need_x, need_w, need_b)


@_affine_linear_backward.register_fake
def _(
    g: Sequence[Tensor], x_hat: Tensor | None, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor],
    need_x: bool, need_w: Sequence[bool], need_b: bool,
) -> list[Tensor]:  # fmt: skip
    gx = g[0].new_empty((*g[0].shape[:-1], w[0].shape[1]) if need_x else 0)
    gb = g[0].new_empty(sum(len(one) for one in w) if need_b else 0)
    return [gx, gb, *(one.new_empty(one.shape if need else 0) for one, need in zip(w, need_w, strict=True))]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_hat, gamma, beta, w, _ = inputs
    trained = any(ctx.needs_input_grad[3 : 3 + len(w)])  # a flat tuple here, a nested one in backward
    ctx.save_for_backward(x_hat if trained else None, gamma, beta, *w)


def _differentiate(ctx: Any, g: Sequence[Tensor]) -> tuple[Any, ...]:
    need_x, _, _, need_w, need_b = ctx.needs_input_grad
    x_hat, gamma, beta, *w = ctx.saved_tensors
    gx, gb, *gw = torch.ops.vtk_training.affine_linear_backward(g, x_hat, gamma, beta, w, need_x, need_w, need_b)
    grads = [one if need else None for one, need in zip(gw, need_w, strict=True)]
    return gx if need_x else None, None, None, grads, gb if need_b else None


_affine_linear.register_autograd(_differentiate, setup_context=_setup)


def affine_linear(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor], b: Tensor | None
) -> list[Tensor]:
    """Return (x_hat ⊙ gamma + beta) · wᵀ + b for layers side by side; x_hat alone is kept, if any ``w`` is trained.

    Args:
        x_hat: (..., C), from `normalise`.
        gamma: (C), frozen, of any floating type; or None.
        beta: (C), frozen; or None.
        w: (Fᵢ, C) of each layer, the type of ``x_hat``.
        b: (ΣF), of all layers, the type of ``x_hat``; or None.

    Returns:
        (..., Fᵢ) of each, contiguous.
    """
    y: list[Tensor] = torch.ops.vtk_training.affine_linear(x_hat, gamma, beta, w, b)
    return y


def linears(h: Tensor, w: Sequence[Tensor], b: Tensor | None) -> list[Tensor]:
    """Return h · wᵀ + b, (..., Fᵢ) of each layer; ``b`` (ΣF) may be None."""
    parts = [None] * len(w) if b is None else b.split([len(one) for one in w])
    return [F.linear(h, one, part) for one, part in zip(w, parts, strict=True)]


def linears_backward(g: Sequence[Tensor], w: Sequence[Tensor]) -> Tensor:
    """Return the gradient of h, (..., C), from those of `linears`' results, which may be halves of one tensor."""
    rows = [one.flatten(0, -2) for one in g]
    gx = rows[0] @ w[0]
    for one, weight in zip(rows[1:], w[1:], strict=True):
        gx.addmm_(one, weight)
    return gx.view(*g[0].shape[:-1], w[0].shape[1])


def packed(w: Sequence[Tensor]) -> Tensor:
    """Return two layers' weights as one (2 F, C): where they lie one behind the other in memory, without a copy."""
    first, second = w
    if (
        first.is_contiguous() and second.is_contiguous()
        and second.data_ptr() == first.data_ptr() + first.nbytes
        and second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    ):  # fmt: skip
        return first.as_strided((len(first) + len(second), first.shape[1]), first.stride(), first.storage_offset())
    return torch.cat([first, second])


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
    gx = g[0].new_empty(0)
    if need_x:
        gx = linears_backward(g, w)
        if gamma is not None:
            gx.mul_(gamma)
    h = affine(x_hat, gamma, beta).flatten(0, -2) if any(need_w) else x_hat
    rows = [one.flatten(0, -2) for one in g]
    gw = [one.T @ h if need else one.new_empty(0) for one, need in zip(rows, need_w, strict=True)]
    gb = torch.cat([one.sum(0) for one in rows]) if need_b else g[0].new_empty(0)
    return [gx, gb, *gw]

"""The FFN of a block while it trains with frozen norms and FFN, from normalised tokens to what is added to them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.models.transforms.context_broadcast import ContextBroadcast
from vtk.training.frozen_ffn._bodies import affine
from vtk.training.frozen_ffn.activations import activate
from vtk.training.frozen_ffn.context import Each, broadcast, context_of, each_input, whole
from vtk.training.frozen_ffn.ffn import FirstLayer, SecondLayer, frozen_ffn
from vtk.training.frozen_ffn.ffn_bytes import bytes_ffn
from vtk.training.frozen_ffn.fold import Folded, folded
from vtk.training.frozen_ffn.linear import linears
from vtk.training.frozen_ffn.norm import normalise
from vtk.training.frozen_ffn.parts import Branch, FfnLayers, affine_of, ffn_layers, norm_form
from vtk.training.frozen_ffn.rules import BlockModes


def feed(branch: Branch, x_hat: Tensor, modes: BlockModes, each: Each) -> Tensor:
    """Return the FFN of normalised tokens (B, N, C).

    Args:
        branch: of the FFN.
        x_hat: the tokens, also (1, T, C) of many images.
        modes: what its block keeps.
        each: applies Context Broadcasting image by image.
    """
    mlp, norm = branch.module, branch.norm
    context, placement = context_of(mlp)
    layers = ffn_layers(mlp) if modes.folds else None
    fold = None
    if layers is not None and placement != "front":
        fold = folded(norm, layers.first, x_hat.dtype, layers.rows)
    if layers is None or (fold is None and modes.ffn == "plain"):
        h = affine(x_hat, *affine_of(norm))
        return whole(mlp, h) if context is None or each is whole else broadcast(mlp, h, context, placement, each)
    source, gamma, beta = each_input(norm, x_hat, context if placement == "front" else None, each)
    if fold is not None:
        gamma = beta = None
    assert layers.activation is not None
    first = FirstLayer(gamma, beta, *(fold or _first(layers, source)), layers.activation)
    apart = placement == "mid"  # Context Broadcasting before fc2, which therefore is a layer of its own
    if modes.ffn == "recompute" and not apart:
        return _end(frozen_ffn(source, first, _second(layers, source)), context, placement, each)
    if modes.ffn == "bytes" and not apart and layers.norm is None:
        second = _second(layers, source)
        return _end(bytes_ffn(source, first, second.w, second.b), context, placement, each)
    if modes.ffn == "plain":
        u = linears(source, first.w, first.b)
        hidden = activate(u[0], first.activation)
        hidden = hidden * u[1] if layers.gated else hidden
    elif modes.ffn == "bytes":
        hidden = bytes_ffn(source, first, None, None)
    else:
        hidden = frozen_ffn(source, first, SecondLayer(None, None, None, None, None))
    return _end(_behind(layers, hidden, context if apart else None, each), context, placement, each)


def _behind(layers: FfnLayers, hidden: Tensor, context: ContextBroadcast | None, each: Each) -> Tensor:
    """Continue behind the hidden layer (..., F), of which only the x_hat of a norm is kept."""
    fold = None
    if layers.norm is not None:
        hidden = normalise(hidden, norm_form(layers.norm), hidden.dtype)
        fold = folded(layers.norm, (layers.second,), hidden.dtype) if context is None else None
        hidden = hidden if fold is not None else affine(hidden, *affine_of(layers.norm))
    (w,), b = fold or _weights(layers.second, hidden)
    return F.linear(hidden if context is None else each(context, hidden), w, b)


def _end(y: Tensor, context: ContextBroadcast | None, placement: str | None, each: Each) -> Tensor:
    return each(context, y) if context is not None and placement == "end" else y


def _weights(layer: Any, like: Tensor) -> Folded:
    """Return weight and bias in the type of the tokens: under autocast theirs is another."""
    return (layer.weight.to(like.dtype),), None if layer.bias is None else layer.bias.to(like.dtype)


def _first(layers: FfnLayers, like: Tensor) -> Folded:
    """Return the weights of the first layer, gate and value apart, and their bias, gate first."""
    found = [_weights(layer, like) for layer in layers.first]
    w, b = tuple(one for (one,), _ in found), [b for _, b in found]
    if layers.rows is not None:
        w, b = tuple(w[0][rows] for rows in layers.rows), [None if b[0] is None else b[0][rows] for rows in layers.rows]
    if len(w) == 1 or all(one is None for one in b):
        return w, b[0]
    return w, torch.cat([v.new_zeros(len(v)) if one is None else one for v, one in zip(w, b, strict=True)])


def _second(layers: FfnLayers, like: Tensor) -> SecondLayer:
    if layers.norm is None:
        (w,), b = _weights(layers.second, like)
        return SecondLayer(None, None, None, w, b)
    fold = folded(layers.norm, (layers.second,), like.dtype)
    (w,), b = fold or _weights(layers.second, like)
    return SecondLayer(norm_form(layers.norm), *((None, None) if fold else affine_of(layers.norm)), w, b)

"""The affine part of a frozen norm folded into the frozen layer behind it, once for all steps.

    (x_hat ⊙ γ + β) · wᵀ + b = x_hat · (w ⊙ γ)ᵀ + (b + w β)

Two passes over the tokens are spared, or three where the layer is computed again. What is folded lies beside the model,
which keeps its weights: they are what is evaluated and packed.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from vtk.training.frozen_ffn.parts import affine_of

_Key = tuple[Any, ...]
Folded = tuple[tuple[Tensor, ...], Tensor | None]

_FOLDED: "weakref.WeakKeyDictionary[nn.Module, tuple[_Key, Folded]]" = weakref.WeakKeyDictionary()


def folded(
    norm: Any, layers: Sequence[Any], dtype: torch.dtype, rows: Sequence[slice] | None = None
) -> Folded | None:  # fmt: skip
    """Return weights (Fᵢ, C), one behind the other in memory, and the bias (ΣF) of layers with a norm's affine part.

    They are made anew where one of the tensors has been moved or written to.

    Args:
        norm: LayerNorm or RMSNorm.
        layers: linear layers side by side; None is returned where they or the norm are trained, to apply γ and β.
        dtype: of the result; products and sums are in fp32 or wider.
        rows: of the one layer, in the order of the result, one weight for each; None for all.
    """
    affine = affine_of(norm)
    given = (*affine, *(t for layer in layers for t in (layer.weight, layer.bias)))
    if torch.compiler.is_compiling() or any(t is not None and t.requires_grad for t in given):
        return None
    first = layers[0]
    if isinstance(first.weight, FakeTensor):  # counted with what a pass keeps whatever the number of images
        return _fold(*affine, layers, dtype, rows)
    try:
        key = (dtype, *(None if t is None else (t.data_ptr(), t._version, t.dtype, t.device) for t in given))
    except RuntimeError:  # a tensor of functorch's, or of inference mode
        return None
    found = _FOLDED.get(first)
    if found is None or found[0] != key:
        found = _FOLDED[first] = key, _fold(*affine, layers, dtype, rows)
    return found[1]


def forget(model: nn.Module) -> None:
    """Let go of what was folded for the layers of ``model``."""
    for module in model.modules():
        _FOLDED.pop(module, None)


@torch.no_grad()
def _fold(
    gamma: Tensor | None, beta: Tensor | None, layers: Sequence[Any], dtype: torch.dtype, rows: Sequence[slice] | None
) -> Folded:
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    if rows is not None:
        weights, biases = ([None if t[0] is None else t[0][part] for part in rows] for t in (weights, biases))
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    found, added = [], []
    for w, b in zip(weights, biases, strict=True):
        bias = None if b is None else b.to(wide)
        if beta is not None:
            more = (w.to(wide) * beta.to(wide)).sum(1)  # no matrix product, which could be TF32
            bias = more if bias is None else bias + more
        found.append((w if gamma is None else w.to(wide) * gamma.to(wide)).to(dtype))
        added.append(bias)
    sizes = [len(w) for w in found]
    whole = torch.cat(found) if len(found) > 1 else found[0]
    if all(b is None for b in added):
        return whole.split(sizes), None
    parts = [w.new_zeros(len(w), dtype=wide) if b is None else b for w, b in zip(found, added, strict=True)]
    return whole.split(sizes), torch.cat(parts).to(dtype)

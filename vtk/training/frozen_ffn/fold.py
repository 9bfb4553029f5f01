"""The affine part of a frozen norm folded into the frozen layer behind it, once for all steps.

    (x_hat ⊙ γ + β) · wᵀ + b = x_hat · (w ⊙ γ)ᵀ + (b + w β)

Two passes over the tokens are spared, or three where the layer is computed again. What is folded lies beside the model,
which keeps its weights: they are what is evaluated and packed.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_Key = tuple[Any, ...]

_FOLDED: "weakref.WeakKeyDictionary[nn.Module, tuple[_Key, Tensor, Tensor | None]]" = weakref.WeakKeyDictionary()


def folded(norm: Any, layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
    """Return weight (F, C) and bias (F) of ``layer`` with the affine part of ``norm`` before it; None to apply it.

    They are made anew where one of the four tensors has been moved or written to.

    Args:
        norm: LayerNorm.
        layer: linear layer; neither is trained, or None is returned.
        dtype: of the result; products and sums are in fp32 or wider.
    """
    given = (norm.weight, norm.bias, layer.weight, layer.bias)
    if torch.compiler.is_compiling() or any(t is not None and t.requires_grad for t in given):
        return None
    if isinstance(layer.weight, FakeTensor):  # counted with what a pass keeps whatever the number of images
        return _fold(*given, dtype)
    try:
        key = (dtype, *(None if t is None else (t.data_ptr(), t._version, t.dtype, t.device) for t in given))
    except RuntimeError:  # a tensor of functorch's, or of inference mode
        return None
    found = _FOLDED.get(layer)
    if found is None or found[0] != key:
        found = _FOLDED[layer] = key, *_fold(*given, dtype)
    return found[1:]


def forget(model: nn.Module) -> None:
    """Let go of what was folded for the layers of ``model``."""
    for module in model.modules():
        _FOLDED.pop(module, None)


@torch.no_grad()
def _fold(
    gamma: Tensor | None, beta: Tensor | None, w: Tensor, b: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    wide = torch.promote_types(w.dtype, torch.float32)
    bias = None if b is None else b.to(wide)
    if beta is not None:
        added = (w.to(wide) * beta.to(wide)).sum(1)  # no matrix product, which could be TF32
        bias = added if bias is None else bias + added
    weight = w if gamma is None else w.to(wide) * gamma.to(wide)
    return weight.to(dtype), None if bias is None else bias.to(dtype)

"""Linear layers with PEFT's LoRA factors beside them (Hu et al., 2021), behind a norm whose affine part is frozen.

    y = h · Wᵀ + b + (h · Aᵀ) · Bᵀ · α / r,    h = x_hat ⊙ γ + β

W is frozen and wants nothing kept; A's gradient wants h, which is one multiplication and addition away from x_hat.
"""

from typing import Any, NamedTuple

from torch import nn


class Factors(NamedTuple):
    """Parts of a layer: W and b, A, B, and α / r."""

    base: nn.Linear
    a: nn.Linear
    b: nn.Linear
    scaling: float


def is_lora(layer: Any) -> bool:
    """Tell whether ``layer`` is PEFT's, around a plain linear layer."""
    kind = type(layer)
    known = (kind.__module__, kind.__qualname__) == ("peft.tuners.lora.layer", "Linear")
    return known and type(layer.base_layer) is nn.Linear


def factors_of(layer: Any) -> Factors | None:
    """Return the parts of a layer that computes just the formula above, now; else None, and it must be called."""
    active = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(active) != 1 or active[0] not in layer.lora_A:
        return None
    name = active[0]
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = type(a) is nn.Linear and type(b) is nn.Linear and a.bias is None and b.bias is None
    if not plain or layer.lora_variant or (getattr(dropout, "p", 0.0) > 0 and dropout.training):
        return None
    return Factors(layer.base_layer, a, b, float(layer.scaling[name]))

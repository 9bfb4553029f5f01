"""Triton kernels for Vision Transformers: usable alone, with torch and nothing else of this toolkit.

Each operation is a module and a function of one name: ``from vtk_kernels.add_norm import add_norm``. Beside it stands
its reference in plain torch (``add_norm_ref``), which it takes by itself where no kernel can run. ``LAUNCHES`` says how
many kernels a call starts on CUDA. Importing this package asks nothing of Triton or of a device.

    norm, add_norm               LayerNorm or RMSNorm without affine part; with the residual before it
    context_broadcast            residual and the mean of all tokens (Context Broadcasting)
    linear, linear_residual      linear layer behind a folded norm, and with the residual in front of one
    linear_gelu                  linear layer and GELU; `linear_gelu_backward` its gradient from 8 bits
    linear_swiglu                gated linear layer; `linear_swiglu_backward` its gradient from 8 bits
    packed_attention             attention over one packed matrix of queries, keys and values; also with rotary
                                 embedding, norms of heads, fewer heads of keys and values, and an additive bias
    grouped_linear               a linear layer per group of rows; `grouped_low_rank` a low-rank change of one,
                                 `low_rank_linear` both in one product
    splitk_linear                a product in slices, for few rows
    quantize_rows, add_norm_e4m3 rows in eight bits with a scale each, also behind GELU; residual, norm and that
    patchify                     images as rows of patches: a patch embedding is one product behind it;
                                 `patchify_counters` also zeroes counters for products that finish themselves
"""

import importlib
from typing import Any

_WHERE = {
    "LAUNCHES": "launches",
    "MIN_CAPABILITY": "support",
    "TritonStatus": "support",
    "choose": "choices",
    "triton_status": "support",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__

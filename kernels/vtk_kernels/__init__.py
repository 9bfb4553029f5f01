"""Triton kernels for Vision Transformers: usable alone, with torch and nothing else of this toolkit.

Every operation has a reference in plain torch beside it (``NAME_ref``), and takes it by itself where no kernel can run.
``LAUNCHES`` says how many kernels a call starts on CUDA. Nothing is imported or asked of a device before its first use.
"""

import importlib
from typing import Any

_WHERE = {
    "LAUNCHES": "_dispatch",
    "MIN_CAPABILITY": "support",
    "TritonStatus": "support",
    "add_norm": "add_norm",
    "choose": "choices",
    "context_broadcast": "context_broadcast",
    "grouped_linear": "grouped_linear",
    "linear_gelu": "linear_gelu",
    "linear_gelu_backward": "linear_gelu",
    "make_tile_map": "grouped_linear",
    "norm": "norm",
    "packed_attention": "packed_attention",
    "splitk_linear": "splitk_linear",
    "triton_status": "support",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__

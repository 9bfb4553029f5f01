"""Table of kernels per operation: importing this module imports every operation, and each registers itself."""

import importlib

from vtk_kernels._dispatch import LAUNCHES

OPERATIONS = (
    "add_norm", "add_norm_e4m3", "context_broadcast", "grouped_linear", "grouped_low_rank", "linear",
    "linear_gelu", "linear_gelu_backward", "linear_residual", "linear_swiglu", "linear_swiglu_backward",
    "low_rank_linear", "norm", "packed_attention", "patchify", "patchify_counters", "quantize_rows", "splitk_linear",
)  # fmt: skip
"""Names of modules, and of the function in each."""

__all__ = ["LAUNCHES", "OPERATIONS"]

for _name in OPERATIONS:
    importlib.import_module(f"vtk_kernels.{_name}")

"""Triton kernels for Vision Transformers: usable alone, with torch and nothing else of this toolkit.

This version holds no kernel yet, only the question that comes before each of them: can Triton run here?
"""

from vtk_kernels.support import MIN_CAPABILITY, TritonStatus, triton_status

__all__ = ["MIN_CAPABILITY", "TritonStatus", "triton_status"]

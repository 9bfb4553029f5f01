"""Runs ONNX files with ONNX Runtime's TensorRT provider, which builds an engine at the first run of a batch size."""

import os
from typing import Any, Self

import torch

from vtk.runtime.backends.ort_backend import OrtCudaBackend
from vtk.runtime.source import Source

NO_TF32 = "NVIDIA_TF32_OVERRIDE"
"""Environment variable of NVIDIA's libraries; ``0`` disables TF32.

The CUDA provider has an option ``use_tf32``, the TensorRT provider has none (microsoft/onnxruntime issue 26029).
Libraries read the variable once, and it only ever takes TF32 away, so it stays set; outputs in TF32 would not pass the
bound of fp32.
"""


class OrtTrtBackend(OrtCudaBackend):
    """ONNX Runtime with TensorRT; CUDA runs the nodes that TensorRT does not. Inputs and outputs stay on the device.

    An engine fits the sizes it was run with: the first run of a larger batch builds another one, which takes minutes.

    Attributes:
        compiles: its first run of a size is a build.
    """

    name = "ort-trt"
    execution_provider = "TensorrtExecutionProvider"
    compiles = True

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Load as `OrtCpuBackend` does; products of an fp32 file are not rounded to TF32."""
        if dtype == torch.float32:
            os.environ[NO_TF32] = "0"
        return super().load(source, device=device, dtype=dtype, threads=threads, **options)

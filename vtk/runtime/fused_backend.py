"""The folded and merged model (`vtk.fused`), as it comes (``fused``) or replayed as CUDA graphs (``fused+graph``)."""

from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import UnavailableError, UsageError
from vtk.fused import Fp8ViT, FusedViT, fuse
from vtk.runtime.fp8 import calibrate
from vtk.runtime.given import Given
from vtk.runtime.torch_backend import EagerBackend


class FusedBackend(EagerBackend):
    """`vtk.fused.fuse` of a Vision Transformer: fewer, wider kernels; Triton operations on CUDA in fp16 and bf16."""

    name = "fused"
    options: tuple[str, ...] = ("given",)

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, **fp8: Given | None) -> None:
        self.arithmetic = "fp8" if fp8 else ""
        self.simulated = bool(fp8) and device.type == "cpu"
        super().__init__(self._in_fp8(model, device, **fp8) if fp8 else self._build(model, dtype), device, dtype)

    @property
    def provider(self) -> str:
        """``torch cpu``, or ``triton cuda (NAME)`` where kernels run."""
        kernels = self.device.type == "cuda" and self.dtype != torch.float32
        what = ", fp8 simulated" if self.simulated else ", fp8" if self.arithmetic else ""
        return f"{'triton' if kernels else 'torch'} {self._where()}{what}"

    def _in_fp8(self, model: nn.Module, device: torch.device, given: Given | None) -> Fp8ViT:
        if given is None:
            raise UsageError("fp8 is calibrated on training images and judged on held-out ones; give --data FOLDER")
        return calibrate(model, device, given)

    def _build(self, model: nn.Module, dtype: torch.dtype) -> FusedViT:
        # folded before it is moved and rounded: once, from the weights as they are stored
        return fuse(model, dtype, keep_source=False)


class GraphBackend(FusedBackend):
    """The same, one CUDA graph per batch size; the first run of a size captures it."""

    name = "fused+graph"

    @classmethod
    def check(cls) -> None:
        """Refuse to work without CUDA, whose graphs these are."""
        if not torch.cuda.is_available():
            raise UnavailableError("`fused+graph` replays CUDA graphs and torch sees no CUDA device here; use fused")

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, **fp8: Given | None) -> None:
        if device.type != "cuda":
            raise UnavailableError(f"`fused+graph` replays CUDA graphs; on {device} use fused")
        super().__init__(model, device, dtype, **fp8)

    @property
    def provider(self) -> str:
        """As of `FusedBackend`, with the graph named."""
        return f"{super().provider}, graph"

    def reset(self) -> None:
        """Drop the captured graphs and their memory before the next batch size."""
        self._model().drop_graphs()

    def _forward(self, images: Tensor) -> Tensor:
        model = self._model()
        model.capture([len(images)], (images.shape[2], images.shape[3]))
        logits: Tensor = model(images)
        return logits

    def _model(self) -> Any:
        return self.model

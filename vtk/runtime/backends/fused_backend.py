"""Runs the fused model (`vtk.fused`): on CUDA as CUDA graphs, or kernel by kernel (``fused+nograph``)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.errors import UnavailableError, UsageError
from vtk.fused import Fp8ViT, FusedViT, fuse
from vtk.fused.stages import check_choices
from vtk.runtime.backends.torch_backend import EagerBackend
from vtk.runtime.data_option import DataImages
from vtk.runtime.fp8_gate import calibrate


class FusedBackend(EagerBackend):
    """`vtk.fused.fuse` of a Vision Transformer: fewer, wider kernels; Triton operations on CUDA in fp16 and bf16.

    On CUDA the first run of a batch size captures a graph, which the others replay. Images on the host are copied
    through pinned memory.
    """

    name = "fused"
    options: tuple[str, ...] = ("given",)
    graphs = True

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, **fp8: DataImages | None) -> None:
        self.arithmetic = "fp8" if fp8 else ""
        self.simulated = bool(fp8) and device.type == "cpu"
        built = self._in_fp8(model, device, **fp8) if fp8 else self._build(model, dtype)
        super().__init__(built, device, dtype)
        self.graphed = self.graphs and device.type == "cuda"
        if self.graphed:
            self.reset = self._drop  # of no use where nothing is captured
            self._model()._graph_cache.notice = note_graph

    @property
    def provider(self) -> str:
        """``torch cpu``, or ``triton cuda (NAME), graph`` if kernels run as CUDA graphs."""
        kernels = self.device.type == "cuda" and self.dtype != torch.float32
        what = ", fp8 simulated" if self.simulated else ", fp8" if self.arithmetic else ""
        return f"{'triton' if kernels else 'torch'} {self._place()}{what}{', graph' if self.graphed else ''}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes)."""
        images = inputs["pixel_values"]
        if not self.graphed or not images.is_floating_point():
            return super().run(inputs)
        with torch.inference_mode():
            return {"logits": self._forward(images.to(self.device) if images.is_cuda else images)}

    def _in_fp8(self, model: nn.Module, device: torch.device, given: DataImages | None) -> Fp8ViT:
        if given is None:
            raise UsageError("fp8 is calibrated on training images and judged on held-out ones; give --data FOLDER")
        fp8 = calibrate(model, device, given)
        fp8.graphs = self.graphs
        return fp8

    def _build(self, model: nn.Module, dtype: torch.dtype) -> FusedViT:
        check_choices()
        # folded before it is moved and rounded: once, from the weights as they are stored
        return fuse(model, dtype, keep_source=False, graphs=self.graphs)

    def _model(self) -> Any:
        return self.model

    def _drop(self) -> None:
        """Drop the captured graphs and their memory before the next batch size."""
        self._model().drop_graphs()


class GraphBackend(FusedBackend):
    """The fused model with CUDA graphs for every batch size, also above 256; a batch that cannot be captured fails."""

    name = "fused+graph"

    @classmethod
    def check(cls) -> None:
        """Refuse to work without CUDA, whose graphs these are."""
        if not torch.cuda.is_available():
            raise UnavailableError("`fused+graph` replays CUDA graphs and torch sees no CUDA device here; use fused")

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, **fp8: DataImages | None) -> None:
        if device.type != "cuda":
            raise UnavailableError(f"`fused+graph` replays CUDA graphs; on {device} use fused")
        super().__init__(model, device, dtype, **fp8)

    def _forward(self, images: Tensor) -> Tensor:
        model = self._model()
        model.capture([len(images)], (images.shape[2], images.shape[3]))
        logits: Tensor = model(images)
        return logits


class NoGraphBackend(FusedBackend):
    """The fused model without CUDA graphs: every kernel is launched separately."""

    name = "fused+nograph"
    graphs = False


def note_graph(what: str, nbytes: int) -> None:
    """Print that a CUDA graph was captured, and its memory."""
    console.note(f"{what}: {console.size(nbytes)} on the device")

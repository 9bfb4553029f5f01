"""Base class of inference modules replayed as CUDA graphs, which drops graphs that are out of date."""

import abc
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.capture import capturing
from vtk.fused.captured_batch import ModelGraph
from vtk.fused.graph_cache import GraphCache
from vtk.fused.onednn_prepack import forget
from vtk.fused.tuning_store import load_for


class Graphed(nn.Module, abc.ABC):
    """Maps images to logits, by `compute` or by a graph of it.

    Attributes:
        graphs: whether batches of up to 256 images are captured at their first call and replayed, on CUDA.
        ln_folded: the form of `compute`; each has graphs of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs = True
        self.ln_folded: bool | None = None
        self._graph_cache = GraphCache()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, chans, height, width), any floating type, to logits (B, classes) in the model's type.

        Images on the host are copied to a model on CUDA by way of pinned memory, without waiting for the copy.
        """
        self.prepare(images)
        sent = not images.is_cuda and images.device.type == "cpu" and self.device.type == "cuda"
        if self._graph_cache.takes(images, on_demand=self.graphs, device=self.device if sent else None):
            return self._replay(images)
        return self.compute(images.to(self.device) if sent else images)

    def prepare(self, images: Tensor) -> None:
        """Make what depends on the size of the images alone, and which graphs only read."""

    @abc.abstractmethod
    def compute(self, images: Tensor) -> Tensor:
        """Run without a graph."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and logits."""
        return self._weight().dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weight().device

    @property
    @abc.abstractmethod
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""

    @property
    @abc.abstractmethod
    def in_chans(self) -> int:
        """Channels of an image."""

    def capture(self, batch_sizes: Sequence[int], size: tuple[int, int] | None = None, *, tune: bool = False) -> None:
        """Record a CUDA graph for each of these batch sizes, also above 256, unless there is one already; it stays.

        Args:
            batch_sizes: images per call.
            size: height and width in pixels, by default the model's own.
            tune: measure first which implementations are the quickest here, for at most a minute in all, and say what
                that gained; what was measured is kept for this card and these versions (`vtk.fused.tuning_store`).

        Raises:
            UsageError: the model is not on a CUDA device; or to be tuned and not in fp16 or bf16.
            UnavailableError: it has an operation that cannot be captured.
        """
        if tune:
            self._tune(batch_sizes, size)
        for batch in batch_sizes:
            images = self._blank(batch, size)
            self._graph_cache.keep(images.shape)
            if not self._graph_cache.has(images.shape):
                with capturing(f"batch {batch}"):
                    self._replay(images, must=True)

    def graph(self, batch: int, size: tuple[int, int] | None = None) -> ModelGraph:
        """Capture a batch size for one caller, who fills ``graph.input`` and starts it with one launch a call.

        Args:
            batch: images per call.
            size: height and width in pixels, by default the model's own.

        Raises:
            UsageError: the model is not on a CUDA device.
            UnavailableError: it has an operation that cannot be captured.
        """
        return ModelGraph(self._graph_cache, self.compute, self._blank(batch, size), self)

    @property
    def graph_bytes(self) -> int:
        """Device memory of all graphs: their common pool, and the static inputs."""
        return self._graph_cache.nbytes

    def drop_graphs(self) -> None:
        """Forget every captured graph and give its memory back."""
        self._graph_cache.clear()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights of this structure as torch does."""
        self._graph_cache.clear()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._graph_cache.clear()  # graphs read the weights at their old addresses
        forget(self)
        moved = super()._apply(fn, recurse)
        load_for(self.device)
        return moved

    def _replay(self, images: Tensor, *, must: bool = False) -> Tensor:
        like, form = self._weight(), self.ln_folded
        return self._graph_cache.run(self.compute, images, form=form, like=like, module=self, must=must)

    @abc.abstractmethod
    def _tune(self, batch_sizes: Sequence[int], size: tuple[int, int] | None) -> None:
        """Tune the choices of these batch sizes."""

    @abc.abstractmethod
    def _weight(self) -> Tensor:
        """Return a tensor of the type and on the device of the images."""

    def _blank(self, batch: int, size: tuple[int, int] | None) -> Tensor:
        if self.device.type != "cuda":
            raise UsageError(f"CUDA graphs need a model on a CUDA device; this one is on {self.device}")
        if batch < 1:
            raise UsageError(f"a graph of batch {batch} is of nothing; give 1 or more")
        height, width = size or self.image_size
        images = torch.zeros(batch, self.in_chans, height, width, dtype=self.dtype, device=self.device)
        self.prepare(images)
        return images

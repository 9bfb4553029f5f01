"""A CUDA graph for one batch size and one caller: a static input to fill, and one launch a call."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.capture import capturing
from vtk.fused.graph_cache import GraphCache


class ModelGraph:
    """One graph with an input and an output of its own; `FusedViT.graph` makes it.

    A call without images starts one launch: fill ``input`` before, in place and on the stream of the call. Calls of all
    graphs of a model take turns, also from several threads, but ``input`` is the one caller's: threads take a graph
    each.

    Attributes:
        input: (B, chans, height, width) of the model's type, on its device; what is in it is what the next call reads.
        nbytes: device memory of it and of what the capture added to the graphs' common pool.
    """

    def __init__(self, cache: GraphCache, function: Callable[[Tensor], Tensor], input: Tensor, module: nn.Module):
        self._cache, self._where = cache, f"batch {len(input)} at {input.shape[2]} × {input.shape[3]} px"
        with cache.turn(input.device):
            if not cache.follow(module):
                raise UsageError("parts of the model have forward hooks or want a gradient, which a graph passes by")
            with capturing(self._where):
                self._captured = cache.capture(function, input, input)
            self._generation = cache.generation
        self.input, self.nbytes = self._captured.static_in, self._captured.nbytes

    def __call__(self, images: Tensor | None = None, *, copy: bool = True) -> Tensor:
        """Return the logits (B, classes) of ``input``.

        Args:
            images: (B, chans, height, width), any floating type, to be copied into ``input`` first: from the device, or
                from the host by way of pinned memory, without waiting. None where ``input`` is filled already.
            copy: False for the graph's own output, without a copy: valid until the model's next call, of this graph or
                any other, and for one caller only.

        Raises:
            UsageError: images of another shape or type, sparse or wanting a gradient; or the model's weights have moved
                or were exchanged since.
        """
        cache, captured = self._cache, self._captured
        if images is not None:
            self._check(images)
        with cache.turn(self.input.device):
            if self._generation != cache.generation:
                raise self._outdated()
            if images is not None:
                cache.fill(captured.static_in, images)
            captured.graph.replay()
            out = captured.static_out.clone() if copy else captured.static_out
            if captured.static_in.is_cuda:  # of the stream of its capture, whose memory it goes back to
                captured.static_in.record_stream(torch.cuda.current_stream())
            if not cache.current():
                raise self._outdated()
        return out

    def _check(self, images: Tensor) -> None:
        wanted = tuple(self.input.shape)
        if not isinstance(images, Tensor):
            raise UsageError(f"`images` are a {type(images).__name__}; give a tensor of shape {wanted}")
        if tuple(images.shape) != wanted:
            raise UsageError(f"`images` are {tuple(images.shape)}; this graph is of {wanted}: capture another one")
        if not images.is_floating_point():
            raise UsageError(f"`images` are {images.dtype}; give normalised images of a floating type")
        if images.layout != torch.strided:
            raise UsageError(f"`images` are {images.layout}; give a dense tensor")
        if images.requires_grad and torch.is_grad_enabled():
            raise UsageError("`images` want a gradient, which a graph has not; call the model, or detach them")
        if images.device.type != "cpu" and images.device != self.input.device:
            raise UsageError(f"`images` are on {images.device}; this graph is on {self.input.device}, or takes cpu")

    def _outdated(self) -> UsageError:
        return UsageError(
            f"the graph of {self._where} is out of date: the model's weights have moved or were exchanged, or hooks or "
            "gradients are wanted; make another one with `graph`"
        )

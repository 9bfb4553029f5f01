"""CUDA graphs of a model, one per shape of its input: a replay starts every kernel with one call."""

import contextlib
import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ON_DEMAND = 256
"""Largest batch captured without being asked.

On a host whose launches cost 100 µs a kernel a ViT-S of 36 blocks took 27 ms at batch 64 without a graph and 6.6 with
one (H200); at 256 the kernels hide the launches, and a graph costs nothing but the memory of its input and output.
"""


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    static_in: Tensor
    static_out: Tensor


class GraphCache:
    """Captured forward passes, least recently used first; their intermediate memory is one shared pool.

    Inputs are copied into static tensors and outputs copied out, so a result stays valid after the next call. One lock
    and one event per cache: threads and streams take turns, since all graphs write to the same memory.

    Args:
        max_graphs: captured on demand; shapes named by `keep` come on top and stay.
    """

    def __init__(self, max_graphs: int = 8) -> None:
        self.max_graphs = max_graphs
        self._graphs: OrderedDict[tuple[int, ...], _Graph] = OrderedDict()
        self._kept: set[tuple[int, ...]] = set()
        self._pool: Any = None
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None  # the last replay's end

    def __reduce__(self) -> tuple[type["GraphCache"], tuple[int]]:
        """Copy and pickle as an empty cache: a graph belongs to the tensors and the process it was made in."""
        return GraphCache, (self.max_graphs,)

    def __len__(self) -> int:
        return len(self._graphs)

    def takes(self, images: Tensor, *, on_demand: bool) -> bool:
        """Return whether this input runs as a graph: a plain CUDA tensor of a fitting size, not traced, no gradient."""
        if type(images) is not Tensor or not images.is_cuda:
            return False
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and images.requires_grad):
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        shape = tuple(images.shape)
        return shape in self._kept or (on_demand and 0 < shape[0] <= ON_DEMAND)

    def has(self, shape: torch.Size) -> bool:
        """Return whether this shape is captured."""
        return tuple(shape) in self._graphs

    def keep(self, shape: torch.Size) -> None:
        """Run this shape as a graph from now on, and never drop it."""
        self._kept.add(tuple(shape))

    def run(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Return ``function(images)``, captured at the first call of a shape and replayed later."""
        with self._turn(images.device):
            entry = self._graphs.get(tuple(images.shape))
            if entry is None:
                entry = self._capture(function, images)
            self._graphs.move_to_end(tuple(images.shape))
            entry.static_in.copy_(images)
            entry.graph.replay()
            return entry.static_out.clone()

    def clear(self) -> None:
        """Drop every graph, for instance because the weights move, and what `keep` named."""
        with self._lock:
            self._graphs.clear()
            self._kept.clear()
            self._pool = self._done = None

    @contextlib.contextmanager
    def _turn(self, device: torch.device) -> Iterator[None]:
        """Wait for the other threads, and let the stream wait for what other streams have been given to do here."""
        with self._lock, torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self._done is not None:
                stream.wait_event(self._done)
            yield
            self._done = self._done or torch.cuda.Event()
            self._done.record(stream)

    def _capture(self, function: Callable[[Tensor], Tensor], images: Tensor) -> _Graph:
        shape = tuple(images.shape)
        spare = [key for key in self._graphs if key not in self._kept]
        if shape not in self._kept and len(spare) >= self.max_graphs:
            del self._graphs[spare[0]]  # the pool stays: the next graph takes its memory
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # a tensor made in inference mode could only be written there
            static_in = images.clone()  # outside the pool: other graphs must not write here
            graph, static_out = self._record(function, static_in)
        self._graphs[shape] = entry = _Graph(graph, static_in, static_out)
        return entry

    def _record(self, function: Callable[[Tensor], Tensor], static_in: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture ``function(static_in)``; return the graph and the tensor its replays write to."""
        side = torch.cuda.Stream(static_in.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels compile and libraries allocate their workspaces before the capture
                function(static_in)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        with no_collection():
            # thread_local: another thread may allocate meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                static_out = function(static_in)
        self._pool = self._pool or graph.pool()
        return graph, static_out


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector away: freeing another graph, or a tensor of another stream, would break a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()

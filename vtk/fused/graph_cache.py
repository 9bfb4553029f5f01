"""CUDA graphs of a model, one per shape of its input: a replay starts every kernel with one call."""

import contextlib
import math
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vtk.fused.addresses import Addresses
from vtk.fused.admission import Patience, admitted, modes
from vtk.fused.capture import Captured, Function, Recorder, first_error, no_collection
from vtk.fused.ring import PinnedRing

__all__ = ["MAX_GRAPHS", "ON_DEMAND", "Captured", "GraphCache", "no_collection"]

ON_DEMAND = 256
"""Largest batch captured without being asked.

On a host whose launches cost 100 µs a kernel a ViT-S of 36 blocks took 27 ms at batch 64 without a graph and 6.6 with
one (H200); at 256 the kernels hide the launches, and a graph costs nothing but the memory of its input and output.
"""
MAX_GRAPHS = 8

Key = tuple[tuple[int, ...], Hashable]
Made = TypeVar("Made")


class GraphCache(Recorder):
    """Captured forward passes, least recently used first; their intermediate memory is one shared pool.

    Inputs are copied into static tensors and outputs copied out, so a result stays valid after the next call. One lock
    and one event per cache: threads and streams take turns, since all graphs write to the same memory.

    Where a capture fails, with too little memory or an operation that no graph can hold, the function runs plainly, and
    a warning says so once.

    Args:
        max_graphs: captured on demand; shapes named by `keep` come on top and stay.
    """

    def __init__(self, max_graphs: int = MAX_GRAPHS) -> None:
        super().__init__()
        self.max_graphs = max_graphs
        self.generation = 0  # another number whenever graphs are out of date
        self._graphs: OrderedDict[Key, Captured] = OrderedDict()
        self._kept: set[tuple[int, ...]] = set()
        self._patience = Patience()
        self._warned = False
        self._addresses: Addresses | None = None
        self.ring = PinnedRing()
        self._lock = threading.RLock()
        self._done: torch.cuda.Event | None = None  # the last replay's end
        self._last: Any = None  # its stream

    def __reduce__(self) -> tuple[type["GraphCache"], tuple[int]]:
        """Copy and pickle as an empty cache: a graph belongs to the tensors and the process it was made in."""
        return GraphCache, (self.max_graphs,)

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and of all static inputs."""
        with self._lock:
            return self.pool_bytes() + sum(entry.static_in.nbytes for entry in self.alive)

    def takes(self, images: Tensor, *, on_demand: bool, device: torch.device | None = None) -> bool:
        """Return whether this input runs as a graph: a plain CUDA tensor of a fitting size, not traced, no gradient.

        Args:
            images: the input.
            on_demand: whether shapes are taken that `keep` does not name.
            device: of the model, where images on the host are to be taken too.
        """
        if not admitted(images, device):
            return False
        shape = tuple(images.shape)
        return shape in self._kept or (on_demand and 0 < shape[0] <= ON_DEMAND)

    def has(self, shape: torch.Size) -> bool:
        """Return whether this shape is captured."""
        return any(key[0] == tuple(shape) for key in self._graphs)

    def keep(self, shape: torch.Size) -> None:
        """Run this shape as a graph from now on, and never drop it."""
        self._kept.add(tuple(shape))

    def run(
        self,
        function: Function,
        images: Tensor,
        *,
        form: Hashable = None,
        like: Tensor | None = None,
        module: nn.Module | None = None,
        must: bool = False,
    ) -> Tensor:
        """Return ``function(images)``, captured at the first call of a shape and replayed later.

        Args:
            function: from a tensor of the shape of ``images`` to one.
            images: on the device, or on the host; cast in the copy.
            form: of the function's work beside the shape; each has a graph of its own.
            like: of the type and on the device that the function takes; by default as ``images``.
            module: whose tensors the function reads, to drop graphs where one was exchanged.
            must: raise where the capture fails.
        """
        like = images if like is None else like
        key = tuple(images.shape), (form, modes(like.dtype))
        with self.turn(like.device):
            entry = self._graphs.get(key)
            if entry is None and (must or not self._patience.waits(key)) and (module is None or self.follow(module)):
                make = partial(self._capture, function, images, like, key)
                plain = partial(_plain, function, images, like)
                entry = make() if must else self.attempt(key, f"batch {len(images)}", make, plain)
            if entry is not None:
                self._graphs.move_to_end(key)
                self.fill(entry.static_in, images)
                entry.graph.replay()
                out = entry.static_out.clone()
                if self.current():  # looked at while the device works: it takes longer than a launch
                    return out
        return _plain(function, images, like)

    def current(self) -> bool:
        """Return whether what was just replayed is what the function gives now; drop graphs that are out of date."""
        if self._addresses is None:
            return True
        if not self._addresses.hold():
            self.expire()
            return False
        return not self._addresses.watched()

    def clear(self) -> None:
        """Drop every graph, for instance because the weights move, and what `keep` named."""
        with self._lock:
            self.expire()
            self._kept.clear()

    def expire(self) -> None:
        """Drop every graph; what `keep` named is captured again at its next call."""
        with self._lock:
            while self._graphs:
                self._let_go(self._graphs.popitem()[1])
            self._patience.clear()
            self.generation += 1
            self._pool = self._addresses = None

    def fill(self, static_in: Tensor, images: Tensor) -> None:
        """Copy images into a graph's input, from the host by way of pinned memory. Inside a turn."""
        if images.is_cuda or not static_in.is_cuda:
            static_in.copy_(images)
        else:
            self.ring.send([images], static_in)

    @contextlib.contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Wait for the other threads, and let the stream wait for what other streams have been given to do here."""
        with self._lock, torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self._done is not None and stream != self._last:
                stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done, self._last = self._done or torch.cuda.Event(), stream
                self._done.record(stream)

    def attempt(self, key: Hashable, what: str, make: Callable[[], Made], plain: Callable[[], object]) -> Made | None:
        """Capture; None where that fails, though the same without a graph runs. Inside a turn.

        Args:
            key: of the graph.
            what: it is of, for the warning.
            make: captures.
            plain: does the work once without a graph.
        """
        outside = sys.exception()
        try:
            return make()
        except Exception as error:
            reason = first_error(error, outside)
        full = isinstance(reason, torch.OutOfMemoryError)
        if full:  # the call needs the memory more
            self.expire()
            torch.cuda.empty_cache()
        with torch.no_grad():
            try:
                plain()
            except Exception:  # the call itself is wrong: its own error is what the caller is to see
                return None
        self._patience.failed(key, *(() if full else (math.inf,)))
        if not self._warned:
            self._warned = True
            text = " ".join(str(reason).split())[:200]
            warnings.warn(
                f"{what} runs without a CUDA graph: {type(reason).__name__}: {text}; with `graphs` off it is not tried",
                RuntimeWarning,
                stacklevel=6,
            )
        return None

    def follow(self, module: nn.Module) -> bool:
        """Note where the tensors of a module are, before a capture; return False where hooks or autograd look on."""
        if self._addresses is not None and not self._addresses.hold():
            self.expire()
        self._addresses = self._addresses or Addresses(module)
        return not self._addresses.watched()

    def _capture(self, function: Function, images: Tensor, like: Tensor, key: Key) -> Captured:
        spare = [known for known in self._graphs if known[0] not in self._kept]
        if key[0] not in self._kept and len(spare) >= self.max_graphs:
            self._let_go(self._graphs.pop(spare[0]))  # the pool stays: the next graph takes its memory
            self._patience.dropped(spare[0])
            if not self._graphs:
                self._pool = None
        entry = self.capture(function, images, like)
        self._graphs[key] = entry
        return entry

    def _let_go(self, entry: Captured) -> None:
        if entry.static_in.is_cuda:  # this stream has waited for all calls; the one the memory is of has not
            with torch.cuda.device(entry.static_in.device):
                stream = torch.cuda.current_stream()
                if self._done is not None:
                    stream.wait_event(self._done)
                entry.static_in.record_stream(stream)


def _plain(function: Function, images: Tensor, like: Tensor) -> Tensor:
    return function(images if images.device == like.device else images.to(like.device, like.dtype))

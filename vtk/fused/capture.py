"""Records CUDA graphs: on a stream of their own, into one memory pool, cleaning up after a failed capture."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from vtk.errors import UnavailableError, VtkError

Notice = Callable[[str, int], None]
Function = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Captured:
    """A graph with what its replays read and write.

    Attributes:
        graph: replayed.
        static_in: (B, ...), outside of the pool: no other graph writes there.
        static_out: in the pool; whatever is replayed next may write there.
        nbytes: of ``static_in``, and by how much the pool grew.
    """

    graph: Any
    static_in: Tensor
    static_out: Tensor
    nbytes: int = 0


class Recorder:
    """Makes graphs whose intermediate memory is one shared pool, so that they must be replayed in turns.

    Warm-up and capture run on a stream that only this recorder uses: libraries keep a workspace for each stream, and
    a graph writes to that of its capture, so that graphs of two recorders may run side by side.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._side: Any = None
        self.notice: Notice | None = None  # given a line about each graph, and its bytes
        self.alive: WeakSet[Captured] = WeakSet()  # also graphs that only others hold

    def capture(self, function: Function, images: Tensor, like: Tensor) -> Captured:
        """Record a graph, which the caller holds. Inside a turn."""
        # a tensor made in inference mode could only be written there
        with torch.inference_mode(False), torch.no_grad():
            static_in = torch.empty(images.shape, dtype=like.dtype, device=like.device)
            static_in.copy_(images)
            before = self.pool_bytes()
            graph, static_out = self._record(function, static_in)
        entry = Captured(graph, static_in, static_out, static_in.nbytes + self.pool_bytes() - before)
        self.alive.add(entry)
        if self.notice is not None:
            self.notice(f"CUDA graph of {' × '.join(map(str, images.shape))}", entry.nbytes)
        return entry

    def _record(self, function: Callable[[Tensor], Tensor], static_in: Tensor) -> tuple[Any, Tensor]:
        """Capture ``function(static_in)``; return the graph and the tensor its replays write to."""
        before = torch.cuda.current_stream()
        side = self._side = self._side or torch.cuda.Stream(static_in.device)
        side.wait_stream(before)
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels compile and libraries allocate their workspaces before the capture
                function(static_in)
        before.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with no_collection():
                # thread_local: another thread may allocate meanwhile
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    static_out = function(static_in)
        except BaseException:
            self._recover(graph)
            raise
        finally:
            torch.cuda.set_stream(before)  # where a capture fails to end, torch leaves its stream the current one
        self._pool = self._pool or graph.pool()
        return graph, static_out

    def _recover(self, graph: Any) -> None:
        """Give back what a failed capture holds: the allocator would go on to fill its pool."""
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        with contextlib.suppress(Exception):  # it has ended, or never began
            if end is not None:
                end(torch.cuda.current_device(), graph.pool())
        with contextlib.suppress(Exception):
            graph.reset()
        self._side = None  # it may still count as capturing

    def pool_bytes(self) -> int:
        """Return the bytes of the pool, which all graphs of this recorder share."""
        if self._pool is None:
            return 0
        wanted = tuple(self._pool)
        found = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in found if tuple(part.get("segment_pool_id", ())) == wanted)


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


@contextlib.contextmanager
def capturing(what: str) -> Iterator[None]:
    """Say in one line of a capture that was asked for why it cannot be.

    Raises:
        UnavailableError: an operation cannot be captured.
    """
    outside = sys.exception()
    try:
        yield
    except RuntimeError as error:
        reason = first_error(error, outside)
        if isinstance(reason, (VtkError, torch.OutOfMemoryError)):
            raise reason from None
        text = " ".join(str(reason).split())[:200]
        raise UnavailableError(f"{what} cannot be captured: {text}; run it with `graphs` off") from error


def first_error(error: BaseException, outside: BaseException | None) -> BaseException:
    """Return what came first: a capture that something breaks ends with an error of its own."""
    while error.__context__ is not None and error.__context__ is not outside:
        error = error.__context__
    return error

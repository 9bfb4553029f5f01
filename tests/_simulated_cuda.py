"""CUDA graphs, streams and events without CUDA: a graph is a tape of operations, and what is done is noted in order.

A replay runs the tape's operations again, on the very memory that they had when they were captured: weights that were
exchanged since are not seen, as on a card. What asks for a value during a capture fails, and, as in torch, a capture
that does not end leaves its stream the current one.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten


class Stream:
    """A stream by number."""

    numbers = itertools.count(1)

    def __init__(self, cuda: "SimulatedCuda") -> None:
        self.cuda, self.number = cuda, next(self.numbers)

    def wait_event(self, event: "Event") -> None:
        self.cuda.note("wait", self.number, event.stream)

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.note("wait", self.number, other.number)


class Event:
    """An event; `synchronize` is noted."""

    def __init__(self, cuda: "SimulatedCuda") -> None:
        self.cuda, self.stream = cuda, 0

    def record(self, stream: Stream) -> None:
        self.stream = stream.number
        self.cuda.note("record", stream.number)

    def synchronize(self) -> None:
        self.cuda.note("synchronize", self.stream)


class Graph:
    """A tape."""

    def __init__(self, cuda: "SimulatedCuda") -> None:
        self.cuda, self.tape, self.whose = cuda, list[Any](), (0, 0)

    def pool(self) -> tuple[int, int]:
        return self.whose

    def reset(self) -> None:
        self.tape = []

    def replay(self) -> None:
        self.cuda.note("replay", self.cuda.current.number)
        self.cuda.busy = True
        for function, arguments, options, outputs in self.tape:
            made = function(*arguments, **options)
            for old, new in zip(outputs, (t for t in tree_flatten(made)[0] if torch.is_tensor(t)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.cuda.busy = False


class Tape(TorchDispatchMode):
    """Notes each operation with the memory it works on."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        made = func(*args, **(kwargs or {}))
        leaves, spec = tree_flatten((args, kwargs or {}))
        held = tree_unflatten([x.detach() if torch.is_tensor(x) else x for x in leaves], spec)
        outputs = [t for t in tree_flatten(made)[0] if torch.is_tensor(t)]
        if not func.is_view:
            self.graph.tape.append((func, *held, outputs))
        return made


class SimulatedCuda:
    """What stands in the place of ``torch.cuda``.

    Attributes:
        notes: in order: what was done, on which stream, and what it waited for.
        current: the current stream.
        captures: graphs that were captured.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.main = self.current = Stream(self)
        self.captures: list[Graph] = []
        self.capturing: int | None = None  # by which thread
        self.busy = False
        self.pools = itertools.count(1)
        self.sizes: dict[tuple[int, int], int] = {}
        self.emptied = 0

    def note(self, *what: Any) -> None:
        self.notes.append(what)

    def names(self) -> str:
        """Return what was done, without the streams."""
        return " ".join(str(note[0]) for note in self.notes)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        """Capture, as ``torch.cuda.graph`` does."""
        assert capture_error_mode == "thread_local" and self.capturing is None
        graph.whose = pool or (0, next(self.pools))
        before, self.current, self.capturing = self.current, stream, threading.get_ident()
        self.note("capture", stream.number)
        try:
            with Tape(graph):
                yield
        except BaseException:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        finally:
            self.capturing = None
        self.current = before
        self.captures.append(graph)
        self.sizes[graph.whose] = self.sizes.get(graph.whose, 0) + 1000

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the pools as segments."""
        return [{"segment_pool_id": pool, "total_size": size} for pool, size in self.sizes.items()]

    def empty_cache(self) -> None:
        self.emptied += 1


class Watching(TorchDispatchMode):
    """Notes copies into, and clones of, tensors."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "clone") and self.cuda.capturing is None and not self.cuda.busy:
            self.cuda.note(name, self.cuda.current.number)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def simulated_cuda(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    """Streams, events and graphs of ``torch.cuda`` on the CPU's tensors."""
    cuda = SimulatedCuda()
    for name, value in {
        "Stream": lambda *_: Stream(cuda), "Event": lambda *_: Event(cuda), "CUDAGraph": lambda: Graph(cuda),
        "current_stream": lambda *_: cuda.current, "stream": cuda.stream, "graph": cuda.graph,
        "set_stream": lambda stream: setattr(cuda, "current", stream), "device": lambda _: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: cuda.capturing == threading.get_ident(),
        "memory_snapshot": cuda.snapshot, "empty_cache": cuda.empty_cache, "current_device": lambda: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return cuda


@pytest.fixture
def on_a_card(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    """The same, and fused models on the CPU take themselves for models on a card, without kernels."""
    from vtk.fused import admission
    from vtk.fused import graph_module as graphed

    def admitted(images: Tensor, device: Any = None) -> bool:
        return admission.admitted(images, torch.device("cuda"))

    monkeypatch.setattr("vtk.fused.graph_cache.admitted", admitted)
    monkeypatch.setattr(graphed.Graphed, "_blank", _blank)
    return simulated_cuda


def _blank(model: Any, batch: int, size: tuple[int, int] | None) -> Tensor:
    return torch.zeros(batch, model.in_chans, *(size or model.image_size), dtype=model.dtype)

"""A model that is timed in all its forms, and the clock it is timed with."""

import copy
import gc
import time
from collections.abc import Callable

import _bounds
import torch
from _models import END_TO_END
from torch import Tensor, nn

PLAIN, GRAPH, FUSED, FUSED_GRAPH, FOLDED_GRAPH = "timm", "timm+graph", "fused", _bounds.FUSED, _bounds.FOLDED
COMPILED, COMPILED_GRAPH = "compile (blocks)", "compile (blocks)+graph"
MAX_GRAPH = "compile max-autotune (blocks)+graph"
MAX_RUNS, MIN_RUNS = 1000, 10


class Subject:
    """One model in its forms: fp32 as timm built it, bf16, and fused; made once for its cells.

    The fused model has the form that a provider's name says, whatever was measured of either before: this is where it
    is measured.
    """

    def __init__(self, name: str, px: int, device: torch.device, smoke: bool) -> None:
        from vtk.fused import fuse

        self.device, self.px = device, px
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = END_TO_END[name].build(px, device=device, smoke=smoke)
        self.plain = copy.deepcopy(self.model).to(self.dtype)
        self.fused = fuse(self.model, dtype=self.dtype)

    def images(self, batch: int) -> Tensor:
        """Return the batch's images, the same for all providers."""
        torch.manual_seed(batch)
        return torch.randn(batch, 3, self.px, self.px, device=self.device).to(self.dtype)

    def exact(self, batch: int) -> Tensor:
        """Return the logits to compare with: timm's, in fp32, or in fp64 where fp32 is what is timed."""
        if self.dtype == torch.float32:
            return copy.deepcopy(self.model).double()(self.images(batch).double())
        return self.model(self.images(batch).float())

    def provider(self, name: str, images: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function of images, warmed up and captured for a batch of this size."""
        if name in (FUSED, FUSED_GRAPH, FOLDED_GRAPH):
            self.fused.drop_graphs()  # they keep the form in which they were captured
            self.fused.ln_folded = name == FOLDED_GRAPH
            if name == FUSED:
                return self.fused.compute
            self.fused.capture([len(images)])
            return self.fused
        if name in (PLAIN, GRAPH):
            return self.plain if name == PLAIN else graphed(self.plain, images)
        torch._dynamo.reset()
        mode = {"mode": "max-autotune-no-cudagraphs"} if name == MAX_GRAPH else {}
        model = copy.deepcopy(self.plain)
        for block in model.blocks:
            block.compile(dynamic=False, **mode)
        return model if name == COMPILED else graphed(model, images)

    def release(self) -> None:
        """Forget graphs, so that one cell's memory is not in the next one's way."""
        self.fused.drop_graphs()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def graphed(model: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """Capture a model for inputs like ``images``; inputs are copied in and outputs out, as the fused model does."""
    static = images.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(static)

    def run(x: Tensor) -> Tensor:
        static.copy_(x)
        graph.replay()
        return output.clone()

    return run


def latencies(call: Callable[[], object], device: torch.device, duration: float) -> list[float]:
    """Return the milliseconds of each run: `MAX_RUNS` of them if that takes at most four times ``duration`` seconds.

    Else as many as fit into ``duration``, and at least `MIN_RUNS`.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock = time.perf_counter

    def run() -> float:
        start = clock()
        call()
        wait()
        return clock() - start

    end = clock() + duration / 5
    warm: list[float] = []
    while len(warm) < 3 or clock() < end:  # until clocks and caches have settled
        warm.append(run())
    all_runs = MAX_RUNS * min(warm) <= 4 * duration
    end = clock() + (8 if all_runs else 1) * duration
    found: list[float] = []
    while len(found) < MAX_RUNS and (clock() < end or len(found) < MIN_RUNS):
        found.append(1e3 * run())
    return found

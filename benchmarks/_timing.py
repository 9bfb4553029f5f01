"""Times calls: inside a CUDA graph, launched one by one, or by a CPU clock.

*graph*: no launch costs. One graph holds many calls, as the fused models run them, and its replays are timed by CUDA
events. The calls take turns on up to `SETS` clones of the operands, together twice the L2 cache, so that weights come
from memory; clones that are smaller than a `SETS`-th of that stay in the cache, as a model's tokens do between two
kernels. *launch*: triton's `do_bench` with an emptied L2 cache; at small shapes that is the host's time, so nothing is
decided by it. *clock*: a CPU's.
"""

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vtk.fused.capture import no_collection

Times = tuple[float, float, float]
"""Median, 20th and 80th percentile in microseconds."""

SETS = 32
CALLS = 400
"""Most calls of one graph: recording one costs the host tens of microseconds."""

REPLAY_US = 1000.0
"""What a replay should last, many times the cost of starting it."""

TOTAL_US = 60_000.0
WARM, LEAST, MOST = 5, 7, 20
"""Replays before those that count, and the fewest and most that do."""

_broken: list[torch.cuda.CUDAGraph] = []


def time_call(call: Callable[[], object], device: torch.device, *, quick: bool = False) -> Times:
    """Time ``call`` as it is: on CUDA with the host's launches, on a CPU by the clock."""
    if device.type == "cuda":
        from triton.testing import do_bench

        median, low, high = do_bench(call, warmup=10, rep=50, quantiles=[0.5, 0.2, 0.8])
        return 1e3 * median, 1e3 * low, 1e3 * high
    call()
    seconds = []
    for _ in range(2 if quick else 15):
        start = time.perf_counter()
        call()
        seconds.append(1e6 * (time.perf_counter() - start))
    return percentiles(seconds)


def time_in_graph(
    bind: Callable[[dict[str, Tensor]], Callable[[], object]], operands: Mapping[str, Tensor], device: torch.device
) -> Times:
    """Time one call inside a CUDA graph of many.

    Args:
        bind: makes the call of a set of operands. Runs on the stream of the capture: autograd runs a backward on the
            stream of its forward.
        operands: cloned with their strides.
        device: CUDA.

    Raises:
        RuntimeError: a call cannot be captured; `recover` must follow.
    """
    size = sum(t.nbytes for t in operands.values())
    count = sets_for(size, torch.cuda.get_device_properties(device).L2_cache_size)
    pool = torch.cuda.graph_pool_handle()
    stream = side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls = [bind({name: twin(t) for name, t in operands.items()}) for _ in range(count)]
        for call in (*calls, *calls[:2]):  # kernels compile, and libraries make their workspaces for this stream
            call()
        graph = _record(calls, pool)
        us = min(_replays(graph, WARM))
        rounds = rounds_for(us, count)
        if rounds > 1:
            graph = _record(calls * rounds, pool)
            us = min(_replays(graph, WARM))
        found = _replays(graph, replays_for(us))
    return percentiles([us / (count * rounds) for us in found])


def recover() -> None:
    """Make CUDA usable again after a capture that failed.

    A capture that was broken off may leave its error to be reported once more, and torch's random generator in the
    belief that it is being captured: every later `torch.randn` would raise. A capture that succeeds puts that right.
    """
    side_stream.cache_clear()
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").add_(1)
    number = torch.zeros(1, device="cuda")
    with torch.cuda.stream(side_stream()):
        _record([lambda: number.add_(1)], torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()


def sets_for(size: int, cache: int) -> int:
    """Return how many sets of operands of ``size`` bytes are twice a cache, at most `SETS`."""
    return max(1, min(SETS, math.ceil(2 * cache / max(size, 1))))


def rounds_for(us: float, calls: int) -> int:
    """Return how often a graph must do its ``calls``, which take ``us``, to last `REPLAY_US`."""
    return max(1, min(CALLS // calls, math.ceil(REPLAY_US / max(us, 1e-3))))


def replays_for(us: float) -> int:
    """Return how many replays of ``us`` are timed."""
    return max(LEAST, min(MOST, int(TOTAL_US / max(us, 1e-3))))


def percentiles(us: Sequence[float]) -> Times:
    """Return the median, the 20th and the 80th percentile."""
    low, _, _, high = statistics.quantiles(us, n=5, method="inclusive")
    return statistics.median(us), low, high


def twin(t: Tensor) -> Tensor:
    """Return a copy with the same strides, also where they leave gaps."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: cuBLAS keeps a workspace for each stream that it ever saw."""
    return torch.cuda.Stream()


def _record(calls: Sequence[Callable[[], object]], pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` one after another on the current stream, in the memory of ``pool``."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # thread_local: a backward runs in a thread of its own
        with no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except Exception:
        with contextlib.suppress(RuntimeError):  # raised if the capture did end
            device = torch.cuda.current_device()
            # else the allocator takes it for still going on, and refuses to empty its cache
            torch._C._cuda_endAllocateToPool(device, pool)
            _broken.append(graph)  # pinned memory's allocator still asks it for its stream
            torch._C._cuda_releasePool(device, pool)
        raise
    return graph


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Return the microseconds of each of ``count`` replays, given to the device without waiting between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

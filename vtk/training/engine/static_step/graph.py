"""Recording by CUDA: a graph of the kernels of a step, which one call starts.

Random numbers are drawn by torch's default generator of the device, which torch registers with the graph: a replay
draws the numbers that come next, as a step without a graph would.
"""

import gc
from collections.abc import Callable

import torch

from vtk import console


class CudaRecorder:
    """Records on a stream of its own, on which the steps before ran, too.

    A node of autograd remembers the stream it was made on, and waiting for another one would break a capture.

    Args:
        device: that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def warm(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the stream of the recording."""
        own = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(own)
        with torch.cuda.stream(self.stream):
            function()
        own.wait_stream(self.stream)

    def record(self, function: Callable[[], None], spare: float) -> Callable[[], None]:
        """Capture ``function``; see `vtk.training.engine.static_step.step.Recorder`."""
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        # what a graph's tensors need stays its own, and steps of another shape and evaluation need theirs beside it
        needed = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        if needed * (1 + spare) > free:
            raise MemoryError(
                f"{console.size(needed)} would stay taken, {console.size(free)} are free; give a smaller --batch-size"
            )
        graph = torch.cuda.CUDAGraph()
        # other threads (they load images) may use the device meanwhile
        with torch.cuda.device(self.device):
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                function()
        return graph.replay

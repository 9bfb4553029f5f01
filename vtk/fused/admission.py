"""Decides which calls run as CUDA graphs, and delays captures.

A call may run as a graph on plain tensors that nobody traces, transforms or differentiates. A capture takes as long as
several calls: a shape whose graph was dropped or could not be made waits for its next one.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk.fused.onednn_prepack import observed

CALLS = (0, 4, 16, 64)
"""Calls without a graph after a shape's graph was dropped, the first, second, third and each later time.

With eight graphs and nine batch sizes in turns each capture would drop what is called next, and all would be slow.
"""

_MOST = 1024


def admitted(images: Tensor, device: torch.device | None = None) -> bool:
    """Return whether a call on these images may be captured and replayed.

    Args:
        images: a tensor on CUDA; or on the host, where ``device`` is a CUDA device.
        device: of the model.
    """
    if type(images) is not Tensor or not images.is_floating_point():
        return False
    if not images.is_cuda and (device is None or device.type != "cuda" or images.device.type != "cpu"):
        return False
    if observed() or _transformed() or (torch.is_grad_enabled() and images.requires_grad):
        return False
    return not torch.cuda.is_current_stream_capturing()


def modes(dtype: torch.dtype) -> Hashable:
    """Return the settings of torch that a graph would keep from its capture."""
    exact = torch.are_deterministic_algorithms_enabled()
    if dtype != torch.float32:
        return exact
    return exact, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def _transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on, whose tensors do not show what they are."""
    levels: int = torch.autograd.forward_ad._current_level
    return levels >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


@dataclass
class _State:
    drops: int = 0
    left: float = 0.0


class Patience:
    """Counts, for each shape, the calls that are still to run without a graph."""

    def __init__(self) -> None:
        self._states: OrderedDict[Hashable, _State] = OrderedDict()

    def waits(self, key: Hashable) -> bool:
        """Count a call of a shape that has no graph; return whether it runs without one."""
        state = self._states.get(key)
        if state is None or state.left <= 0:
            return False
        state.left -= 1
        return True

    def dropped(self, key: Hashable) -> None:
        """Note that a shape's graph went for another one."""
        drops = self._take(key).drops
        self._put(key, _State(drops + 1, CALLS[min(drops, len(CALLS) - 1)]))

    def failed(self, key: Hashable, calls: float = CALLS[-1]) -> None:
        """Note that a capture failed; infinitely many calls where it always will."""
        self._put(key, _State(self._take(key).drops, calls))

    def forget(self, key: Hashable) -> None:
        """Capture this shape at its next call."""
        self._take(key)

    def clear(self) -> None:
        """Forget all shapes."""
        self._states.clear()

    def _take(self, key: Hashable) -> _State:
        return self._states.pop(key, None) or _State()

    def _put(self, key: Hashable, state: _State) -> None:
        self._states[key] = state
        while len(self._states) > _MOST:
            self._states.popitem(last=False)

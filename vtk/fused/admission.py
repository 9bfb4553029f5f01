"""Admits calls to CUDA graphs: those on plain tensors that nobody traces, transforms or differentiates."""

from collections.abc import Hashable

import torch
from torch import Tensor

from vtk.fused.prepacked import observed


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

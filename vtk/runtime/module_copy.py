"""Copies a user's module from any device and precision to fp32 on the CPU."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vtk.errors import UsageError


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy in fp32, on the CPU, in eval mode; it takes no memory on the original's device.

    Raises:
        UsageError: it cannot be copied.
    """
    name = type(module).__name__
    memo: dict[int, Any] = {}
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(f"{name} is a module of TorchScript; give the module that it was made from")
    for tensor in (*module.parameters(), *module.buffers()):
        if is_lazy(tensor):
            raise UsageError(f"{name} has weights without a shape yet; call it once on images of its size first")
        if tensor.is_meta:
            raise UsageError(f"{name} is on the meta device, without values for its weights; load them first")
        if type(tensor) is nn.Parameter:  # other classes copy themselves
            memo[id(tensor)] = nn.Parameter(_plain(tensor), requires_grad=tensor.requires_grad)
        elif type(tensor) is Tensor:
            memo[id(tensor)] = _plain(tensor)
    try:
        return copy.deepcopy(module, memo).float().cpu().eval()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{name} cannot be copied ({first_line(error)}); give a module that copy.deepcopy takes"
        ) from error


def _plain(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, at most 160 characters; of one without, the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160].rstrip(".")

"""Records the addresses of a module's tensors: a CUDA graph is out of date once one of them is replaced."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

_PLAIN = (Tensor, nn.Parameter)


class Addresses:
    """The tensors and parts that a module had when this was made.

    What lay there is kept alive, so that a graph that is out of date reads old numbers and not freed memory. Values
    that change in place are no change: a graph reads the new ones; but for biases that a model keeps sums of
    (`vtk.fused.residual.SummedBiases`), where its graphs have read those.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: list[tuple[dict[str, Any], str, int]] = []
        self._others: list[tuple[dict[str, Any], str, Tensor]] = []  # of classes that have no memory to show
        self._parts: list[tuple[dict[str, Any], str, Any]] = []
        self._kept: list[Tensor] = []
        self._summed: Any = getattr(module, "summed", None)
        self._hooks: list[Any] = []
        for owner in module.modules():
            if owner is not module:
                self._hooks += owner._forward_hooks, owner._forward_pre_hooks
            self._parts += [(owner._modules, name, part) for name, part in owner._modules.items()]
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is not None and type(tensor) not in _PLAIN:
                        self._others.append((table, name, tensor))
                    elif tensor is not None:
                        self._tensors.append((table, name, tensor.data_ptr()))
                        self._kept.append(tensor.detach())

    def hold(self) -> bool:
        """Return whether everything is where it was."""
        try:
            if self._summed is not None and not self._summed.hold():
                return False
            if any(table[name] is not part for table, name, part in (*self._parts, *self._others)):
                return False
            return all(table[name].data_ptr() == at for table, name, at in self._tensors)
        except (KeyError, AttributeError, RuntimeError):  # removed, replaced by None, or by a tensor without memory
            return False

    def watched(self) -> bool:
        """Return whether somebody looks on whom a replay would pass by: hooks of parts, or autograd."""
        if any(self._hooks) or _has_any_global_hook():
            return True
        tensors = (*self._tensors, *self._others)
        return torch.is_grad_enabled() and any(table[name].requires_grad for table, name, _ in tensors)

"""Counting what a forward pass keeps for the backward pass: exactly, by autograd's own hook."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def kept_bytes(run: Callable[[], Any], owned: Iterable[Tensor]) -> int:
    """Return the bytes that ``run`` keeps for backward, every storage counted once, real or fake.

    Args:
        run: computes something with a graph; its result is held until the count is done.
        owned: tensors that exist anyway (parameters and buffers) and do not count.
    """
    known = {t.untyped_storage()._cdata for t in owned}
    seen: dict[int, tuple[int, Tensor]] = {}  # the tensor is held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                seen.setdefault(storage._cdata, (storage.nbytes(), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(nbytes for nbytes, _ in seen.values())


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of ``model``."""
    return [*model.parameters(), *model.buffers()]

"""Reshapes attention of other ranks to (batch, heads, tokens, head dim), all that torch's ONNX exporter takes."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class _FourAxes(TorchFunctionMode):
    """Runs attention of three, five or more axes with four; the numbers are the same."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Fold the axes before the heads into the batch, or add one, around `scaled_dot_product_attention`."""
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not args or args[0].ndim == 4:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value, mask = (given.pop(name, None) for name in names[:4])
        lead = query.shape[:-3]
        if mask is not None and mask.ndim > 3:
            mask = mask.expand(*lead, *mask.shape[-3:])
        out = func(_fold(query), _fold(key), _fold(value), attn_mask=_fold_mask(mask), **given)
        return out.reshape(*lead, *out.shape[-3:]) if lead else out.squeeze(0)


def _fold(tensor: Tensor) -> Tensor:
    """(…, heads, tokens, head dim) to (batch, heads, tokens, head dim)."""
    return tensor.unsqueeze(0) if tensor.ndim == 3 else tensor.reshape(math.prod(tensor.shape[:-3]), *tensor.shape[-3:])


def _fold_mask(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.ndim < 3 else _fold(mask)


@contextlib.contextmanager
def four_axes() -> Iterator[None]:
    """Run every attention in the block with four axes: Twins and NesT have five (windows), SAM has three.

    onnxscript's translation of `scaled_dot_product_attention` refuses all others ("Error when translating node").
    """
    with _FourAxes():
        yield

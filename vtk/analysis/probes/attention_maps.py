"""Attention weights of any model, layer by layer, including fused attention, which never stores them.

Fused attention is one call of torch's ``scaled_dot_product_attention``; within `watch_attention` softmax(scale·q·kᵀ +
mask) is recomputed from the arguments of that call, after norms, rotary positions and relative positions. Unfused
attention is observed at its softmax. So any class is supported; modules that hide both are returned by `unseen`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vtk.errors import NoResultError

_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
See = Callable[[str, Tensor], None]


@contextlib.contextmanager
def watch_attention(model: nn.Module, see: See) -> Iterator[None]:
    """Within the context, pass every layer's attention to ``see`` as soon as it is computed.

    Args:
        model: on any device; parallel branches are separate layers.
        see: called with the name of the attention module and its attention (B, H, queries, keys) in fp32 or wider,
            whose rows sum to 1. With windows, B counts windows.

    Heads that a layer folds into the batch (B·H, queries, keys) are separated again.

    Raises:
        NoResultError: an attention is not finite.
    """
    stack: list[str] = [""]
    handles = []
    attends = {name: _heads(module) for name, module in model.named_modules() if looks_like_attention(module)}

    def leave(*_: object) -> None:  # a returned value would replace the output
        stack.pop()

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        with _Watch(stack, attends, see):
            yield
    finally:
        for handle in handles:
            handle.remove()


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module has heads and projections."""
    heads = _heads(module)
    return isinstance(heads, int) and any(isinstance(m, (nn.Linear, nn.Conv2d)) for m in module.children())


def _heads(module: nn.Module) -> Any:
    return getattr(module, "num_heads", getattr(module, "heads", None))


def unseen(model: nn.Module, seen: set[str]) -> tuple[str, ...]:
    """Return the modules that look like attention but were not observed, nor contain a module that was."""
    return tuple(
        name
        for name, module in model.named_modules()
        if looks_like_attention(module)
        and not any(s == name or s.startswith(f"{name}.") or name.startswith(f"{s}.") for s in seen)
    )


class _Watch(TorchFunctionMode):
    def __init__(self, stack: list[str], attends: dict[str, int], see: See) -> None:
        super().__init__()
        self.stack, self.attends, self.see = stack, attends, see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Observe fused attention, and softmax inside attention; the calls themselves are unchanged."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._seen(rebuild_attention(*args, **kwargs))
        result = func(*args, **kwargs)
        if func in _SOFTMAX and result.ndim in (3, 4) and self._inside():
            if self._dim(args, kwargs) in (-1, result.ndim - 1):
                self._seen(_wide(result))
        return result

    def _seen(self, attention: Tensor) -> None:
        name = self._layer()
        if attention.ndim == 3:
            heads = self.attends.get(name, 1)
            attention = attention.unflatten(0, (-1, heads if len(attention) % heads == 0 else 1))
        if not bool(attention.isfinite().all()):
            raise NoResultError(f"the attention of `{name}` is not finite on these images; look at the model's weights")
        self.see(name, attention)

    def _layer(self) -> str:
        """Return the attention module: the innermost that looks like attention, else the innermost of all."""
        return next((name for name in reversed(self.stack) if name in self.attends), self.stack[-1])

    def _inside(self) -> bool:
        return any(name in self.attends for name in self.stack)

    @staticmethod
    def _dim(args: Any, kwargs: Any) -> int | None:
        dim: int | None = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return dim


def rebuild_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention (B, H, queries, keys) of a call of ``scaled_dot_product_attention``, without its dropout."""
    q, k = _wide(query), _wide(key)
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.transpose(-2, -1)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    return scores.softmax(dim=-1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))

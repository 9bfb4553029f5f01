"""Context Broadcasting (paper B, eq. 1): every token gets the mean of all tokens mixed in.

CB(xᵢ) = ½xᵢ + ½·mean(x) has no parameters; CB_S(xᵢ) = xᵢ + Λ ⊙ mean(x) has one Λ (C) per layer. The mean runs over all
tokens, class and register tokens too. Λ starts at 0, so that a pretrained model starts unchanged; the paper does not
say what it started from.

It is attached by giving the FFN or the attention a subclass of its class, so that every tensor keeps its name,
``isinstance(mlp, Mlp)`` stays true, and Λ is called ``blocks.3.mlp.cb.scale``. Such a module has the attributes ``cb``
(a `ContextBroadcast`) and ``cb_placement`` (``front``, ``mid`` or ``end``).

A block of parallel branches gets one module per stage, on the sum of its branches: ``block.cb`` after the FFNs and
``block.cb_msa`` after the attentions, None where there is none. LayerScale and stochastic depth multiply channels and
images, so it makes no difference that they come before it, and the sum of the branches' broadcasts is the broadcast of
their sum: this is the paper's end placement with one Λ for the stage.
"""

import functools
from typing import Any, Literal

import torch
from timm.layers import Mlp
from timm.models.vision_transformer import ParallelThingsBlock
from torch import Tensor, nn

Placement = Literal["front", "mid", "end"]
Where = Literal["mlp", "msa"]


class ContextBroadcast(nn.Module):
    """CB, or CB_S where ``dim`` is given.

    Args:
        dim: C, for a trained Λ of that length; None for CB.
        device: of Λ.
        dtype: of Λ.

    Attributes:
        scale: Λ (C), or None.
    """

    scale: nn.Parameter | None

    def __init__(
        self, dim: int | None = None, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        zeros = None if dim is None else nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.register_parameter("scale", zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, C), prefix tokens included, to tokens (B, N, C)."""
        mean = x.mean(dim=1, keepdim=True)
        return 0.5 * (x + mean) if self.scale is None else x + self.scale * mean

    def extra_repr(self) -> str:
        """Show Λ's length."""
        return "" if self.scale is None else str(len(self.scale))


class ContextParallelBlock(ParallelThingsBlock):  # type: ignore[misc]
    """timm's block of parallel branches with Context Broadcasting of the sum of a stage's branches.

    Attributes:
        cb: after the FFNs, or None.
        cb_msa: after the attentions, or None.
    """

    cb: ContextBroadcast | None
    cb_msa: ContextBroadcast | None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C)."""
        if attn_mask is None and not is_causal:
            attended = [branch(x) for branch in self.attns]
        else:
            options = {"attn_mask": attn_mask, "is_causal": is_causal}
            attended = [b.drop_path(b.ls(b.attn(b.norm(x), **options))) for b in self.attns]
        x = x + _broadcast(self.cb_msa, torch.stack(attended).sum(dim=0))
        return x + _broadcast(self.cb, torch.stack([ffn(x) for ffn in self.ffns]).sum(dim=0))


def find_context_broadcast(module: nn.Module) -> ContextBroadcast | None:
    """Return the Context Broadcasting of an FFN, an attention, or the FFN stage of a parallel block; None without."""
    found = getattr(module, "cb", None)
    return found if isinstance(found, ContextBroadcast) else None


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the subclass that `attach` may have made of it."""
    kind = type(module)
    attached = find_context_broadcast(module) is not None and kind.__module__ == __name__
    return kind.__bases__[0] if attached else kind


def attach(module: Any, context: ContextBroadcast, placement: Placement) -> None:
    """Make an FFN or attention module broadcast, in place.

    Args:
        module: maps tokens (B, N, C) to tokens (B, N, C), in its first argument.
        context: what to apply.
        placement: ``front`` before the module, ``end`` after it, ``mid`` before ``fc2`` of a timm `Mlp`.
    """
    kind: Any = type(module)
    module.__class__ = _subclass(kind, placement)
    module.cb, module.cb_placement = context, placement


def attach_to_sum(block: ParallelThingsBlock, context: ContextBroadcast, where: Where) -> None:
    """Make a block of parallel branches broadcast the sum of its FFNs (``mlp``) or attentions (``msa``), in place."""
    if not isinstance(block, ContextParallelBlock):
        block.__class__ = ContextParallelBlock
        block.cb = block.cb_msa = None
    setattr(block, "cb" if where == "mlp" else "cb_msa", context)


def _broadcast(context: ContextBroadcast | None, tokens: Tensor) -> Tensor:
    return tokens if context is None else context(tokens)


@functools.cache
def _subclass(kind: Any, placement: Placement) -> type[nn.Module]:
    """Return a subclass of ``kind`` whose forward pass has Context Broadcasting at ``placement``."""

    def end(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.cb(kind.forward(self, x, *args, **kwargs))
        return y

    def front(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = kind.forward(self, self.cb(x), *args, **kwargs)
        return y

    def mid(self: Any, x: Tensor) -> Tensor:
        assert issubclass(kind, Mlp)
        x = self.norm(self.drop1(self.act(self.fc1(x))))
        y: Tensor = self.drop2(self.fc2(self.cb(x)))
        return y

    def reduce(self: Any, protocol: Any) -> Any:
        # the class has no name in this module by which copy and pickle could find it
        return _blank, (kind, placement), self.__getstate__()

    methods = {"forward": {"end": end, "front": front, "mid": mid}[placement], "__reduce_ex__": reduce}
    return type(f"Context{kind.__name__}", (kind,), {**methods, "__module__": __name__})


def _blank(kind: Any, placement: Placement) -> nn.Module:
    cls = _subclass(kind, placement)
    made: nn.Module = cls.__new__(cls)
    return made

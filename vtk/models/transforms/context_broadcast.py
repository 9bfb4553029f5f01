"""Context Broadcasting (Hyeon-Woo et al. 2023, eq. 1): adds the mean of all tokens to every token.

CB(xᵢ) = ½xᵢ + ½·mean(x) has no parameters; CB_S(xᵢ) = xᵢ + Λ ⊙ mean(x) has one Λ (C) per layer. The mean is over all
tokens, including class and register tokens. Λ is initialised to 0, which leaves a pretrained model unchanged; the paper
does not give its initial value.

It is attached by changing the class of the FFN or attention to a subclass, so that every tensor keeps its name,
``isinstance(mlp, Mlp)`` remains true, and Λ is ``blocks.3.mlp.cb.scale``. Such a module has the attributes ``cb`` (a
`ContextBroadcast`) and ``cb_placement`` (``front``, ``mid`` or ``end``).

A block of parallel branches has one module per stage, on the sum of its branches: ``block.cb`` after the FFNs and
``block.cb_msa`` after the attentions, or None. LayerScale and stochastic depth scale channels and images, so they
commute with it, and the sum of the branches' broadcasts is the broadcast of their sum: this is the paper's end
placement with one Λ per stage.
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
    """CB, or CB_S if ``dim`` is given.

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
    """timm's parallel block with Context Broadcasting of the sum of a stage's branches.

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
    """Return the Context Broadcasting of an FFN, an attention, or the FFN stage of a parallel block; else None."""
    found = getattr(module, "cb", None)
    return found if isinstance(found, ContextBroadcast) else None


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before `attach` changed it."""
    kind = type(module)
    attached = find_context_broadcast(module) is not None and kind.__module__ == __name__
    return kind.__bases__[0] if attached else kind


def attach(module: Any, context: ContextBroadcast, placement: Placement) -> None:
    """Add Context Broadcasting to an FFN or attention module, in place.

    Args:
        module: maps tokens (B, N, C) to tokens (B, N, C), in its first argument.
        context: the module to apply.
        placement: ``front`` before the module, ``end`` after it, ``mid`` before ``fc2`` of a timm `Mlp`.
    """
    kind: Any = type(module)
    module.__class__ = _subclass(kind, placement)
    module.cb, module.cb_placement = context, placement


def attach_to_sum(block: ParallelThingsBlock, context: ContextBroadcast, where: Where) -> None:
    """Add Context Broadcasting to the sum of a parallel block's FFNs (``mlp``) or attentions (``msa``), in place."""
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
        # copy and pickle cannot find the class by its name
        return _blank, (kind, placement), self.__getstate__()

    methods = {"forward": {"end": end, "front": front, "mid": mid}[placement], "__reduce_ex__": reduce}
    return type(f"Context{kind.__name__}", (kind,), {**methods, "__module__": __name__})


def _blank(kind: Any, placement: Placement) -> nn.Module:
    cls = _subclass(kind, placement)
    module: nn.Module = cls.__new__(cls)
    return module

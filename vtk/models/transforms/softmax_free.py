"""Attention without softmax (Chen et al. 2022, section 3: ViT-B/16-Free), in which queries and keys interact freely.

The paper compares it with a ViT to say why MLP-Mixers converge to sharper regions: "simply remove the softmax". So the
output is (q·kᵀ/√d)·v with nothing in the softmax's place: no weight is bounded, rows do not sum to 1, and the sum over
tokens is not divided by their number. All tensors keep their names, and no weights are added.
"""

from collections.abc import Sequence

import torch
from timm.layers import Attention
from torch import Tensor

from vtk.errors import UsageError
from vtk.models.transforms.blocks import branch_modules, choose_layers, find_blocks
from vtk.models.transforms.registry import register

_WHAT = "attention without softmax"


class SoftmaxFreeAttention(Attention):  # type: ignore[misc]
    """timm's `Attention` whose weights are the scores themselves."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C).

        Args:
            x: tokens.
            attn_mask: booleans, True where a query sees a key.
            is_causal: hide later tokens.

        Raises:
            UsageError: a mask of numbers, which are added to what a softmax takes.
        """
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            raise UsageError("attention without softmax takes masks of booleans, not numbers to add; leave it out")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (self.q_norm(q) * self.scale) @ self.k_norm(k).transpose(-2, -1)
        if is_causal:
            weights = weights.tril()
        if attn_mask is not None:
            weights = weights.masked_fill(~attn_mask, 0.0)
        out = (self.attn_drop(weights) @ v).transpose(1, 2).flatten(2)
        y: Tensor = self.proj_drop(self.proj(self.norm(out)))
        return y


@register("softmax_free")
def softmax_free(model: torch.nn.Module, *, layers: str | Sequence[int] = "all") -> dict[str, str | None]:
    """Remove the softmax of a Vision Transformer's attention, in place.

    Args:
        model: a timm VisionTransformer, also of parallel branches, or a PiT.
        layers: ``all``, ``upper`` (the upper half of the blocks) or block numbers from 0.

    Returns:
        The map from the model's keys to themselves.

    Raises:
        UsageError: another kind of model or attention; the model is unchanged.
    """
    blocks = find_blocks(model, _WHAT)
    found = [each for i in choose_layers(layers, len(blocks)) for each in branch_modules(*blocks[i], "msa", _WHAT)]
    for name, attn in found:
        if type(attn) is not Attention:
            raise UsageError(f"{name} is a {type(attn).__name__}; only timm's plain Attention can be {_WHAT}")
        if attn.gate is not None:
            raise UsageError(f"{name} has a gate before its projection, which {_WHAT} has not")
    for _, attn in found:
        attn.__class__ = SoftmaxFreeAttention
    return {key: key for key in model.state_dict()}

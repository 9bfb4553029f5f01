"""Heads of uniform attention (paper B, Table 1): a head whose every query takes the mean of all values.

The paper's words for its three variants, and what they are here, with u such heads of H:

- **A** "replace one of the multi-head self-attention heads to be CB": H - u heads attend, u are uniform. A uniform head
  keeps its values and its part of the projection, and needs neither queries nor keys: fewer parameters.
- **B** "adjust the number of parameters of (A) to be comparable to the original": queries and keys of the heads that
  attend are made wider, by H / (H - u), rounded. The paper does not say what it widens.
- **C** "append CB to MSA as an extra head": H heads attend and u more, of the same width, are uniform; the projection
  takes H + u heads. The paper's ViT-S goes from 22 to 29 million parameters by it; a head of 64 channels adds 0.6
  million. 29 is what a ViT-S of 7 heads and 448 channels has whose seventh head is uniform: variant A with
  ``embed_dim=448 num_heads=7``.

"To be CB" and "uniform attention" are two readings: ``mix="uniform"`` gives the mean of the values, the uniform matrix
1/N of the paper's title, ``mix="cb"`` half of it and half of the token's own value (eq. 1).
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from vtk.errors import UsageError
from vtk.models.transforms.blocks import branch_modules, choose_layers, find_blocks
from vtk.models.transforms.registry import register

VARIANTS = ("a", "b", "c")
MIXES = ("uniform", "cb")
_WHAT = "uniform heads"


class UniformHeadAttention(Attention):  # type: ignore[misc]
    """timm's `Attention` with heads of uniform attention, the last ones.

    Attributes:
        num_heads: H, uniform ones included; the projection takes H·D channels.
        head_dim: D, of values.
        learned_heads: those with queries and keys.
        query_dim: channels of a query and of a key.
        uniform_mix: ``uniform`` or ``cb``.
        qkv: rows of the queries (learned heads × query_dim), the keys (the same) and the values (H·D).
    """

    learned_heads: int
    query_dim: int
    uniform_mix: str

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C).

        Raises:
            UsageError: a mask, with which there is no one mean.
        """
        if attn_mask is not None or is_causal:
            raise UsageError("heads of uniform attention take the mean of all tokens: they take no mask")
        learned = self.learned_heads
        width = learned * self.query_dim
        q, k, v = self.qkv(x).split((width, width, self.num_heads * self.head_dim), -1)
        q, k = (t.unflatten(-1, (learned, self.query_dim)).transpose(1, 2) for t in (q, k))
        v = v.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        q, k = self.q_norm(q), self.k_norm(k)
        seen, rest = v[:, :learned], v[:, learned:]
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, seen, dropout_p=dropout)
        else:
            out = self.attn_drop(((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)) @ seen
        mean = rest.mean(2, keepdim=True)
        mean = mean.expand_as(rest) if self.uniform_mix == "uniform" else 0.5 * (rest + mean)
        y: Tensor = self.proj_drop(self.proj(torch.cat((out, mean), 1).transpose(1, 2).flatten(2)))
        return y


@register("uniform_heads")
def uniform_heads(
    model: nn.Module, *, variant: str, heads: int = 1, mix: str = "uniform", layers: str | Sequence[int] = "all"
) -> dict[str, str | None]:
    """Give attention modules heads of uniform attention, in place.

    Values that can be kept are: those of the queries, keys and values of heads that attend, the values and projection
    of a replaced head. An extra head starts with values at random and a projection of 0, so that the model starts as it
    was; what variant B adds to queries and keys starts at random.

    Args:
        model: a timm VisionTransformer, also of parallel branches, or a PiT.
        variant: ``a``, ``b`` or ``c``, as above.
        heads: u, how many; at least one must be left that attends.
        mix: ``uniform`` or ``cb``, as above.
        layers: ``all``, ``upper`` (the upper half of the blocks) or block numbers from 0.

    Returns:
        The map from the model's keys to themselves, None for what has another shape than before.

    Raises:
        UsageError: another kind of model or attention, or numbers that do not fit; nothing was changed then.
    """
    for name, value, allowed in (("variant", variant, VARIANTS), ("mix", mix, MIXES)):
        if value not in allowed:
            raise UsageError(f"`{name}` is {value!r}; choose {', '.join(allowed)}")
    blocks = find_blocks(model, _WHAT)
    found = [each for i in choose_layers(layers, len(blocks)) for each in branch_modules(*blocks[i], "msa", _WHAT)]
    for name, attn in found:
        _check(name, attn, variant, heads)
    made = set()
    for name, attn in found:
        made |= {f"{name}.{key}" for key in _change(attn, variant, heads, mix)}
    return {key: None if key in made else key for key in model.state_dict()}


def _check(name: str, attn: Any, variant: str, heads: Any) -> None:
    if type(attn) is not Attention:
        raise UsageError(f"{name} is a {type(attn).__name__}; only timm's plain Attention can have {_WHAT}")
    most = attn.num_heads - (variant != "c")
    if type(heads) is not int or not 1 <= heads <= most:
        words = f"1 to {most}, so that one attends" if most > 0 else "none, since the only one must attend: use c"
        raise UsageError(f"`heads` is {heads!r}; of the {attn.num_heads} heads of {name} it may be {words}")
    if attn.gate is not None or type(attn.norm) is not nn.Identity:
        raise UsageError(f"{name} has a gate or a norm before its projection; attention with {_WHAT} has neither")
    if variant == "b" and (type(attn.q_norm) is not nn.Identity or type(attn.k_norm) is not nn.Identity):
        raise UsageError(f"{name} has norms for queries of {attn.head_dim} channels, which variant b widens: use a")


def _change(attn: Any, variant: str, heads: int, mix: str) -> list[str]:
    """Change one attention module; return the names of the tensors that were made."""
    before, dim = attn.num_heads, attn.head_dim
    learned = before if variant == "c" else before - heads
    total = before + heads if variant == "c" else before
    width = round(dim * before / learned) if variant == "b" else dim
    made = [f"qkv.{name}" for name, _ in attn.qkv.named_parameters()]
    attn.qkv = _rows(attn.qkv, before, dim, (learned, learned, total), (width, width, dim))
    if total > before:
        old = attn.proj
        attn.proj = nn.Linear(
            total * dim, old.out_features, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
        )
        weight = F.pad(old.weight.detach(), (0, heads * dim))
        attn.proj.weight, attn.proj.bias = nn.Parameter(weight), old.bias
        made.append("proj.weight")
    attn.__class__ = UniformHeadAttention
    attn.num_heads, attn.attn_dim, attn.learned_heads = total, total * dim, learned
    attn.query_dim, attn.scale, attn.uniform_mix = width, width**-0.5, mix
    return made


def _rows(qkv: nn.Linear, heads: int, dim: int, counts: Sequence[int], widths: Sequence[int]) -> nn.Linear:
    """Return a layer with other numbers of heads and channels of queries, keys and values; values that fit are kept."""
    rows = sum(count * width for count, width in zip(counts, widths, strict=True))
    weight = qkv.weight.detach()
    made = nn.Linear(qkv.in_features, rows, bias=qkv.bias is not None, device=weight.device, dtype=weight.dtype)
    nn.init.trunc_normal_(made.weight, std=0.02)
    targets = [(made.weight, weight)]
    if qkv.bias is not None:
        nn.init.zeros_(made.bias)
        targets.append((made.bias, qkv.bias.detach()))
    with torch.no_grad():
        for target, source in targets:
            sizes = [count * width for count, width in zip(counts, widths, strict=True)]
            for part, own, count, width in zip(target.split(sizes), source.chunk(3), counts, widths, strict=True):
                kept, size = min(count, heads), min(width, dim)
                new = part.unflatten(0, (count, width))
                new[:kept, :size] = own.unflatten(0, (heads, dim))[:kept, :size]
    return made

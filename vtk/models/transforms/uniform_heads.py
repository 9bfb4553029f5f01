"""Uniform attention heads (Hyeon-Woo et al. 2023, Table 1), in which every query gets the mean of all values.

The paper's three variants and their implementation here, with u such heads of H:

- **A** "replace one of the multi-head self-attention heads to be CB": H - u heads are learned, u are uniform. A uniform
  head keeps its values and its part of the projection and has no queries and keys: fewer parameters.
- **B** "adjust the number of parameters of (A) to be comparable to the original": queries and keys of the learned heads
  are widened by H / (H - u), rounded. The paper does not say what it widens.
- **C** "append CB to MSA as an extra head": H learned heads and u more uniform ones of the same width; the projection
  has H + u heads. The paper's ViT-S grows from 22 to 29 million parameters; a head of 64 channels adds 0.6 million. 29
  million are those of a ViT-S of 7 heads and 448 channels with a uniform seventh head: variant A with ``embed_dim=448
  num_heads=7``.

"To be CB" and "uniform attention" are two interpretations: ``mix="uniform"`` is the mean of the values (the uniform
matrix 1/N of the paper's title), ``mix="cb"`` half of it plus half of the token's own value (eq. 1).
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from vtk.errors import UsageError
from vtk.models.initialization.draw import reset
from vtk.models.transforms.blocks import branch_modules, choose_layers, find_blocks
from vtk.models.transforms.registry import register

VARIANTS = ("a", "b", "c")
MIXES = ("uniform", "cb")
_WHAT = "uniform heads"


class UniformHeadAttention(Attention):  # type: ignore[misc]
    """timm's `Attention` whose last heads are uniform.

    Attributes:
        num_heads: H, including uniform ones; the projection has H·D input channels.
        head_dim: D, of values.
        learned_heads: number of heads with queries and keys.
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
            UsageError: a mask, which uniform heads do not support.
        """
        if attn_mask is not None or is_causal:
            raise UsageError("uniform heads take the mean of all tokens and support no mask; leave it out")
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
    """Make attention heads uniform, or add uniform heads, in place.

    Queries, keys and values of learned heads keep their weights, as do values and projection of a replaced head. An
    extra head has random values and a projection of 0, so that the model is initially unchanged; the added channels of
    queries and keys in variant B are random.

    Args:
        model: a timm VisionTransformer, also of parallel branches, or a PiT.
        variant: ``a``, ``b`` or ``c``, as above.
        heads: u, number of uniform heads; at least one learned head must remain.
        mix: ``uniform`` or ``cb``, as above.
        layers: ``all``, ``upper`` (the upper half of the blocks) or block numbers from 0.

    Returns:
        The map from the model's keys to themselves, None for tensors of another shape.

    Raises:
        UsageError: another kind of model or attention, or numbers that do not fit; the model is unchanged.
    """
    for name, value, allowed in (("variant", variant, VARIANTS), ("mix", mix, MIXES)):
        if value not in allowed:
            raise UsageError(f"`{name}` is {value!r}; allowed is {', '.join(allowed)}")
    blocks = find_blocks(model, _WHAT)
    found = [each for i in choose_layers(layers, len(blocks)) for each in branch_modules(*blocks[i], "msa", _WHAT)]
    for name, attn in found:
        _check(name, attn, variant, heads)
    new = set()
    for name, attn in found:
        new |= {f"{name}.{key}" for key in _change(attn, variant, heads, mix)}
    return {key: None if key in new else key for key in model.state_dict()}


def _check(name: str, attn: Any, variant: str, heads: Any) -> None:
    if type(attn) is not Attention:
        raise UsageError(f"{name} is a {type(attn).__name__}; only timm's plain Attention can have {_WHAT}")
    most = attn.num_heads - (variant != "c")
    if type(heads) is not int or not 1 <= heads <= most:
        words = (
            f"1 to {most}, so that one learned head remains"
            if most > 0
            else "none, since the only head must stay learned: use c"
        )
        raise UsageError(f"`heads` is {heads!r}; of the {attn.num_heads} heads of {name} it may be {words}")
    if attn.gate is not None or type(attn.norm) is not nn.Identity:
        raise UsageError(f"{name} has a gate or a norm before its projection; attention with {_WHAT} has neither")
    if variant == "b" and (type(attn.q_norm) is not nn.Identity or type(attn.k_norm) is not nn.Identity):
        raise UsageError(f"{name} has norms for queries of {attn.head_dim} channels, which variant b widens: use a")


def _change(attn: Any, variant: str, heads: int, mix: str) -> list[str]:
    """Change one attention module; return the names of new tensors."""
    before, dim = attn.num_heads, attn.head_dim
    learned = before if variant == "c" else before - heads
    total = before + heads if variant == "c" else before
    width = round(dim * before / learned) if variant == "b" else dim
    new = [f"qkv.{name}" for name, _ in attn.qkv.named_parameters()]
    attn.qkv = _rows(attn.qkv, before, dim, (learned, learned, total), (width, width, dim))
    if total > before:
        old = attn.proj
        attn.proj = nn.Linear(
            total * dim, old.out_features, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype
        )
        weight = F.pad(old.weight.detach(), (0, heads * dim))
        attn.proj.weight, attn.proj.bias = nn.Parameter(weight), old.bias
        new.append("proj.weight")
    attn.__class__ = UniformHeadAttention
    attn.num_heads, attn.attn_dim, attn.learned_heads = total, total * dim, learned
    attn.query_dim, attn.scale, attn.uniform_mix = width, width**-0.5, mix
    return new


def _rows(qkv: nn.Linear, heads: int, dim: int, counts: Sequence[int], widths: Sequence[int]) -> nn.Linear:
    """Return a qkv layer with other numbers of heads and channels; weights that fit are kept."""
    rows = sum(count * width for count, width in zip(counts, widths, strict=True))
    weight = qkv.weight.detach()
    layer = nn.Linear(qkv.in_features, rows, bias=qkv.bias is not None, device=weight.device, dtype=weight.dtype)
    reset(layer, "uniform_heads.qkv")
    targets = [(layer.weight, weight)]
    if qkv.bias is not None:
        targets.append((layer.bias, qkv.bias.detach()))
    with torch.no_grad():
        for target, source in targets:
            sizes = [count * width for count, width in zip(counts, widths, strict=True)]
            for part, own, count, width in zip(target.split(sizes), source.chunk(3), counts, widths, strict=True):
                kept, size = min(count, heads), min(width, dim)
                new = part.unflatten(0, (count, width))
                new[:kept, :size] = own.unflatten(0, (heads, dim))[:kept, :size]
    return layer

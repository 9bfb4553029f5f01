"""Reads the blocks that the memory modes know: their branches, their attention's projections, their FFN's layers.

    sequential: x + γ₁ ⊙ attention(norm(x)), then + γ₂ ⊙ FFN(norm(·)); parallel branches are summed
    FFN: fc2(norm(act(fc1 x)));    gated: fc2(norm(act(gate x) ⊙ value x))

A block is known by its class, exactly: a subclass may compute something else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from timm.layers import Attention, AttentionRope, GluMlp, Mlp, RmsNorm, SwiGLU
from timm.models import beit, eva
from timm.models.vision_transformer import Block, ParallelThingsBlock
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock
from torch import Tensor, nn

from vtk.models.transforms.context_broadcast import ContextParallelBlock, own_class

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]

ARGUMENTS: Mapping[type[nn.Module], tuple[str, ...]] = {
    Block: ("attn_mask", "is_causal"),
    ParallelThingsBlock: ("attn_mask", "is_causal"),
    ContextParallelBlock: ("attn_mask", "is_causal"),
    eva.EvaBlock: ("rope", "attn_mask", "is_causal"),
    beit.Block: ("shared_rel_pos_bias",),
    RelPosBlock: ("shared_rel_pos",),
}
"""What blocks of each known class take behind the tokens, in order."""

ATTENTIONS = (Attention, AttentionRope, eva.EvaAttention, beit.Attention, RelPosAttention)
"""Attention modules whose computation the engine knows."""


class Positions(NamedTuple):
    """What a block is given beside its tokens.

    Attributes:
        rope: (N', 2 D), (H, N', 2 D) or (B, 1 or H, N', 2 D): sines, then cosines, each repeated for its pair, of the
            last N' tokens; or None.
        shared: (1, H, N, N) or (H, N, N), added to the scores; or None.
    """

    rope: Tensor | None = None
    shared: Tensor | None = None


class NormForm(NamedTuple):
    """A norm without its affine part.

    Attributes:
        eps: added to the variance, or to the mean square.
        rms: RMSNorm, not LayerNorm.
    """

    eps: float
    rms: bool


@dataclass(frozen=True)
class Branch:
    """One residual branch: norm, attention or FFN, LayerScale, stochastic depth.

    Attributes:
        norm: LayerNorm or RMSNorm before the module.
        module: attention or FFN.
        scale: LayerScale, Identity, γ (C), or None.
        drop_path: DropPath, or Identity.
    """

    norm: Any
    module: Any
    scale: nn.Module | Tensor | None
    drop_path: nn.Module

    def scaled(self, y: Tensor) -> Tensor:
        """Return γ ⊙ y."""
        if self.scale is None:
            return y
        scaled: Tensor = self.scale * y if isinstance(self.scale, Tensor) else self.scale(y)
        return scaled


@dataclass(frozen=True)
class FfnLayers:
    """The layers of an FFN.

    Attributes:
        first: fc1, or gate and value of a gated FFN with a layer for each.
        rows: rows of the one packed layer that are (gate, value); None where nothing is packed.
        second: fc2.
        norm: LayerNorm or RMSNorm of the hidden layer, or None.
        activation: of fc1, or of the gate; None for one the engine does not know.
        gated: whether there is a value to be multiplied.
    """

    first: tuple[Any, ...]
    rows: tuple[slice, slice] | None
    second: Any
    norm: Any
    activation: Activation | None
    gated: bool


def attention_branches(block: Any) -> list[Branch]:
    """Return the attention branches of a known block; a sequential block has one."""
    if isinstance(block, ParallelThingsBlock):
        return [Branch(b.norm, b.attn, b.ls, b.drop_path) for b in block.attns]
    return [Branch(block.norm1, block.attn, _scale(block, 1), block.drop_path1)]


def ffn_branches(block: Any) -> list[Branch]:
    """Return the FFN branches of a known block."""
    if isinstance(block, ParallelThingsBlock):
        return [Branch(b.norm, b.mlp, b.ls, b.drop_path) for b in block.ffns]
    return [Branch(block.norm2, block.mlp, _scale(block, 2), block.drop_path2)]


def _scale(block: Any, index: int) -> Any:
    name = f"gamma_{index}"
    return getattr(block, name) if hasattr(block, name) else getattr(block, f"ls{index}")


def is_block(module: nn.Module) -> bool:
    """Tell whether ``module`` is of a class that the engine knows, also one that `apply_memory_mode` has changed."""
    return type(module) in ARGUMENTS or ("memory_modes" in module.__dict__ and type(module).__bases__[0] in ARGUMENTS)


def norm_form(norm: Any) -> NormForm:
    """Return what a norm of a known class computes before its affine part."""
    return NormForm(float(norm.eps), isinstance(norm, (RmsNorm, nn.RMSNorm)))


def affine_of(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return γ and β of a norm, each (C) or None."""
    return norm.weight, getattr(norm, "bias", None)


def projections(attn: Any) -> tuple[Any, ...]:
    """Return qkv of an attention module, or its layers for queries, keys and values."""
    return (attn.qkv,) if attn.qkv is not None else (attn.q_proj, attn.k_proj, attn.v_proj)


def projection_bias(attn: Any) -> Tensor | None:
    """Return the bias of queries, keys and values, ((H + 2 Hkv) D), or None."""
    if getattr(attn, "q_bias", None) is not None:
        return torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    layers = projections(attn)
    if len(layers) == 1 or all(layer.bias is None for layer in layers):
        bias: Tensor | None = layers[0].bias
        return bias
    return torch.cat(
        [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
    )


def kv_heads(attn: Any) -> int:
    """Return the number of heads of keys and values."""
    return int(getattr(attn, "num_kv_heads", attn.num_heads))


def head_channels(attn: Any) -> int:
    """Return D, the channels of a head."""
    return int(attn.proj.in_features) // int(attn.num_heads)


def score_bias(attn: Any, shared: Tensor | None) -> Tensor | None:
    """Return what is added to the scores, (H, N, N) or (1, H, N, N): relative positions of a module, or shared ones."""
    own: Tensor | None = None
    if getattr(attn, "relative_position_bias_table", None) is not None:
        own = attn._get_rel_pos_bias()
    elif getattr(attn, "rel_pos", None) is not None:
        own = attn.rel_pos.get_bias()
        shared = None if attn.fused_attn else shared  # as timm's module
    if own is None or shared is None:
        return shared if own is None else own
    return own + shared


def has_score_bias(attn: Any) -> bool:
    """Tell whether an attention module has relative positions of its own."""
    return any(getattr(attn, name, None) is not None for name in ("relative_position_bias_table", "rel_pos"))


def ffn_layers(mlp: Any) -> FfnLayers | None:
    """Return the layers of an FFN of a known class; None for another."""
    kind = own_class(mlp)
    norm = None if isinstance(getattr(mlp, "norm", None), (nn.Identity, type(None))) else mlp.norm
    if kind is SwiGLU:
        return FfnLayers((mlp.fc1_g, mlp.fc1_x), None, mlp.fc2, norm, activation_of(mlp.act), True)
    if kind is GluMlp and mlp.chunk_dim == -1:
        half = mlp.fc1.out_features // 2
        rows = slice(0, half), slice(half, None)
        return FfnLayers(
            (mlp.fc1,), rows[::-1] if mlp.gate_last else rows, mlp.fc2, norm, activation_of(mlp.act), True
        )  # fmt: skip
    if kind is Mlp:
        return FfnLayers((mlp.fc1,), None, mlp.fc2, norm, activation_of(mlp.act), False)
    return None


def activation_of(act: nn.Module) -> Activation | None:
    """Return the name of an activation, None for one that the engine does not know."""
    kind = type(act)
    if kind.__module__.partition(".")[0] not in ("torch", "timm"):
        return None
    if kind.__name__ == "GELU":
        return "gelu" if getattr(act, "approximate", "none") == "none" else "gelu_tanh"
    known: dict[str, Activation] = {"GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu"}
    return known.get(kind.__name__)

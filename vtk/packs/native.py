"""Renames the tensors of timm's Vision Transformers to transformers' own classes, where these compute the same.

``ViTForImageClassification`` has a class token and a plain MLP. ``Dinov2ForImageClassification`` and
``Dinov2WithRegistersForImageClassification`` have LayerScale, registers or SwiGLU too, and their classifier reads the
class token beside the mean of the patches: the half that timm's model does not read gets zeros.

Names are those of published files, which transformers reads since these classes exist. The architectures: Dosovitskiy
et al. 2021; Oquab et al. 2023; Darcet et al. 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, GluMlp, Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vtk.errors import UsageError

_ACTIVATIONS = {
    "GELU": "gelu", "GELUTanh": "gelu_pytorch_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu",
    "Swish": "silu",
}  # fmt: skip


@dataclass(frozen=True)
class Native:
    """A model under transformers' names.

    Attributes:
        config: of ``config.json``, without classes and preprocessing.
        tensors: by name, fp32.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def native_form(model: nn.Module) -> Native:
    """Return a timm model under the names of transformers' own class for it.

    Raises:
        UsageError: transformers has no classifier that computes the same; the message says what differs.
    """
    vit: Any = model
    if type(model) is not VisionTransformer or not all(type(block) is Block for block in vit.blocks):
        kind = type(model).__name__
        if type(model) is VisionTransformer:
            kind += f" of {type(vit.blocks[0]).__name__}"
        raise UsageError(f"timm's VisionTransformer of plain blocks is renamed to these, and this is its {kind}")
    block = vit.blocks[0]
    gated = _mlp_kind(block.mlp)
    pool = vit.global_pool
    if pool not in ("token", "avg") or (pool == "avg" and vit.pool_include_prefix):
        raise UsageError(f"transformers' Vision Transformers do not pool by {pool!r}")
    if not vit.has_class_token or vit.pos_embed is None:
        raise UsageError("transformers' Vision Transformers have a class token and a position table")
    if not isinstance(vit.norm, nn.LayerNorm) or not isinstance(vit.head, nn.Linear):
        raise UsageError("transformers' Vision Transformers have a LayerNorm before one linear classifier")
    if isinstance(vit.fc_norm, nn.LayerNorm):
        raise UsageError("transformers' Vision Transformers have no norm between the mean of the patches and the head")
    reader = _Reader(dict(vit.state_dict()))
    scaled = any(".ls1." in name for name in reader.left)
    wide = gated or pool == "avg" or vit.num_reg_tokens > 0 or (scaled and _ratio(block, gated) is not None)
    height, width = _size(vit)
    if wide and height == width and _ratio(block, gated) is not None:
        native = _dinov2(vit, reader, gated)
    elif gated or pool == "avg" or vit.num_reg_tokens:
        square = "their DINOv2 takes square images" if height != width else "their DINOv2 has another width of the MLP"
        raise UsageError(f"of transformers' classes only DINOv2 has these parts, and {square}")
    else:
        native = _vit(vit, reader)
    if reader.left:
        raise UsageError(f"transformers' {native.config['architectures'][0]} has no place for `{min(reader.left)}`")
    return native


class _Reader:
    """Gives tensors of a state dict, each once; ``left`` are those that nobody asked for."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.left = state

    def __call__(self, name: str) -> Tensor | None:
        value = self.left.pop(name, None)
        return None if value is None else value.detach().float()


def _vit(vit: Any, read: _Reader) -> Native:
    """Return the form of ViT; LayerScale, which it lacks, is multiplied into the layer before it."""
    tensors = _embeddings(vit, read, "vit.embeddings.")
    for i in range(len(vit.blocks)):
        own, new = f"blocks.{i}.", f"vit.encoder.layer.{i}."
        tensors |= _attention(read, own, new)
        for name, module, scale in (
            ("attn.proj", "attention.output.dense", "ls1.gamma"), ("mlp.fc1", "intermediate.dense", ""),
            ("mlp.fc2", "output.dense", "ls2.gamma"), ("norm1", "layernorm_before", ""),
            ("norm2", "layernorm_after", ""),
        ):  # fmt: skip
            gamma = read(own + scale) if scale else None
            tensors |= _layer(read, own + name, new + module, gamma)
    tensors |= _layer(read, "norm", "vit.layernorm") | _layer(read, "head", "classifier")
    mlp = vit.blocks[0].mlp
    config = _config(vit, "vit", "ViTForImageClassification") | {
        "intermediate_size": mlp.fc1.out_features, "hidden_act": _activation(mlp.act),
    }  # fmt: skip
    return Native(config, tensors)


def _dinov2(vit: Any, read: _Reader, gated: bool) -> Native:
    """Return the form of DINOv2, with or without registers."""
    registers = vit.num_reg_tokens
    kind = "dinov2_with_registers" if registers else "dinov2"
    tensors = _embeddings(vit, read, f"{kind}.embeddings.")
    dim = vit.embed_dim
    for i in range(len(vit.blocks)):
        own, new = f"blocks.{i}.", f"{kind}.encoder.layer.{i}."
        tensors |= _attention(read, own, new)
        fc1, fc2 = ("weights_in", "weights_out") if gated else ("fc1", "fc2")
        for name, module in (
            ("attn.proj", "attention.output.dense"), ("mlp.fc1", f"mlp.{fc1}"), ("mlp.fc2", f"mlp.{fc2}"),
            ("norm1", "norm1"), ("norm2", "norm2"),
        ):  # fmt: skip
            tensors |= _layer(read, own + name, new + module)
        for scale in ("1", "2"):
            gamma = read(f"{own}ls{scale}.gamma")
            tensors[f"{new}layer_scale{scale}.lambda1"] = torch.ones(dim) if gamma is None else gamma
    tensors |= _layer(read, "norm", f"{kind}.layernorm") | _layer(read, "head", "classifier")
    head = tensors["classifier.weight"]
    halves = [head, torch.zeros_like(head)]
    tensors["classifier.weight"] = torch.cat(halves if vit.global_pool == "token" else halves[::-1], 1)
    block = vit.blocks[0]
    architecture = "Dinov2WithRegistersForImageClassification" if registers else "Dinov2ForImageClassification"
    config = _config(vit, kind, architecture) | {
        "mlp_ratio": _ratio(block, gated), "use_swiglu_ffn": gated,
        "hidden_act": "silu" if gated else _activation(block.mlp.act),
    }  # fmt: skip
    if registers:  # this class has the token of masked patches always
        config["num_register_tokens"] = registers
        tensors[f"{kind}.embeddings.mask_token"] = torch.zeros(1, dim)
    else:
        config["use_mask_token"] = False
    return Native(config, tensors)


def _embeddings(vit: Any, read: _Reader, new: str) -> dict[str, Tensor]:
    """Return tokens, position table and patch embedding: transformers' table has a row for the class token only."""
    token, table, registers = read("cls_token"), read("pos_embed"), read("reg_token")
    assert token is not None and table is not None
    if vit.no_embed_class:
        table = torch.cat([torch.zeros_like(token), table], 1)
    elif registers is not None:  # the registers' rows, which follow the class token's, become part of the registers
        rows = registers.shape[1]
        registers = registers + table[:, 1 : 1 + rows]
        table = torch.cat([table[:, :1], table[:, 1 + rows :]], 1)
    found = {f"{new}cls_token": token, f"{new}position_embeddings": table}
    if registers is not None:
        found[f"{new}register_tokens"] = registers
    found |= _layer(read, "patch_embed.proj", f"{new}patch_embeddings.projection")
    found.setdefault(f"{new}patch_embeddings.projection.bias", torch.zeros(vit.embed_dim))
    return found


def _attention(read: _Reader, own: str, new: str) -> dict[str, Tensor]:
    """Return queries, keys and values, which are one matrix in timm."""
    found = {}
    for leaf in ("weight", "bias"):
        value = read(f"{own}attn.qkv.{leaf}")
        if value is not None:
            for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[f"{new}attention.attention.{part}.{leaf}"] = rows
    return found


def _layer(read: _Reader, own: str, new: str, gamma: Tensor | None = None) -> dict[str, Tensor]:
    """Return weight and bias of a layer, multiplied by ``gamma`` (outputs,) if there is one."""
    found = {}
    for leaf in ("weight", "bias"):
        value = read(f"{own}.{leaf}")
        if value is not None:
            scale = None if gamma is None else gamma[:, None] if value.ndim == 2 else gamma
            found[f"{new}.{leaf}"] = value if scale is None else value * scale
    return found


def _config(vit: Any, kind: str, architecture: str) -> dict[str, Any]:
    attention, size, patch = vit.blocks[0].attn, _size(vit), vit.patch_embed.patch_size
    norms = {m.eps for m in vit.modules() if isinstance(m, nn.LayerNorm)}
    if type(attention) is not Attention or attention.attn_dim != vit.embed_dim or attention.proj.bias is None:
        raise UsageError("transformers' Vision Transformers have no attention of this kind")
    if len(norms) != 1:
        raise UsageError("transformers' Vision Transformers have LayerNorms of one epsilon")
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": vit.embed_dim,
        "num_hidden_layers": len(vit.blocks),
        "num_attention_heads": attention.num_heads,
        "qkv_bias": attention.qkv.bias is not None,
        "layer_norm_eps": norms.pop(),
        "image_size": size[0] if size[0] == size[1] else list(size),
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "num_channels": vit.patch_embed.proj.in_channels,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _size(vit: Any) -> tuple[int, int]:
    rows, columns = vit.patch_embed.grid_size
    return rows * vit.patch_embed.patch_size[0], columns * vit.patch_embed.patch_size[1]


def _mlp_kind(mlp: nn.Module) -> bool:
    """Return whether an MLP is SwiGLU; refuse what is neither that nor a plain one."""
    if type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear) and mlp.fc1.bias is not None:
        return False
    if type(mlp) is GluMlp and type(mlp.act).__name__ in ("SiLU", "Swish") and not mlp.gate_last:
        return True
    raise UsageError(f"transformers' Vision Transformers have no MLP like timm's {type(mlp).__name__}")


def _activation(act: nn.Module) -> str:
    name = type(act).__name__
    if name == "GELU" and getattr(act, "approximate", "none") == "tanh":
        name = "GELUTanh"
    if name not in _ACTIVATIONS:
        raise UsageError(f"transformers has no activation like timm's {name}")
    return _ACTIVATIONS[name]


def _ratio(block: Any, gated: bool) -> int | None:
    """Return the whole number by which DINOv2's config gives the width of the MLP; None if there is none."""
    dim, hidden = block.attn.qkv.in_features, block.mlp.fc2.in_features
    rule: Callable[[int], int] = (lambda wide: (int(wide * 2 / 3) + 7) // 8 * 8) if gated else (lambda wide: wide)
    return next((ratio for ratio in range(1, 33) if rule(dim * ratio) == hidden), None)

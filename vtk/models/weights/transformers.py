"""Renames tensors of transformers' DINOv3, DINOv2, ViT and DeiT models to the names of their original code and timm's.

Both names of a release are read: those in its files, and those of its modules since version 5 (``attention.q_proj`` is
``attention.attention.query`` in a file of DINOv2). Queries, keys and values are separate there and one matrix in timm.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.errors import DataError
from vtk.formats import read_json

_PATCHES = re.compile(r"(.*)embeddings\.patch_embeddings\.(?:projection\.)?weight")
_BLOCK = re.compile(r"(?:encoder\.|model\.)?layers?\.(\d+)\.(.+)\.(\w+)")
_EMBEDDINGS = {
    "cls_token": "cls_token", "mask_token": "mask_token", "register_tokens": "register_tokens",
    "distillation_token": "dist_token", "position_embeddings": "pos_embed",
    "patch_embeddings.weight": "patch_embed.proj.weight", "patch_embeddings.bias": "patch_embed.proj.bias",
    "patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "patch_embeddings.projection.bias": "patch_embed.proj.bias",
}  # fmt: skip
_MODULES = {
    "norm1": "norm1", "layernorm_before": "norm1", "norm2": "norm2", "layernorm_after": "norm2",
    "attention.output.dense": "attn.proj", "attention.o_proj": "attn.proj",
    "layer_scale1": "ls1", "layer_scale2": "ls2",
    "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    "mlp.weights_in": "mlp.fc1", "mlp.weights_out": "mlp.fc2", "mlp.down_proj": "mlp.fc2",
}  # fmt: skip
_PLAIN = {"mlp.up_proj": "mlp.fc1"}
_GATED = {"mlp.gate_proj": "mlp.w1", "mlp.up_proj": "mlp.w2", "mlp.down_proj": "mlp.w3"}
"""The FFN of DINOv3, whose gate and value stay apart."""
_QKV = {
    **{f"attention.attention.{part}": ("attn.qkv", i) for i, part in enumerate(("query", "key", "value"))},
    **{f"attention.{part}_proj": ("attn.qkv", i) for i, part in enumerate("qkv")},
}
_PACKED = {"mlp.gate_proj": ("mlp.fc1", 0), "mlp.up_proj": ("mlp.fc1", 1)}
"""The SwiGLU of DINOv2, which is one matrix in its files."""
_HEADS = {"classifier": "head", "cls_classifier": "head", "distillation_classifier": "head_dist"}


def is_transformers(keys: Iterable[str]) -> bool:
    """Return whether state-dict keys are those of one of transformers' Vision Transformers."""
    return any(_PATCHES.fullmatch(key) for key in keys)


def rename(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the tensors under the names of DINOv3's own code, or of timm for the other models.

    Names without a place there, such as a pooling layer's, are kept as they are.

    Args:
        tensors: of the file.
        path: of the file, for messages.

    Raises:
        DataError: queries, keys or values of one layer are missing or do not fit each other.
    """
    prefix = next(match[1] for key in tensors if (match := _PATCHES.fullmatch(key)))
    rotary = f"{prefix}embeddings.position_embeddings" not in tensors
    gated = any(key.endswith(".mlp.gate_proj.weight") for key in tensors)
    modules = {**_MODULES, **((_GATED if gated else _PLAIN) if rotary else {})}
    rows = _QKV if rotary else {**_QKV, **_PACKED}
    wide = _reads_patches(tensors, prefix)
    result: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for key, value in tensors.items():
        own = key.removeprefix(prefix) if key.startswith(prefix) else ""
        module, _, leaf = key.rpartition(".")
        block = _BLOCK.fullmatch(own)
        if block and block[2] in rows:
            joined, row = rows[block[2]]
            parts.setdefault(f"blocks.{block[1]}.{joined}.{leaf}", {})[row] = value
            continue
        if block and block[2] in modules:
            new = f"blocks.{block[1]}.{modules[block[2]]}.{'gamma' if leaf == 'lambda1' else leaf}"
        elif own in ("norm.weight", "norm.bias", "layernorm.weight", "layernorm.bias"):
            new = f"norm.{leaf}"
        elif module in _HEADS and not wide:
            new = f"{_HEADS[module]}.{leaf}"
        else:
            new = _EMBEDDINGS.get(own.removeprefix("embeddings."), key)
        if new in result:
            raise DataError(f"{path} has `{new}` twice, under two names; give the file as transformers wrote it")
        result[new] = value
    for name, found in parts.items():
        result[name] = _join(found, name, path)
    if "register_tokens" in result:
        _place_registers(result, rotary)
    return result


def check_config(path: Path, model: Any, name: str) -> None:
    """Compare the ``config.json`` beside a file with timm's model, in what the shapes of tensors do not show.

    Raises:
        DataError: another number of heads, or another base of the rotary embedding.
    """
    beside = path.parent / "config.json"
    if not beside.is_file():
        return
    config = read_json(beside)
    if not isinstance(config, Mapping):
        return
    heads = next((m.num_heads for m in model.modules() if isinstance(getattr(m, "num_heads", None), int)), None)
    base = getattr(getattr(model, "rope", None), "temperature", None)
    for key, own, flag in (("num_attention_heads", heads, "num_heads"), ("rope_theta", base, "rope_temperature")):
        stored = config.get(key)
        if own is not None and isinstance(stored, (int, float)) and stored != own:
            value = str(stored)[:20]
            raise DataError(
                f"{beside} has `{key}` {value}, and `{name}` has {own:g}, so outputs would differ; give another "
                f"--model, or --model-kwargs {flag}={value}"
            )


def _reads_patches(tensors: Mapping[str, Tensor], prefix: str) -> bool:
    """Return whether the classifier reads more than the class token: DINOv2's also has the mean of the patches."""
    head, token = tensors.get("classifier.weight"), tensors.get(f"{prefix}embeddings.cls_token")
    return head is not None and token is not None and head.shape[-1:] != token.shape[-1:]


def _join(found: Mapping[int, Tensor], name: str, path: Path) -> Tensor:
    """Return the rows of queries, keys and values, or of gate and value, as one tensor; a missing bias is zero."""
    count, first = 3 if ".qkv." in name else 2, next(iter(found.values()))
    fit = len({(value.shape, value.dtype) for value in found.values()}) == 1
    if not fit or first.ndim < 1 or (not name.endswith(".bias") and len(found) != count):
        given = ", ".join(str(tuple(value.shape)) for value in found.values())
        raise DataError(f"{path} has {len(found)} of {count} parts of `{name}`, of shape {given}; is it complete?")
    return torch.cat([found.get(i, torch.zeros_like(first)) for i in range(count)])


def _place_registers(tensors: dict[str, Tensor], rotary: bool) -> None:
    """Name the registers; where there is a position table, add its first row to the class token, as timm does.

    The tensors are changed in place.
    """
    tensors["storage_tokens" if rotary else "reg_token"] = tensors.pop("register_tokens")
    table, token = tensors.get("pos_embed"), tensors.get("cls_token")
    if table is not None and token is not None and table.ndim == 3 and table.shape[-1] == token.shape[-1]:
        tensors["cls_token"], tensors["pos_embed"] = token + table[:, :1], table[:, 1:]

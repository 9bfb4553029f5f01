"""Reads timm's attention modules: queries, keys and values as matrices of their own, whatever form they are kept in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, AttentionRope, DiffAttention
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from vtk.fused.checks import check_scale, check_silent, head_dim, is_exactly, is_identity
from vtk.fused.norms import Affine, NormSpec, read_linear, read_norm, refusal

Linear = tuple[Tensor, Tensor]
"""Weight (rows, columns) and bias (rows), zeros where there is none."""

DIFFERENTIAL = "differential attention, which subtracts one softmax from another"
"""Why that is refused."""

Norm = tuple[NormSpec, Affine]


@dataclass(frozen=True)
class AttentionParts:
    """An attention module, read; H heads of D channels, keys and values of K heads.

    Attributes:
        q: (H·D, C), (H·D).
        k, v: (K·D, C), (K·D).
        out: (C, H·D), (C).
        num_heads: H.
        num_kv_heads: K, of which H is a multiple: head h reads keys and values h // (H/K).
        head_dim: D.
        q_norm, k_norm: over the channels of a head.
        sub_norm: of all heads' outputs, before the gate and the projection.
        gate: (H·D, C), (H·D): the output is multiplied by the sigmoid of it.
        rotate_half: which channels a rotary embedding turns together, None for a module that knows none.
        num_prefix_tokens: that it leaves unrotated.
        biases: modules of relative positions, whose sum is added to the scores.
    """

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sub_norm: Norm | None = None
    gate: Linear | None = None
    rotate_half: bool | None = None
    num_prefix_tokens: int = 0
    biases: Sequence[Any] = ()


def read_attention(attn: Any, like: Tensor, where: str) -> AttentionParts:
    """Read an attention module of timm.

    Args:
        attn: one of `READERS`, also with Context Broadcasting attached.
        like: device and dtype of the result.
        where: its name in the model, for messages.

    Raises:
        UsageError: a module or a part of one that is not known.
    """
    for kind, read in READERS.items():
        if is_exactly(attn, kind):
            check_scale(attn, where)
            check_silent(attn, where, "attn_drop", "proj_drop")
            return read(attn, like, where)
    if isinstance(attn, DiffAttention):
        raise refusal(where, attn, DIFFERENTIAL)
    known = ", ".join(dict.fromkeys(kind.__name__ for kind in READERS))
    raise refusal(where, attn, f"only timm's {known} are known here")


def common_parts(attn: Any, like: Tensor, where: str) -> dict[str, Any]:
    """Return what timm's attention modules have in common, by the names of `AttentionParts`."""
    found: dict[str, Any] = {
        "out": read_linear(attn.proj, like, f"{where}.proj"),
        "num_heads": attn.num_heads,
        "num_kv_heads": getattr(attn, "num_kv_heads", attn.num_heads),
        "head_dim": head_dim(attn),
    }
    if hasattr(attn, "q_norm"):  # BEiT's has none
        found["q_norm"], found["k_norm"] = read_head_norms(attn, like, where)
    norm = getattr(attn, "norm", None)
    found["sub_norm"] = None if norm is None or is_identity(norm) else read_norm(norm, like, f"{where}.norm")
    if getattr(attn, "gate", None) is not None:
        found["gate"] = read_linear(attn.gate, like, f"{where}.gate")
    return found


def read_head_norms(module: Any, like: Tensor, where: str) -> tuple[Norm | None, Norm | None]:
    """Return the norms of q and k over the channels of a head, both None for none.

    Raises:
        UsageError: one is no known norm, or only one of them is there.
    """
    names = ("q_norm", "k_norm")
    found = [None if is_identity(part := getattr(module, name)) else read_norm(part, like, f"{where}.{name}")
             for name in names]  # fmt: skip
    for name, norm, other in zip(names, found, reversed(found), strict=True):
        if norm is not None and other is None:
            raise refusal(f"{where}.{name}", getattr(module, name), "of queries and keys only one are normalised")
    q, k = found
    return q, k


def packed_parts(attn: Any, like: Tensor, where: str) -> dict[str, Any]:
    """Return q, k and v of a packed matrix ``qkv`` (3·H·D, C); EVA and BEiT have their biases beside it."""
    weight, bias = read_linear(attn.qkv, like, f"{where}.qkv")
    own = [getattr(attn, name, None) for name in ("q_bias", "k_bias", "v_bias")]
    if own[0] is not None:
        bias = bias + torch.cat([part.detach().to(like.dtype) for part in own if part is not None])
    return dict(zip("qkv", zip(weight.chunk(3), bias.chunk(3), strict=True), strict=True))


def _read_plain(attn: Any, like: Tensor, where: str) -> AttentionParts:
    return AttentionParts(**packed_parts(attn, like, where), **common_parts(attn, like, where))


def _read_rotated(attn: Any, like: Tensor, where: str) -> AttentionParts:
    """Read a module with a rotary embedding, its matrices packed or not, its biases (EVA) beside the matrix."""
    if attn.qkv is None:
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
        packed: Any = {key: read_linear(getattr(attn, name), like, f"{where}.{name}") for key, name in names.items()}
    else:
        packed = packed_parts(attn, like, where)
    return AttentionParts(
        **packed,
        **common_parts(attn, like, where),
        rotate_half=bool(getattr(attn, "rotate_half", False)),
        num_prefix_tokens=attn.num_prefix_tokens,
    )


READERS: dict[type[nn.Module], Callable[[Any, Tensor, str], AttentionParts]] = {
    Attention: _read_plain,
    AttentionRope: _read_rotated,
    EvaAttention: _read_rotated,
}
"""What reads each of timm's attention modules; families add theirs."""

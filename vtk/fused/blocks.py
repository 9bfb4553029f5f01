"""Converts blocks of timm's VisionTransformer into folded stages; refuses one that it does not know exactly."""

from typing import Any

import timm.models.vision_transformer as vit
import torch
from torch import Tensor

from vtk.fused.attention_parts import DIFFERENTIAL, read_head_norms
from vtk.fused.attention_stage import AttentionStage, QkNorm
from vtk.fused.checks import check_order, check_scale, check_silent, copied, is_exactly
from vtk.fused.fold import Branch, centred, fold_attention, fold_input, fold_mlp, layer_scale
from vtk.fused.mlp_stage import MlpStage, ScalingStage
from vtk.fused.norms import POST_NORM, read_linear, read_norm, refusal
from vtk.fused.stages import Stage
from vtk.models.transforms.extra_block import SublayerBlock

KNOWN = "Block, ParallelThingsBlock and ParallelScalingBlock"


def fold_block(block: Any, like: Tensor, where: str = "block", *, ffn: bool = True) -> list[Stage]:
    """Return the stages of one block of a timm Vision Transformer.

    Args:
        block: a `Block` (before it, attention; after it, FFN), a `ParallelThingsBlock` of any number of branches
            (Touvron et al. 2022), a `ParallelScalingBlock` (ViT-22B) or a `SublayerBlock` of one branch, with or
            without LayerScale, qk-norm, Context Broadcasting.
        like: device and dtype of the arithmetic; its values do not matter.
        where: the block's name in the model, for messages.
        ffn: False to leave the FFN out, where it is a stage of its own.

    Raises:
        UsageError: the block, or a part of it, is of another kind.
    """
    if is_exactly(block, vit.Block):
        attention = Branch(block, where, ("norm1", "attn", "ls1", "drop_path1"))
        mlp = Branch(block, where, ("norm2", "mlp", "ls2", "drop_path2"))
        return [fold_attention([attention], like), *([fold_mlp([mlp], like)] if ffn else [])]
    if is_exactly(block, vit.ParallelThingsBlock):
        attns, ffns = _branches(block, where, "attns", "attn"), _branches(block, where, "ffns", "mlp")
        return [
            fold_attention(attns, like, end=getattr(block, "cb_msa", None)),
            *([fold_mlp(ffns, like, end=getattr(block, "cb", None))] if ffn else []),
        ]
    if is_exactly(block, SublayerBlock):
        branch = Branch(block, where, ("norm", block.leaf, "ls", "drop_path"))
        if block.leaf == "attn":
            return [fold_attention([branch], like)]
        return [fold_mlp([branch], like)] if ffn else []
    if is_exactly(block, vit.ParallelScalingBlock):
        return [_fold_scaling(block, like, where)]
    if is_exactly(block, vit.ResPostBlock):
        raise refusal(where, block, POST_NORM)
    if isinstance(block, vit.DiffParallelScalingBlock):
        raise refusal(where, block, DIFFERENTIAL)
    raise refusal(where, block, f"known blocks are {KNOWN}")


def _branches(block: Any, where: str, side: str, body: str) -> list[Branch]:
    names = ("norm", body, "ls", "drop_path")
    branches = [Branch(parent, f"{where}.{side}.{i}", names) for i, parent in enumerate(getattr(block, side))]
    for branch in branches:
        check_order(branch.parent, branch.where, names)
    return branches


def _fold_scaling(block: Any, like: Tensor, where: str) -> ScalingStage:
    check_scale(block, where)
    check_silent(block, where, "attn_drop", "mlp_drop", "drop_path")
    norm, affine = read_norm(block.in_norm, like, f"{where}.in_norm")
    hidden, dim = block.in_split[0], block.in_split[1]
    weight, offset = fold_input(*read_linear(block.in_proj, like, f"{where}.in_proj"), affine)
    weight = centred(weight, norm)
    if block.mlp_bias is not None:
        offset = torch.cat((offset[:hidden] + block.mlp_bias.detach().to(like.dtype), offset[hidden:]))
    scale = layer_scale(block.ls, like, f"{where}.ls")
    if block.out_proj is not None:
        both, bias = read_linear(block.out_proj, like, f"{where}.out_proj")
        outs = both.split((dim, hidden), 1)
    else:
        first, bias = read_linear(block.attn_out_proj, like, f"{where}.attn_out_proj")
        second, more = read_linear(block.mlp_out_proj, like, f"{where}.mlp_out_proj")
        outs, bias = (first, second), bias + more
    bias = bias * scale
    none = like.new_zeros(dim)
    common: dict[str, Any] = {"norm": norm, "branches": 1, "front": None, "end": None}

    w_qkv, b_qkv = weight[hidden:].clone(), offset[hidden:].clone()
    qk_norm = _scaling_qk_norm(block, like, where)
    if qk_norm is None:
        w_qkv[:dim] *= block.head_dim**-0.5
        b_qkv[:dim] *= block.head_dim**-0.5
    attention = AttentionStage(
        **common, bias=none, w_qkv=w_qkv, b_qkv=b_qkv, w_out=outs[0] * scale[:, None],
        num_heads=block.num_heads, head_dim=block.head_dim, qk_norm=qk_norm,
    )  # fmt: skip
    mlp = MlpStage(
        **common, bias=none, w_in=weight[:hidden], b_in=offset[:hidden], w_out=outs[1] * scale[:, None],
        act=copied(block.mlp_act), mid=None,
    )  # fmt: skip
    return ScalingStage(attention, mlp, **common, bias=bias)


def _scaling_qk_norm(block: Any, like: Tensor, where: str) -> QkNorm | None:
    q, k = read_head_norms(block, like, where)
    if q is None or k is None:
        return None
    if q[0] != k[0]:
        raise refusal(where, block, "q and k are normalised differently")
    affine = {}
    for side, (_, values), factor in (("q", q, block.head_dim**-0.5), ("k", k, 1.0)):
        affine[f"{side}_weight"] = (values.weight * factor).expand(block.num_heads, -1)
        affine[f"{side}_bias"] = (values.bias * factor).expand(block.num_heads, -1)
    return QkNorm(q[0], 1, affine)

"""The arithmetic of folding: norms' affine parts, 1/√D and LayerScale go into the matrices, in fp32 or fp64.

With x̂ = (x − μ)/σ, one norm (g, b) and LayerScale s per branch i:
Wqkvᵢ′ = Wqkvᵢ·diag(gᵢ), bqkvᵢ′ = bqkvᵢ + Wqkvᵢ·bᵢ, the rows of q also times 1/√D; Wprojᵢ′ = diag(sᵢ)·Wprojᵢ.
The FFN alike; a norm before the second layer goes into that one likewise. All branches read the same x̂, so their rows
stack, and their outputs' columns stand side by side.

Behind a LayerNorm x̂ has mean 0, so a constant added to a row of W′ changes nothing. The rows are given mean 0: then
W′x̂ = W′x/σ, and a product can read x itself (`vtk.fused.stage_input`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from vtk.fused.attention_parts import AttentionParts, Linear, Norm, read_attention
from vtk.fused.attention_stage import AttentionStage, QkNorm
from vtk.fused.checks import check_silent, is_identity, shared_activation
from vtk.fused.glu_stage import GluStage
from vtk.fused.mlp_parts import read_mlp
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.norms import Affine, NormSpec, read_norm, refusal
from vtk.fused.relative_bias import read_bias
from vtk.fused.stages import Context
from vtk.models.transforms.context_broadcast import ContextBroadcast


@dataclass(frozen=True)
class Branch:
    """One branch of a stage.

    Attributes:
        parent: a block of timm, or the Sequential of one branch; untyped, since timm declares no attribute types.
        where: the parent's name in the model.
        names: of its norm, attention or FFN, LayerScale and stochastic depth.
    """

    parent: Any
    where: str
    names: tuple[str, str, str, str]

    @property
    def norm(self) -> Any:
        """The norm before the body."""
        return getattr(self.parent, self.names[0])

    @property
    def body(self) -> Any:
        """Attention or FFN."""
        return getattr(self.parent, self.names[1])

    @property
    def scale(self) -> Any:
        """LayerScale, or the identity."""
        return getattr(self.parent, self.names[2])

    def name(self, i: int = 1) -> str:
        """Return the name in the model of the part ``names[i]``, by default the body."""
        return f"{self.where}.{self.names[i]}"


def fold_attention(
    branches: Sequence[Branch], like: Tensor, end: ContextBroadcast | None = None, *, rotary: int | None = None,
    shared_bias: Any = None,
) -> AttentionStage:  # fmt: skip
    """Fold and merge attentions that read the same tokens.

    Args:
        branches: at least one; all with the same heads.
        like: device and dtype of the arithmetic.
        end: Context Broadcasting of their sum, of a parallel block.
        rotary: which of the model's rotary tables turns q and k; None for none.
        shared_bias: the model's module of relative positions, added to the attention's own; None for none.

    Raises:
        UsageError: a part that this version does not know.
    """
    norm, affines = _norms(branches, like)
    front, own_end = _placements(branches, like, allowed=("front", "end"))
    parts = [read_attention(branch.body, like, branch.name()) for branch in branches]
    first = parts[0]
    rows: dict[str, list[Linear]] = {name: [] for name in ("q", "k", "v", "gate")}
    w_out, bias = [], like.new_zeros(affines[0].weight.shape)
    for branch, affine, part in zip(branches, affines, parts, strict=True):
        check_silent(branch.parent, branch.where, branch.names[3])
        if _heads(part) != _heads(first):
            raise refusal(branch.name(), branch.body, "the branches of a block have different heads")
        for name, found in rows.items():
            if linear := getattr(part, name):
                w, b = fold_input(linear[0], linear[1], affine, front)
                found.append((centred(w, norm, front), b))
        scale = layer_scale(branch.scale, like, branch.name(2))
        out, offset = fold_output(*part.out, None if part.gate is not None else part.sub_norm)
        w_out.append(out * scale[:, None])
        bias = bias + offset * scale
    qk_norm = _qk_norm(branches, parts)
    if qk_norm is None:
        factor = first.head_dim**-0.5
        rows["q"] = [(w * factor, b * factor) for w, b in rows["q"]]
    w_qkv, b_qkv = _stacked(rows["q"] + rows["k"] + rows["v"])
    biases = [*first.biases, *([] if shared_bias is None else [shared_bias])]
    if biases and len(branches) > 1:
        raise refusal(branches[0].name(), branches[0].body, "parallel branches with a bias of the scores are not known")
    sub_norm, sub_affine = _sub_norm(branches, [part.sub_norm for part in parts])
    if first.rotate_half is None and rotary is not None:
        raise refusal(branches[0].name(), branches[0].body, "it knows no rotary embedding")
    return AttentionStage(
        norm=norm, branches=len(branches), bias=bias, front=front, end=_context(end, like) or own_end,
        w_qkv=w_qkv, b_qkv=b_qkv, w_out=torch.cat(w_out, 1),
        num_heads=len(branches) * first.num_heads, num_kv_heads=len(branches) * first.num_kv_heads,
        head_dim=first.head_dim, qk_norm=qk_norm, sub_norm=sub_norm,
        sub_affine=sub_affine if rows["gate"] else None, gate=_stacked(rows["gate"]) if rows["gate"] else None,
        rotary=rotary, rotate_half=bool(first.rotate_half), attn_bias=read_bias(biases, like, branches[0].name()),
    )  # fmt: skip


def fold_mlp(branches: Sequence[Branch], like: Tensor, end: ContextBroadcast | None = None) -> MlpStage:
    """Fold and merge FFNs, plain or gated, that read the same tokens; arguments as of `fold_attention`."""
    norm, affines = _norms(branches, like)
    front, own_end = _placements(branches, like, allowed=("front", "mid", "end"))
    parts = [read_mlp(branch.body, like, branch.name()) for branch in branches]
    gated = parts[0].gate is not None
    rows: dict[str, list[Linear]] = {"gate": [], "fc1": []}
    w_out, mids = [], []
    bias = like.new_zeros(affines[0].weight.shape)
    for branch, affine, part in zip(branches, affines, parts, strict=True):
        check_silent(branch.parent, branch.where, branch.names[3])
        if (part.gate is not None) != gated:
            raise refusal(branch.name(), branch.body, "some of its block's branches are gated and others are not")
        for name, found in rows.items():
            if linear := getattr(part, name):
                w, b = fold_input(linear[0], linear[1], affine, front)
                found.append((centred(w, norm, front), b))
        scale = layer_scale(branch.scale, like, branch.name(2))
        if getattr(branch.body, "cb_placement", None) == "mid":
            if part.sub_norm is not None:
                raise refusal(branch.name(), branch.body, "its hidden layer has a norm and Context Broadcasting")
            mids.append(_context(branch.body.cb, like))
        out, offset = fold_output(*part.out, part.sub_norm)
        w_out.append(out * scale[:, None])
        bias = bias + offset * scale
    mid = None
    if mids:
        scales = [c.scale for c in mids if c is not None and c.scale is not None]
        mid = Context(torch.cat(scales) if scales else None)
    act = shared_activation([part.act for part in parts], [b.name() for b in branches])
    w_in, b_in = _stacked(rows["gate"] + rows["fc1"])
    kind = GluStage if gated else MlpStage
    return kind(
        norm=norm, branches=len(branches), bias=bias, front=front, end=_context(end, like) or own_end,
        w_in=w_in, b_in=b_in, w_out=torch.cat(w_out, 1), act=act, mid=mid,
        sub_norm=_sub_norm(branches, [part.sub_norm for part in parts])[0],
    )  # fmt: skip


def fold_output(weight: Tensor, bias: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Fold a norm of what a stage's second layer reads into that layer: (C, K), (C)."""
    if norm is None:
        return weight, bias
    spec, affine = norm
    weight, bias = fold_input(weight, bias, affine)
    return centred(weight, spec), bias


def fold_input(weight: Tensor, bias: Tensor, affine: Affine, front: Context | None = None) -> tuple[Tensor, Tensor]:
    """Fold a norm's affine part into the linear layer behind it: (rows, C), (rows).

    Context Broadcasting between the two keeps constants, so b passes through; CB_S makes them b·(1 + Λ).
    """
    shift = affine.bias if front is None or front.scale is None else affine.bias * (1 + front.scale)
    return weight * affine.weight, bias + weight @ shift


def centred(weight: Tensor, norm: NormSpec, front: Context | None = None) -> Tensor:
    """Return a folded matrix (rows, C) with the mean of each row taken away, where that changes no product.

    It changes none where what it multiplies has mean 0 over the channels: LayerNorm's output, also after Context
    Broadcasting, which mixes tokens; not after CB_S, whose Λ differs between channels, and not RMSNorm's.
    """
    if norm.kind != "layer" or (front is not None and front.scale is not None):
        return weight
    return weight - weight.mean(-1, keepdim=True)


def layer_scale(module: Any, like: Tensor, where: str) -> Tensor:
    """Return LayerScale's factors (C), or a 1 for none.

    Args:
        module: a LayerScale, a parameter of its factors (Eva, BEiT), or None or the identity for none.
        like: device and dtype of the result.
        where: its name in the model.

    Raises:
        UsageError: something else.
    """
    if isinstance(module, nn.Parameter):
        return _cast(module, like)
    if module is None or is_identity(module):
        return like.new_ones(1)
    if type(module) is LayerScale:
        return _cast(module.gamma, like)
    raise refusal(where, module, "it stands where LayerScale is expected")


def _norms(branches: Sequence[Branch], like: Tensor) -> tuple[NormSpec, list[Affine]]:
    found = [read_norm(b.norm, like, b.name(0)) for b in branches]
    if any(spec != found[0][0] for spec, _ in found):
        raise refusal(branches[0].name(0), branches[0].norm, "the branches of a block are normalised differently")
    return found[0][0], [affine for _, affine in found]


def _placements(
    branches: Sequence[Branch], like: Tensor, allowed: tuple[str, ...]
) -> tuple[Context | None, Context | None]:
    """Return the Context Broadcasting (front, end) that the bodies carry themselves."""
    kinds = {
        getattr(b.body, "cb_placement", None) if getattr(b.body, "cb", None) is not None else None for b in branches
    }
    if kinds == {None}:
        return None, None
    first = branches[0]
    kind = next(iter(kinds))
    if len(kinds) > 1 or kind not in allowed:
        raise refusal(first.name(), first.body, f"its Context Broadcasting sits at {', '.join(map(str, kinds))}")
    context = _context(first.body.cb, like)
    scaled = [b.body.cb.scale is not None for b in branches]
    if any(scaled) != all(scaled):
        raise refusal(first.name(), first.body, "some of its block's branches have CB, others CB_S")
    if kind == "mid":
        return None, None
    if len(branches) > 1 and any(scaled):
        raise refusal(first.name(), first.body, f"CB_S at the {kind} of parallel branches has a Λ for each of them")
    return (context, None) if kind == "front" else (None, context)


def _context(module: ContextBroadcast | None, like: Tensor) -> Context | None:
    if module is None:
        return None
    return Context(None if module.scale is None else _cast(module.scale, like))


def _stacked(layers: Sequence[Linear]) -> Linear:
    """Return the rows of several linear layers as one."""
    return torch.cat([w for w, _ in layers]), torch.cat([b for _, b in layers])


def _heads(part: AttentionParts) -> tuple[object, ...]:
    return part.num_heads, part.num_kv_heads, part.head_dim, part.rotate_half, part.gate is None, not part.biases


def _qk_norm(branches: Sequence[Branch], parts: Sequence[AttentionParts]) -> QkNorm | None:
    found = [(part.q_norm, part.k_norm) for part in parts]
    if all(q is None and k is None for q, k in found):
        return None
    specs: list[NormSpec | None] = []
    affine: dict[str, list[Tensor]] = {f"{side}_{name}": [] for side in "qk" for name in ("weight", "bias")}
    for part, norms in zip(parts, found, strict=True):
        sides = (("q", part.num_heads, part.head_dim**-0.5), ("k", part.num_kv_heads, 1.0))
        for (side, heads, factor), norm in zip(sides, norms, strict=True):
            specs.append(None if norm is None else norm[0])
            if norm is not None:
                for name in ("weight", "bias"):
                    affine[f"{side}_{name}"].append((getattr(norm[1], name) * factor).expand(heads, -1))
    first = specs[0]
    if first is None or any(spec != first for spec in specs):
        raise refusal(branches[0].name(), branches[0].body, "q and k, or its branches, are normalised differently")
    return QkNorm(first, len(branches), {name: torch.cat(values) for name, values in affine.items()})


def _sub_norm(branches: Sequence[Branch], norms: Sequence[Norm | None]) -> tuple[NormSpec | None, Affine | None]:
    """Return the norm of all branches' outputs, and their affine parts side by side."""
    found = [norm for norm in norms if norm is not None]
    if not found:
        return None, None
    if len(found) < len(norms) or any(spec != found[0][0] for spec, _ in found):
        raise refusal(branches[0].name(), branches[0].body, "its block's branches are normalised differently")
    sides = zip(*((affine.weight, affine.bias) for _, affine in found), strict=True)
    return found[0][0], Affine(*(torch.cat(side) for side in sides))


def _cast(value: Tensor, like: Tensor) -> Tensor:
    return value.detach().to(like.dtype)

"""The arithmetic of folding: norms' affine parts, 1/√D and LayerScale go into the matrices, in fp32 or fp64.

With x̂ = (x − μ)/σ, one norm (g, b) and LayerScale s per branch i:
Wqkvᵢ′ = Wqkvᵢ·diag(gᵢ), bqkvᵢ′ = bqkvᵢ + Wqkvᵢ·bᵢ, the rows of q also times 1/√D; Wprojᵢ′ = diag(sᵢ)·Wprojᵢ.
The FFN alike. All branches read the same x̂, so their rows stack, and their outputs' columns stand side by side.

Behind a LayerNorm x̂ has mean 0, so a constant added to a row of W′ changes nothing. The rows are given mean 0: then
W′x̂ = W′x/σ, and a product can read x itself (`vtk.fused.stage_input`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor

from vtk.fused.attention_stage import AttentionStage, QkNorm
from vtk.fused.batch_norms import fold_token_norm
from vtk.fused.checks import check_attention, check_mlp, check_silent, is_identity, shared_activation
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.norms import Affine, NormSpec, read_linear, read_norm, refusal
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


def fold_attention(branches: Sequence[Branch], like: Tensor, end: ContextBroadcast | None = None) -> AttentionStage:
    """Fold and merge attentions that read the same tokens.

    Args:
        branches: at least one; all with the same heads.
        like: device and dtype of the arithmetic.
        end: Context Broadcasting of their sum, of a parallel block.

    Raises:
        UsageError: a part that this version does not know.
    """
    norm, affines = _norms(branches, like)
    first = branches[0].body
    front, own_end = _placements(branches, like, allowed=("front", "end"))
    w_qkv, b_qkv, w_out = [], [], []
    bias = like.new_zeros(affines[0].weight.shape)
    for branch, affine in zip(branches, affines, strict=True):
        attn = branch.body
        check_attention(attn, branch.name())
        check_silent(branch.parent, branch.where, branch.names[3])
        if (attn.num_heads, attn.head_dim) != (first.num_heads, first.head_dim):
            raise refusal(branch.name(), attn, "the branches of a block have different heads")
        w, b = fold_input(*read_linear(attn.qkv, like, f"{branch.name()}.qkv"), affine, front)
        w = centred(w, norm, front)
        out, offset = read_linear(attn.proj, like, f"{branch.name()}.proj")
        scale = layer_scale(branch.scale, like, branch.name(2))
        w_qkv.append(w.view(3, -1, w.shape[-1]))
        b_qkv.append(b.view(3, -1))
        w_out.append(out * scale[:, None])
        bias = bias + offset * scale
    packed, offsets = torch.stack(w_qkv, 1), torch.stack(b_qkv, 1)  # (3, P, A, C), (3, P, A)
    qk_norm = _qk_norm(branches, like, first)
    if qk_norm is None:
        rows = torch.ones_like(offsets)
        rows[0] = first.head_dim**-0.5
        packed, offsets = packed * rows[..., None], offsets * rows
    return AttentionStage(
        norm=norm, branches=len(branches), bias=bias, front=front, end=_context(end, like) or own_end,
        w_qkv=packed.flatten(0, 2), b_qkv=offsets.flatten(), w_out=torch.cat(w_out, 1),
        num_heads=len(branches) * first.num_heads, head_dim=first.head_dim, qk_norm=qk_norm,
    )  # fmt: skip


def fold_mlp(branches: Sequence[Branch], like: Tensor, end: ContextBroadcast | None = None) -> MlpStage:
    """Fold and merge two-layer FFNs that read the same tokens; arguments as of `fold_attention`."""
    norm, affines = _norms(branches, like)
    front, own_end = _placements(branches, like, allowed=("front", "mid", "end"))
    w_in, b_in, w_out, mids, acts = [], [], [], [], []
    bias = like.new_zeros(affines[0].weight.shape)
    for branch, affine in zip(branches, affines, strict=True):
        mlp = branch.body
        check_mlp(mlp, branch.name())
        check_silent(branch.parent, branch.where, branch.names[3])
        act, w, b = fold_token_norm(mlp.act, *read_linear(mlp.fc1, like, f"{branch.name()}.fc1"))
        w, b = fold_input(w, b, affine, front)
        w = centred(w, norm, front)
        acts.append(act)
        out, offset = read_linear(mlp.fc2, like, f"{branch.name()}.fc2")
        scale = layer_scale(branch.scale, like, branch.name(2))
        w_in.append(w)
        b_in.append(b)
        w_out.append(out * scale[:, None])
        bias = bias + offset * scale
        if getattr(mlp, "cb_placement", None) == "mid":
            mids.append(_context(mlp.cb, like))
    mid = None
    if mids:
        scales = [c.scale for c in mids if c is not None and c.scale is not None]
        mid = Context(torch.cat(scales) if scales else None)
    act = shared_activation(acts, [b.name() for b in branches])
    return MlpStage(
        norm=norm, branches=len(branches), bias=bias, front=front, end=_context(end, like) or own_end,
        w_in=torch.cat(w_in), b_in=torch.cat(b_in), w_out=torch.cat(w_out, 1), act=act, mid=mid,
    )  # fmt: skip


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

    Raises:
        UsageError: neither LayerScale nor the identity.
    """
    if is_identity(module):
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


def _qk_norm(branches: Sequence[Branch], like: Tensor, first: Any) -> QkNorm | None:
    if all(is_identity(getattr(b.body, n)) for b in branches for n in ("q_norm", "k_norm")):
        return None
    specs: list[NormSpec] = []
    affine: dict[str, list[Tensor]] = {f"{side}_{part}": [] for side in "qk" for part in ("weight", "bias")}
    for branch in branches:
        for side in "qk":
            spec, values = read_norm(getattr(branch.body, f"{side}_norm"), like, f"{branch.name()}.{side}_norm")
            specs.append(spec)
            factor = first.head_dim**-0.5 if side == "q" else 1.0
            for part in ("weight", "bias"):
                affine[f"{side}_{part}"].append((getattr(values, part) * factor).expand(first.num_heads, -1))
    if any(spec != specs[0] for spec in specs):
        raise refusal(branches[0].name(), first, "q and k are normalised differently")
    return QkNorm(specs[0], len(branches), {name: torch.cat(parts) for name, parts in affine.items()})


def _cast(value: Tensor, like: Tensor) -> Tensor:
    return value.detach().to(like.dtype)

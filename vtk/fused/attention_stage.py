"""Parallel attention branches as one attention with more heads, and the forms of it that exporters and CPUs want."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.fused.norms import NormSpec
from vtk.fused.onednn_prepack import wide_linear
from vtk.fused.stage_input import Pair, RawTokens, Reading
from vtk.fused.stages import Plan, Stage, frozen
from vtk_kernels.packed_attention import packed_attention


class QkNorm(nn.Module):
    """Norms of q and k over the head's channels, each branch with its own weights; q's hold 1/√D."""

    def __init__(self, norm: NormSpec, branches: int, affine: dict[str, Tensor]) -> None:
        super().__init__()
        self.norm, self.branches = norm, branches
        self.q_weight, self.q_bias = frozen(affine["q_weight"]), frozen(affine["q_bias"])  # (P·H, D)
        self.k_weight, self.k_bias = frozen(affine["k_weight"]), frozen(affine["k_bias"])

    def forward(self, q: Tensor, k: Tensor, branch: int | None = None) -> tuple[Tensor, Tensor]:
        """Normalise q and k (B, N, H, D); ``branch`` says whose heads they are, None for all branches' heads."""
        return (
            self._one(q, self.q_weight, self.q_bias, branch),
            self._one(k, self.k_weight, self.k_bias, branch),
        )

    def _one(self, x: Tensor, weight: Tensor, bias: Tensor, branch: int | None) -> Tensor:
        if branch is not None:
            weight, bias = weight.chunk(self.branches)[branch], bias.chunk(self.branches)[branch]
        if self.norm.kind == "rms":
            return F.rms_norm(x, x.shape[-1:], eps=self.norm.eps) * weight
        return F.layer_norm(x, x.shape[-1:], eps=self.norm.eps) * weight + bias


class AttentionStage(Stage):
    """P attentions that read the same x, as one attention with P·H heads.

    Attributes:
        w_qkv: (3·P·A, C), rows q of all branches, then k, then v; q has 1/√D in it. None after `separate_qkv`.
        b_qkv: (3·P·A).
        w_out: (C, P·A).
        w_q, w_k, w_v, b_q, b_k, b_v: the three apart, after `separate_qkv` only.
        divisor: of the scores, after `separate_qkv` where q has no 1/√D in it.
    """

    w_qkv: Tensor | None
    b_qkv: Tensor
    w_out: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    b_q: Tensor
    b_k: Tensor
    b_v: Tensor

    def __init__(
        self,
        *,
        w_qkv: Tensor,
        b_qkv: Tensor,
        w_out: Tensor,
        num_heads: int,
        head_dim: int,
        qk_norm: QkNorm | None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.w_qkv, self.b_qkv, self.w_out = frozen(w_qkv), frozen(b_qkv), frozen(w_out)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.qk_norm = qk_norm
        self.divisor: float | None = None

    def widest(self) -> int:
        """3·P·A."""
        return self.b_qkv.shape[0]

    def hidden(self) -> int:
        """0."""
        return 0

    @property
    def reads_raw(self) -> bool:
        """Whether it can do without normalised tokens: not the three products that exporters want."""
        return super().reads_raw and self.w_qkv is not None

    def pairs(self, h: Reading, queries: int | None, plan: Plan, split: bool) -> Iterator[Pair]:
        """Yield the heads' outputs and the output projection."""
        if isinstance(h, RawTokens):
            assert self.w_qkv is not None
            yield self._attend_packed(h.linear(self.w_qkv, self.b_qkv), queries), self.w_out
        elif self.w_qkv is None:
            yield self._separate(h, queries), self.w_out
        elif queries is not None and self.qk_norm is None and not plan.kernels:
            # a CPU is short of arithmetic, not of launches: nothing is computed that nobody reads
            w_q, w_k, w_v = self.w_qkv.chunk(3)
            b_q, _, b_v = self.b_qkv.chunk(3)
            q = F.linear(h[:, :queries], w_q, b_q)
            yield few_queries(q, h, w_k, w_v, b_v, self.head_dim), self.w_out
        elif split and self.branches > 1:
            yield from self._by_branch(h, queries)
        else:
            yield self._attend_packed(wide_linear(h, self.w_qkv, self.b_qkv), queries), self.w_out

    def _attend_packed(self, qkv: Tensor, queries: int | None) -> Tensor:
        """Attention of the packed product (B, N, 3·H·D): (B, N', H·D)."""
        if self.qk_norm is None:
            return packed_attention(qkv, self.num_heads, num_queries=queries)
        q, k, v = self._heads(qkv).unbind(2)
        return self._attend(q if queries is None else q[:, :queries], k, v)

    def _by_branch(self, h: Tensor, queries: int | None) -> Iterator[Pair]:
        assert self.w_qkv is not None
        width = self.num_heads * self.head_dim // self.branches
        w = self.w_qkv.view(3, self.branches, width, -1)
        b = self.b_qkv.view(3, self.branches, width)
        for i, out in enumerate(self.w_out.split(width, 1)):
            q = F.linear(h if queries is None else h[:, :queries], w[0, i], b[0, i])
            k, v = F.linear(h, w[1, i], b[1, i]), F.linear(h, w[2, i], b[2, i])
            q, k, v = (self._heads(t, 1)[:, :, 0] for t in (q, k, v))
            yield self._attend(q, k, v, i), out

    def _separate(self, h: Tensor, queries: int | None) -> Tensor:
        # for exporters: three products and one softmax between two products, the form that the attention fusions of
        # ONNX Runtime and TensorRT look for
        q = F.linear(h if queries is None else h[:, :queries], self.w_q, self.b_q)
        k, v = F.linear(h, self.w_k, self.b_k), F.linear(h, self.w_v, self.b_v)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))  # (B, N, H, D)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        q, k, v = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
        scores = torch.matmul(q, k)
        if self.divisor is not None:
            scores = scores / self.divisor
        o = torch.matmul(torch.softmax(scores, -1), v)  # (B, H, N', D)
        return o.transpose(1, 2).flatten(2)

    def _heads(self, t: Tensor, groups: int = 3) -> Tensor:
        """(B, N, groups·H·D) → (B, N, groups, H, D)."""
        return t.unflatten(-1, (groups, -1, self.head_dim))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, branch: int | None = None) -> Tensor:
        """Attention of q (B, N', H, D) over k and v (B, N, H, D): (B, N', H·D)."""
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k, branch)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)


def few_queries(q: Tensor, h: Tensor, w_k: Tensor, w_v: Tensor, b_v: Tensor, head_dim: int) -> Tensor:
    """Return softmax(q kᵀ) v for every head, k = h · w_kᵀ + b_k and v = h · w_vᵀ + b_v, for any b_k.

    Without a key or a value of any token, since both matrices can go to the queries' side:

        q·(W_k x + b_k) = (W_kᵀ q)·x + q·b_k,      Σⱼ pⱼ (W_v xⱼ + b_v) = W_v (Σⱼ pⱼ xⱼ) + b_v

    Exact: q·b_k is the same for all tokens, so softmax does not see it, and Σⱼ pⱼ is 1. For n queries, N tokens, C
    channels and H heads of D channels that is 4 n H C (D + N) operations in place of 4 N C H D for keys and values and
    4 n N H D for attention: of a ViT-S with one query and 197 tokens a forty-eighth part.

    Args:
        q: (B, n, H·D), 1/√D in it.
        h: (B, N, C).
        w_k, w_v: (H·D, C).
        b_v: (H·D).
        head_dim: D.

    Returns:
        (B, n, H·D).
    """
    batch, queries, width = q.shape
    heads, channels = width // head_dim, h.shape[2]
    q = q.view(batch * queries, heads, head_dim).transpose(0, 1)  # (H, B·n, D)
    projected = torch.bmm(q, w_k.view(heads, head_dim, channels))  # (H, B·n, C)
    projected = (
        projected.view(heads, batch, queries, channels).transpose(0, 1).reshape(batch, heads * queries, channels)
    )
    share = torch.softmax(torch.bmm(projected, h.transpose(1, 2)), -1)  # (B, H·n, N)
    mixed = torch.bmm(share, h).view(batch, heads, queries, channels).transpose(0, 1)
    mixed = mixed.reshape(heads, batch * queries, channels)
    o = torch.bmm(mixed, w_v.view(heads, head_dim, channels).transpose(1, 2))  # (H, B·n, D)
    return o.transpose(0, 1).reshape(batch, queries, width) + b_v


def separate_qkv(model: nn.Module, *, divide_scores: bool = False) -> None:
    """Give every attention of a fused model three matrices in place of a packed one, in place, for exporters.

    Args:
        model: of `fuse`.
        divide_scores: take 1/√D out of q and divide the scores by √D; not with qk-norm, whose weights hold it.
    """
    for stage in model.modules():
        if isinstance(stage, AttentionStage) and stage.w_qkv is not None:
            factor = stage.head_dim**0.5 if divide_scores and stage.qk_norm is None else None
            for name, w, b in zip("qkv", stage.w_qkv.chunk(3), stage.b_qkv.chunk(3), strict=True):
                scale = factor if name == "q" and factor is not None else 1.0
                setattr(stage, f"w_{name}", frozen(w * scale))
                setattr(stage, f"b_{name}", frozen(b * scale))
            stage.w_qkv, stage.divisor = None, factor

"""Parallel attention branches as one attention with more heads, and the forms of it that exporters and CPUs want."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.fused.norms import Affine, NormSpec, normalize_parts
from vtk.fused.onednn_prepack import ALL, Rows, keeps_copies, wide_linear
from vtk.fused.plain_attention import (
    Rotation,
    attend_separately,
    few_queries,
    half_order,
    halves_in_order,
    rotations,
)
from vtk.fused.relative_bias import RelativeBias
from vtk.fused.rotary import rotate, rotate_packed_, turns_of
from vtk.fused.stage_input import Pair, RawTokens, Reading, first
from vtk.fused.stages import Plan, Stage, frozen
from vtk_kernels._heads import HeadNorms
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
    """P attentions that read the same x, as one attention with P·H heads, of which groups may share keys and values.

    Attributes:
        w_qkv: ((P·H + 2·P·K)·D, C), rows q of all branches, then k, then v, with K heads of keys and values a branch; q
            has 1/√D in it. None after `separate_qkv`.
        b_qkv: ((P·H + 2·P·K)·D).
        w_out: (C, P·A), A = H·D.
        w_q, w_k, w_v, b_q, b_k, b_v: the three apart, after `separate_qkv` only.
        divisor: of the scores, after `separate_qkv` where q has no 1/√D in it.
        rotation: with constant tables, after `separate_qkv` only.
        num_heads, num_kv_heads, head_dim: P·H, P·K, D.
        rotary: which of the model's rotary tables turns q and k (`vtk.fused.rotary.Rotary`), None for none.
        rotate_half: which channels it turns together.
        sub_norm: of each branch's output, before the gate and the projection.
        sub_weight, sub_bias: (P·A), its affine part, where a gate stands between it and the projection.
        w_gate, b_gate: (P·A, C), (P·A), None for no gate; the output is multiplied by the sigmoid of it.
        attn_bias: of relative positions, added to the scores, None for none.
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
    sub_weight: Tensor | None
    sub_bias: Tensor | None
    w_gate: Tensor | None
    b_gate: Tensor | None

    def __init__(
        self,
        *,
        w_qkv: Tensor,
        b_qkv: Tensor,
        w_out: Tensor,
        num_heads: int,
        head_dim: int,
        qk_norm: QkNorm | None,
        num_kv_heads: int | None = None,
        rotary: int | None = None,
        rotate_half: bool = False,
        sub_norm: NormSpec | None = None,
        sub_affine: Affine | None = None,
        gate: tuple[Tensor, Tensor] | None = None,
        attn_bias: RelativeBias | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.w_qkv, self.b_qkv, self.w_out = frozen(w_qkv), frozen(b_qkv), frozen(w_out)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads or num_heads, head_dim
        self.qk_norm = qk_norm
        self.rotary, self.rotate_half = rotary, rotate_half
        self.sub_norm = sub_norm
        self.sub_weight, self.sub_bias = (None, None) if sub_affine is None else map(frozen, _pair(sub_affine))
        self.w_gate, self.b_gate = (None, None) if gate is None else map(frozen, gate)
        self.attn_bias = attn_bias
        self.divisor: float | None = None
        self._turns: tuple[Tensor, int, int, Tensor] | None = None  # a table, its version, tokens, and `turns_of` it
        self.rotation: Rotation | None = None

    def widest(self) -> int:
        """(P·H + 2·P·K)·D."""
        return self.b_qkv.shape[0]

    def hidden(self) -> int:
        """0."""
        return 0

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows of q, k and v."""
        key = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, key, key

    @property
    def plain(self) -> bool:
        """Whether it is no more than softmax(q kᵀ) v with as many heads everywhere."""
        same = self.num_kv_heads == self.num_heads
        return same and self.qk_norm is None and self.rotary is None and self.attn_bias is None

    @property
    def reads_raw(self) -> bool:
        """Whether it can do without normalised tokens: not the three products that exporters want."""
        return super().reads_raw and self.w_qkv is not None

    def pairs(
        self, h: Reading, queries: int | None, plan: Plan, split: bool, ropes: Sequence[Tensor] = ()
    ) -> Iterator[Pair]:
        """Yield the heads' outputs and the output projection."""
        rope = None if self.rotary is None else ropes[self.rotary]
        if split and self.branches > 1 and isinstance(h, Tensor) and self.w_qkv is not None:
            yield from self._by_branch(h, queries, rope)
            return
        if isinstance(h, RawTokens):
            assert self.w_qkv is not None
            o = self._attend_packed(h.linear(self.w_qkv, self.b_qkv), queries, rope, plan.kernels)
        elif self.w_qkv is None:
            o = attend_separately(self, h, queries)
        elif queries is not None and self.qk_norm is None and not plan.kernels:
            # a CPU is short of arithmetic, not of launches: nothing is computed that nobody reads
            o = self._few_queries(h, queries, rope)
        elif rope is not None and self.qk_norm is None and keeps_copies(h, self.w_qkv) and rope.dtype == h.dtype:
            o = self._turned(h, queries, rope)
        else:
            o = self._attend_packed(wide_linear(h, self.w_qkv, self.b_qkv), queries, rope, plan.kernels)
        yield self._finished(o, h, queries, plan), self.w_out

    def _attend_packed(
        self, qkv: Tensor, queries: int | None, rope: Tensor | None = None, kernels: bool = True
    ) -> Tensor:
        """Attention of the packed product (B, N, (H + 2·K)·D): (B, N', H·D)."""
        if self.plain:
            return packed_attention(qkv, self.num_heads, num_queries=queries)
        if not kernels:
            q, k, v = (self._heads(t) for t in qkv.split(self.widths, -1))
            return self._attend(q, k, v, rope, queries=queries)
        norm = None
        if (found := self.qk_norm) is not None:
            norm = HeadNorms(
                found.norm.kind, found.norm.eps, found.q_weight, found.q_bias, found.k_weight, found.k_bias
            )
        return packed_attention(
            qkv, self.num_heads, num_queries=queries, num_kv_heads=self.num_kv_heads, rope=rope,
            rotate_half=self.rotate_half, qk_norm=norm, attn_bias=None if self.attn_bias is None else self.attn_bias(),
        )  # fmt: skip

    def _turned(self, h: Tensor, queries: int | None, rope: Tensor) -> Tensor:
        """Attention on a CPU, whose time goes into passes over memory: q and k are rotated together, in place."""
        assert self.w_qkv is not None
        both = self.widths[0] + self.widths[1]
        rows = Rows(rotated=both, head_dim=self.head_dim) if self.rotate_half else ALL
        qkv = wide_linear(h, self.w_qkv, self.b_qkv, rows=rows)
        if self._turns is None or self._turns[0] is not rope or self._turns[1:3] != (rope._version, h.shape[1]):
            self._turns = rope, rope._version, h.shape[1], turns_of(rope, h.shape[1])
        rotate_packed_(qkv, both, self._turns[3])
        q, k, v = qkv.view(*qkv.shape[:2], -1, self.head_dim).split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), 2
        )
        return self._attend(q, k, v, None, queries=queries)

    def _few_queries(self, h: Tensor, queries: int, rope: Tensor | None) -> Tensor:
        assert self.w_qkv is not None
        w_q, w_k, w_v = self.w_qkv.split(self.widths)
        b_q, b_k, b_v = self.b_qkv.split(self.widths)
        q = F.linear(h[:, :queries], w_q, b_q)
        if self.plain:
            return few_queries(q, h, w_k, w_v, b_v, self.head_dim)
        k, v = F.linear(h, w_k, b_k), F.linear(h, w_v, b_v)
        return self._attend(self._heads(q), self._heads(k), self._heads(v), rope)

    def _by_branch(self, h: Tensor, queries: int | None, rope: Tensor | None) -> Iterator[Pair]:
        assert self.w_qkv is not None
        parts = [
            zip(w.chunk(self.branches), b.chunk(self.branches), strict=True)
            for w, b in zip(self.w_qkv.split(self.widths), self.b_qkv.split(self.widths), strict=True)
        ]
        for i, (q_, k_, v_, out) in enumerate(zip(*parts, self.w_out.chunk(self.branches, 1), strict=True)):
            q = F.linear(h if queries is None else h[:, :queries], *q_)
            k, v = F.linear(h, *k_), F.linear(h, *v_)
            o = self._attend(self._heads(q), self._heads(k), self._heads(v), rope, i)
            yield self._finished(o, h, queries, None, i), out

    def _heads(self, t: Tensor) -> Tensor:
        """(B, N, H·D) → (B, N, H, D)."""
        return t.unflatten(-1, (-1, self.head_dim))

    def _prepared(
        self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor | None, branch: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as the scores read them: normalised, rotated, and with keys and values for every head."""
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k, branch)
        if rope is not None:
            q, k = rotate(q, rope, self.rotate_half), rotate(k, rope, self.rotate_half)
        if (groups := self.num_heads // self.num_kv_heads) > 1:
            k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        return q, k, v

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor | None, branch: int | None = None,
        queries: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of q (B, N', H, D) over k and v (B, N, K, D): (B, N', H·D)."""
        q, k, v = (t.transpose(1, 2) for t in self._prepared(q[:, :queries], k, v, rope, branch))
        bias = None
        if self.attn_bias is not None:  # with an axis for images: by three axes a CPU takes torch's slow way
            bias = self.attn_bias()[None, :, : q.shape[2], : k.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, bias, scale=1.0).transpose(1, 2).flatten(2)

    def _finished(
        self, o: Tensor, h: Reading, queries: int | None, plan: Plan | None, branch: int | None = None
    ) -> Tensor:
        """Return the heads' outputs (B, N', A) as the projection reads them: normalised and gated."""
        if self.sub_norm is not None:
            o = normalize_parts(o, self.sub_norm, self.branches if branch is None else 1, plan)
        if self.w_gate is None or self.b_gate is None:
            return o
        w, b = self.w_gate, self.b_gate
        if branch is not None:
            w, b = w.chunk(self.branches)[branch], b.chunk(self.branches)[branch]
        if self.sub_weight is not None and self.sub_bias is not None:
            weight, bias = self.sub_weight, self.sub_bias
            if branch is not None:
                weight, bias = weight.chunk(self.branches)[branch], bias.chunk(self.branches)[branch]
            o = o * weight + bias
        h = first(h, queries)
        return o * torch.sigmoid(h.linear(w, b) if isinstance(h, RawTokens) else F.linear(h, w, b))


def _pair(affine: Affine) -> tuple[Tensor, Tensor]:
    return affine.weight, affine.bias


def separate_qkv(model: nn.Module, *, divide_scores: bool = False) -> None:
    """Give every attention of a fused model three matrices in place of a packed one, in place, for exporters.

    Where q and k are rotated, their channels are put in the order of ``rotate_half``, and the tables are constants:
    those of the model's own size, the only one that it takes from then on.

    Args:
        model: of `fuse`.
        divide_scores: the form of ONNX Runtime: 1/√D is taken out of q and the scores are divided by √D, except with
            qk-norm, whose weights hold it, and with a rotary embedding, which no fusion of scores takes; the halves of
            a head are exchanged by one gather, the quickest on its CPU. Else they are put together in the other order.
    """
    rotary = getattr(model, "rotary", None)
    turns = rotations(() if rotary is None else rotary.table.unbind(0), gather=divide_scores)
    if rotary is not None:
        rotary.constant = True
    for stage in model.modules():
        if isinstance(stage, AttentionStage) and stage.w_qkv is not None:
            plain = stage.qk_norm is None and stage.rotary is None
            factor = stage.head_dim**0.5 if divide_scores and plain else None
            for name, w, b in zip("qkv", stage.w_qkv.split(stage.widths), stage.b_qkv.split(stage.widths), strict=True):
                if stage.rotary is not None and not stage.rotate_half and name != "v":
                    w, b = halves_in_order(w, b, stage.head_dim)
                scale = factor if name == "q" and factor is not None else 1.0
                setattr(stage, f"w_{name}", frozen(w * scale))
                setattr(stage, f"b_{name}", frozen(b * scale))
            if stage.rotary is not None:
                _order_head_norms(stage)
                stage.rotation = turns[stage.rotary]
                stage.rotate_half = True
            stage.w_qkv, stage.divisor = None, factor


def _order_head_norms(stage: AttentionStage) -> None:
    if stage.qk_norm is None or stage.rotate_half:
        return
    order = half_order(stage.head_dim, stage.b_qkv.device)
    for name in ("q_weight", "q_bias", "k_weight", "k_bias"):
        setattr(stage.qk_norm, name, frozen(getattr(stage.qk_norm, name)[:, order]))

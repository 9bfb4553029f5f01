"""The folded halves of a block: x ← x + Σᵢ fᵢ(norm(x)) over P parallel branches, as few and wide products.

A stage yields pairs (activation, matrix): its output is Σ activation · matrixᵀ + bias. Merged, there is one pair and
the sum over the branches happens in the accumulator of one product of length P·A. Split, each branch is a pair of its
own: on a CPU whose cache cannot hold the wide activation that moves fewer bytes. Source: paper A, eq. 1–2, for the
branches; LayerNorm's affine part, 1/√D and LayerScale are inside the matrices.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.few_queries import few_queries
from vtk.fused.frozen import frozen
from vtk.fused.norms import NormSpec
from vtk.fused.onednn_prepack import wide_linear
from vtk.fused.qk_norm import QkNorm
from vtk.fused.stage_input import Pair, RawTokens, Reading, first
from vtk_kernels._dispatch import HALF
from vtk_kernels.choices import ChoiceTableError, choose, layers
from vtk_kernels.linear_gelu import linear_gelu
from vtk_kernels.packed_attention import packed_attention


@dataclass(frozen=True)
class Plan:
    """How a forward pass runs.

    Attributes:
        kernels: with the Triton operations, else with torch.
        device_name: on which card's measured choices.
        ln_folded: of a pass with kernels: stages that can, read raw tokens (five kernels a block); else a kernel
            normalises them (seven). None for what the model says.
        counters: (n,), int32, 0 between kernels, for products that finish themselves; None: none does.
    """

    kernels: bool
    device_name: str | None = None
    ln_folded: bool | None = False
    counters: Tensor | None = field(default=None, compare=False)


def check_choices() -> None:
    """Refuse a choice table of the environment that cannot be used, before any work.

    Raises:
        UsageError: the one that VTK_CHOICES names cannot.
    """
    try:
        layers()
    except ChoiceTableError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True)
class Context:
    """Context Broadcasting at one place: ½x + ½mean(x), or x + scale ⊙ mean(x) (paper B, CB and CB_S)."""

    scale: Tensor | None


class Stage(nn.Module, abc.ABC):
    """What every stage has.

    Attributes:
        norm: how its input is normalised; all branches alike.
        branches: P.
        bias: (C), the sum over the branches.
        front, end: Context Broadcasting of the normalised input, and of the output.
    """

    bias: Tensor

    def __init__(self, norm: NormSpec, branches: int, bias: Tensor, front: Context | None, end: Context | None) -> None:
        super().__init__()
        self.norm, self.branches = norm, branches
        self.bias = frozen(bias)
        self.front, self.front_scale = front is not None, frozen(front.scale if front else None)
        self.end, self.end_scale = end is not None, frozen(end.scale if end else None)

    @property
    def reads_raw(self) -> bool:
        """Whether it can do without normalised tokens: its input is a LayerNorm's, which only matrices read."""
        return self.norm.kind == "layer" and not self.front

    @abc.abstractmethod
    def pairs(self, h: Reading, queries: int | None, plan: Plan, split: bool) -> Iterator[Pair]:
        """Yield (activation (B, N', K), matrix (C, K)).

        Args:
            h: normalised tokens (B, N, C); or, where `reads_raw`, raw ones, which are never split.
            queries: compute only the first so many tokens of the output; None for all.
            plan: of the forward pass.
            split: one pair per branch.
        """

    @abc.abstractmethod
    def widest(self) -> int:
        """Return the number of columns of the widest activation, all branches together."""

    @abc.abstractmethod
    def hidden(self) -> int:
        """Return the width of the FFNs' hidden layer, all branches together; 0 for none."""


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


class MlpStage(Stage):
    """P two-layer FFNs that read the same x, as one of P times the width.

    Attributes:
        w_in: (P·F, C).
        b_in: (P·F).
        w_out: (C, P·F).
        act: of the hidden layer; GELU, exact or by tanh, can be one operation with the product before it.
        mid: Context Broadcasting of the hidden layer.
    """

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor

    def __init__(
        self, *, w_in: Tensor, b_in: Tensor, w_out: Tensor, act: nn.Module, mid: Context | None, **common: Any
    ) -> None:
        super().__init__(**common)
        self.w_in, self.b_in, self.w_out = frozen(w_in), frozen(b_in), frozen(w_out)
        self.act = act
        self.mid, self.mid_scale = mid is not None, frozen(mid.scale if mid else None)
        self.gelu, self.gelu_tanh = is_exact_gelu(act), is_tanh_gelu(act)

    def widest(self) -> int:
        """P·F."""
        return self.b_in.shape[0]

    def hidden(self) -> int:
        """P·F."""
        return self.b_in.shape[0]

    def pairs(self, h: Reading, queries: int | None, plan: Plan, split: bool) -> Iterator[Pair]:
        """Yield the hidden activations and the second layer."""
        h = first(h, queries)
        if split and self.branches > 1:
            w_ins, b_ins = self.w_in.chunk(self.branches), self.b_in.chunk(self.branches)
            scales = (None,) * self.branches if self.mid_scale is None else self.mid_scale.chunk(self.branches)
            for w_in, b_in, scale, w_out in zip(w_ins, b_ins, scales, self.w_out.chunk(self.branches, 1), strict=True):
                yield self._hidden(h, w_in, b_in, scale, plan), w_out
        else:
            yield self._hidden(h, self.w_in, self.b_in, self.mid_scale, plan), self.w_out

    def _hidden(self, h: Reading, w: Tensor, b: Tensor, scale: Tensor | None, plan: Plan) -> Tensor:
        u = self.activated(h, w, b, plan)
        return context_mean(u, scale) if self.mid else u

    def activated(self, h: Reading, w: Tensor, b: Tensor, plan: Plan) -> Tensor:
        """Return act(h · wᵀ + b): (B, N', F), of the whole hidden layer or of one branch's part."""
        if isinstance(h, RawTokens):
            return h.linear_gelu(w, b) if self.gelu else self.act(h.linear(w, b))
        if plan.kernels and (self.gelu or self.gelu_tanh):
            rows = h.shape[0] * h.shape[1]
            choice = choose("linear_gelu", rows, w.shape[0], w.shape[1], h.dtype, plan.device_name)
            if choice == "triton" and self.gelu:
                return linear_gelu(h, w, b)
            if choice == "cublaslt" or (self.gelu_tanh and choice != "aten"):
                return linear_gelu_tanh(h, w, b, exact=self.gelu)
        u = wide_linear(h, w, b)
        if self.gelu and not u.is_cuda and not u.requires_grad and not torch.compiler.is_compiling():
            return torch.ops.aten.gelu_(u)  # a second wide tensor costs a CPU more time than the function itself
        return self.act(u)


def context_mean(x: Tensor, scale: Tensor | None) -> Tensor:
    """Broadcast the mean token of x (B, N, C): ½x + ½mean, or x + scale ⊙ mean."""
    mean = x.mean(1, keepdim=True)
    return 0.5 * (x + mean) if scale is None else x + scale * mean


def is_exact_gelu(act: nn.Module) -> bool:
    """Return whether an activation is GELU by the error function."""
    from timm.layers import GELU

    return (type(act) is nn.GELU and act.approximate == "none") or type(act) is GELU


def is_tanh_gelu(act: nn.Module) -> bool:
    """Return whether an activation is GELU by its approximation with tanh."""
    from timm.layers import GELUTanh

    return (type(act) is nn.GELU and act.approximate == "tanh") or type(act) is GELUTanh


def linear_gelu_tanh(h: Tensor, w: Tensor, b: Tensor, *, exact: bool = True) -> Tensor:
    """Return GELU(h · wᵀ + b), (B, N, F), GELU in the epilogue of cuBLASLt's product on CUDA: there by tanh.

    For an exact GELU that is an approximation, off by 2.0e-4 (relative rms, of normally distributed sums). It is
    applied to fp32 sums and rounded once, where torch rounds before and after, so that the result is nearer to the
    exact one than torch's own: 1.7e-3 against 2.6e-3 in bf16, 2.9e-4 against 3.2e-4 in fp16 (computed, not measured on
    a card). Other types, and tensors that want a gradient, which it has not, take torch's two operations.

    Args:
        h: (B, N, K).
        w: (F, K).
        b: (F).
        exact: the model's GELU is the exact one, which a CPU computes; else the one by tanh.
    """
    if not h.is_cuda and not exact:  # the operator of a CPU knows the exact one alone
        return F.gelu(F.linear(h, w, b), approximate="tanh")
    if h.dtype not in HALF or (torch.is_grad_enabled() and any(t.requires_grad for t in (h, w, b))):
        return F.gelu(F.linear(h, w, b), approximate="tanh" if h.is_cuda else "none")
    flat = torch._addmm_activation(b, h.flatten(0, -2), w.t(), use_gelu=True)
    return flat.view(*h.shape[:-1], w.shape[0])

"""Parallel FFN branches as one wider FFN, alone or beside attention from the same norm (ViT-22B)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.fused.attention_stage import AttentionStage
from vtk.fused.norms import NormSpec, normalize_parts
from vtk.fused.onednn_prepack import wide_linear
from vtk.fused.stage_input import Pair, RawTokens, Reading, first
from vtk.fused.stages import Context, Plan, Stage, context_mean, frozen
from vtk_kernels._dispatch import HALF
from vtk_kernels.choices import choose
from vtk_kernels.linear_gelu import linear_gelu


class MlpStage(Stage):
    """P two-layer FFNs that read the same x, as one of P times the width.

    Attributes:
        w_in: (P·F, C).
        b_in: (P·F).
        w_out: (C, P·F).
        act: of the hidden layer; GELU, exact or by tanh, can be one operation with the product before it.
        mid: Context Broadcasting of the hidden layer.
        sub_norm: of each branch's hidden layer, its affine part in ``w_out``; None for none.
    """

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor

    def __init__(
        self,
        *,
        w_in: Tensor,
        b_in: Tensor,
        w_out: Tensor,
        act: nn.Module,
        mid: Context | None,
        sub_norm: NormSpec | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.w_in, self.b_in, self.w_out = frozen(w_in), frozen(b_in), frozen(w_out)
        self.act = act
        self.mid, self.mid_scale = mid is not None, frozen(mid.scale if mid else None)
        self.sub_norm = sub_norm
        self.gelu, self.gelu_tanh = is_exact_gelu(act), is_tanh_gelu(act)

    def widest(self) -> int:
        """P·F."""
        return self.b_in.shape[0]

    def hidden(self) -> int:
        """P·F."""
        return self.b_in.shape[0]

    def pairs(
        self, h: Reading, queries: int | None, plan: Plan, split: bool, ropes: Sequence[Tensor] = ()
    ) -> Iterator[Pair]:
        """Yield the hidden activations and the second layer."""
        h = first(h, queries)
        if split and self.branches > 1:
            scales = (None,) * self.branches if self.mid_scale is None else self.mid_scale.chunk(self.branches)
            matrices = self.by_branch(), scales, self.w_out.chunk(self.branches, 1)
            for (w_in, b_in), scale, w_out in zip(*matrices, strict=True):
                yield self._hidden(h, w_in, b_in, scale, plan, 1), w_out
        else:
            yield self._hidden(h, self.w_in, self.b_in, self.mid_scale, plan, self.branches), self.w_out

    def by_branch(self) -> list[tuple[Tensor, Tensor]]:
        """Return matrix and bias of each branch's first layer."""
        return list(zip(self.w_in.chunk(self.branches), self.b_in.chunk(self.branches), strict=True))

    def _hidden(self, h: Reading, w: Tensor, b: Tensor, scale: Tensor | None, plan: Plan, branches: int) -> Reading:
        if self.sub_norm is not None:
            u = self.normalizable(h, w, b, plan)
            return normalize_parts(u, self.sub_norm, branches, plan) if isinstance(u, Tensor) else u
        u = self.activated(h, w, b, plan)
        return context_mean(u, scale) if self.mid else u

    def normalizable(self, h: Reading, w: Tensor, b: Tensor, plan: Plan) -> Reading:
        """Return `activated` for the norm behind it; a form that the next product can normalise where there is one."""
        return self.activated(h, w, b, plan)

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
        return wide_linear(h, w, b, "gelu") if self.gelu else self.act(wide_linear(h, w, b))


class ScalingStage(Stage):
    """Attention and FFN side by side from one norm: two pairs of one sum (Dehghani et al. 2023, ViT-22B)."""

    def __init__(self, attention: AttentionStage, mlp: MlpStage, **common: Any) -> None:
        super().__init__(**common)
        self.attention, self.mlp = attention, mlp

    def widest(self) -> int:
        """The wider of both."""
        return max(self.attention.widest(), self.mlp.widest())

    def hidden(self) -> int:
        """Of its FFN."""
        return self.mlp.hidden()

    @property
    def reads_raw(self) -> bool:
        """Whether it can do without normalised tokens, as its attention says."""
        return super().reads_raw and self.attention.reads_raw

    def pairs(
        self, h: Reading, queries: int | None, plan: Plan, split: bool, ropes: Sequence[Tensor] = ()
    ) -> Iterator[Pair]:
        """Yield attention's pair, then the FFN's."""
        yield from self.attention.pairs(h, queries, plan, split, ropes)
        yield from self.mlp.pairs(h, queries, plan, split)


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

"""Parallel gated FFNs as one wider gated FFN: act(gate(x)) · fc1(x), the two matrices packed (SwiGLU; Shazeer 2020)."""

from typing import Any

import torch
from torch import Tensor, nn

from vtk.fused.mlp_stage import MlpStage
from vtk.fused.onednn_prepack import Rows, observed, wide_linear
from vtk.fused.stage_input import RawTokens, Reading
from vtk.fused.stages import Plan
from vtk_kernels.choices import choose
from vtk_kernels.linear_swiglu import linear_swiglu


class GluStage(MlpStage):
    """P gated FFNs that read the same x, as one of P times the width.

    Attributes:
        w_in: (2·P·F, C), the gates' rows of all branches, then the values'.
        b_in: (2·P·F).
        w_out: (C, P·F).
        act: of the gate; SiLU can be one operation with the product before it.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.silu = is_silu(self.act)

    def widest(self) -> int:
        """2·P·F."""
        return self.b_in.shape[0]

    def hidden(self) -> int:
        """P·F."""
        return self.b_in.shape[0] // 2

    def by_branch(self) -> list[tuple[Tensor, Tensor]]:
        """Return matrix and bias of each branch's first layer, gate and value."""
        w, b = (t.unflatten(0, (2, self.branches, -1)) for t in (self.w_in, self.b_in))
        return [(w[:, i].flatten(0, 1), b[:, i].flatten(0, 1)) for i in range(self.branches)]

    def activated(self, h: Reading, w: Tensor, b: Tensor, plan: Plan) -> Tensor:
        """Return act(h · w_gateᵀ + b_gate) · (h · w_valueᵀ + b_value): (B, N', F)."""
        if plan.kernels and self.silu:
            if isinstance(h, RawTokens):
                return linear_swiglu(h.x, w, b, **h.options())
            rows = h.shape[0] * h.shape[1]
            if choose("linear_swiglu", rows, w.shape[0], w.shape[1], h.dtype, plan.device_name) == "triton":
                return linear_swiglu(h, w, b)
        if self.silu and isinstance(h, Tensor) and not h.is_cuda and not torch.compiler.is_exporting():
            gate, value = wide_linear(h, w, b, "silu", Rows(0, 2)), wide_linear(h, w, b, rows=Rows(1, 2))
            return gate * value if value.requires_grad or observed() else value.mul_(gate)
        u = h.linear(w, b) if isinstance(h, RawTokens) else wide_linear(h, w, b)
        gate, value = u.chunk(2, -1)
        return self.act(gate) * value

    def normalizable(self, h: Reading, w: Tensor, b: Tensor, plan: Plan) -> Reading:
        """Return `activated` for the norm behind it: raw with statistics where the next product can normalise."""
        if not (plan.kernels and plan.ln_folded and self.silu and self.branches == 1) or self.sub_norm is None:
            return super().normalizable(h, w, b, plan)
        x, options = (h, {}) if isinstance(h, Tensor) else (h.x, h.options())
        u, row_stats = linear_swiglu(x, w, b, stats=True, **options)
        return RawTokens(u, row_stats, self.sub_norm)


def is_silu(act: nn.Module) -> bool:
    """Return whether an activation is SiLU, which timm also calls Swish."""
    from timm.layers import Swish

    return type(act) in (nn.SiLU, Swish)

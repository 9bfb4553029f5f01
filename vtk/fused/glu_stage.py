"""Parallel gated FFNs as one wider gated FFN: act(gate(x)) · fc1(x), the two matrices packed (SwiGLU; Shazeer 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.fused.mlp_stage import MlpStage
from vtk.fused.onednn_prepack import wide_linear
from vtk.fused.stage_input import RawTokens, Reading
from vtk.fused.stages import Plan


class GluStage(MlpStage):
    """P gated FFNs that read the same x, as one of P times the width.

    Attributes:
        w_in: (2·P·F, C), the gates' rows of all branches, then the values'.
        b_in: (2·P·F).
        w_out: (C, P·F).
        act: of the gate; SiLU can be one operation with the product before it.
    """

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
        u = h.linear(w, b) if isinstance(h, RawTokens) else wide_linear(h, w, b)
        gate, value = u.chunk(2, -1)
        if is_silu(self.act) and not u.is_cuda and not u.requires_grad and not torch.compiler.is_compiling():
            return F.silu(gate, inplace=True).mul(value)
        return self.act(gate) * value


def is_silu(act: nn.Module) -> bool:
    """Return whether an activation is SiLU, which timm also calls Swish."""
    from timm.layers import Swish

    return type(act) in (nn.SiLU, Swish)

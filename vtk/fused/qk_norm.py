"""Normalisation of queries and keys, head by head, before their product (Dehghani et al., 2023, for ViT-22B)."""

import torch.nn.functional as F
from torch import Tensor, nn

from vtk.fused.frozen import frozen
from vtk.fused.norms import NormSpec


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

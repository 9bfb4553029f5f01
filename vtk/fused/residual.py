"""The residual stream without its biases: products add to it, and norms add the biases' sum to what they read.

    x ← x + activation · matrixᵀ    in place, in the product's epilogue (β = 1)
    h = norm(x + Σ biases of all stages so far)

In elements per token and channel the end of a stage writes a product, and then reads x and it, writes x and h: five. So
it reads x, writes x, reads x and writes h: four, in as many kernels, and the product is rounded once with the sum. The
sums of biases are constants of the model.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vtk.fused.attention_stage import AttentionStage
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.norms import NormSpec
from vtk.fused.onednn_prepack import observed
from vtk.fused.stage_input import Pair, normalized
from vtk.fused.stages import Plan, Stage
from vtk_kernels.choices import choose
from vtk_kernels.norm import norm


def sums_of_biases(stages: Sequence[Stage]) -> Tensor:
    """Return (stages, C): the sum of the biases of each stage and all before it."""
    biases = torch.stack([stage.bias.detach() for stage in stages])
    return biases.double().cumsum(0).to(biases.dtype)


class SummedBiases:
    """Which biases the sums are of, as they were: other tensors or values make other sums."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, int]] = []

    def __reduce__(self) -> tuple[type["SummedBiases"], tuple[()]]:
        """Copy and pickle as new: a copy's biases are its own."""
        return SummedBiases, ()

    def hold(self) -> bool:
        """Return whether no bias has changed in place, as far as autograd's counter says; True before any use."""
        return all(_version(bias) == version for bias, version in self._known)

    @torch.no_grad()
    def renew(self, sums: Tensor, stages: Sequence[Stage]) -> None:
        """Write sums anew, where graphs read them, if these stages' biases are not those they are of."""
        if observed():  # what is recorded or counted is a pass and not this
            return
        biases = [stage.bias for stage in stages]
        same = len(biases) == len(self._known) and all(a is b for a, (b, _) in zip(biases, self._known, strict=True))
        if not (same and self.hold()):
            with torch.inference_mode(False):
                sums.copy_(sums_of_biases(stages))
            self._known = [(bias, _version(bias)) for bias in biases]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def adds_in_products(stages: Sequence[Stage], last: NormSpec | None, pruned: int, x: Tensor, plan: Plan) -> bool:
    """Return whether a pass keeps its biases out of the residual stream.

    It does where a measurement chose "addmm" for all products that end a stage, but those of a single token, and where
    every stage but the first, and the head, reads the stream by a norm alone.

    Args:
        stages: of the model.
        last: norm of the head.
        pruned: the first stage of which one token is computed; -1 for none.
        x: tokens (B, N, C).
        plan: of the forward pass.
    """
    if not plan.kernels or plan.ln_folded or any(stage.end for stage in stages):
        return False
    if last is None:
        return False
    rows, shapes = x.shape[0] * x.shape[1], set()
    for stage in stages if pruned < 1 else stages[:pruned]:
        parts = [part for part in stage.modules() if isinstance(part, AttentionStage | MlpStage)]
        shapes |= {(part.w_out.shape[0], part.w_out.shape[1]) for part in parts}
    ways = {choose("residual", rows, c, length, x.dtype, plan.device_name) for c, length in shapes}
    return ways == {"addmm"}


def close_by_products(
    x: Tensor, biases: Tensor, pairs: Iterable[Pair], eps: float, rms: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x + Σ activation · matrixᵀ, without biases, and its LayerNorm, or RMSNorm, with them.

    Args:
        x: residual stream (B, N, C), which the caller reads no more: it is changed where nothing records operations.
        biases: (C), their sum up to here.
        pairs: of activations (B, N, K) and matrices (C, K); K may differ.
        eps: of the norm.
    """
    for activation, matrix in pairs:
        sums, product = x.flatten(0, 1), (normalized(activation).flatten(0, 1), matrix.t())
        wanted = torch.is_grad_enabled() and (x.requires_grad or product[0].requires_grad)
        # out of place torch copies x first, by a kernel of its own
        flat = torch.addmm(sums, *product) if wanted or observed() else sums.addmm_(*product)
        x = flat.view(x.shape)
    return x, norm(x, eps, biases, rms)[0]

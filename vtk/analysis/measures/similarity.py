"""Cosine similarity of an image's tokens, by depth (Wang et al. 2022, eq. 5 and Figure 1)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.depth_points import depth_points, watch_points


@dataclass(frozen=True)
class TokenSimilarity(MeasureResult):
    """Mean cosine of pairs of tokens, by depth.

    Attributes:
        values: of each point: ``stem``, ``pos_embed``, then the blocks by name; −1 to 1.
        images: number of images.
    """

    values: dict[str, float]
    images: int


@torch.no_grad()
def token_similarity(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> TokenSimilarity:
    """Return CosSim(B) = 1/(n(n−1)) Σ_{i≠j} BᵢBⱼᵀ/(‖Bᵢ‖‖Bⱼ‖) at every point, mean over images, the model in eval mode.

    Tokens are all that a point gives: class and register tokens too, positions of a map. A ViT of twelve blocks has
    the fourteen points of the paper: its stem, the position embedding, the blocks.

    Raises:
        UsageError: the model has no recognised blocks.
        DataError: there are no images.
    """
    sums: dict[str, Tensor] = {}

    def see(name: str, tokens: Tensor) -> None:
        value = cosine_similarity(tokens).sum()
        sums[name] = sums.get(name, torch.zeros_like(value)) + value

    images = 0
    with eval_mode(model), watch_points(depth_points(model), see):
        for batch, _ in stream(model, batches, max_images):
            model(batch)
            images += len(batch)
    return TokenSimilarity({name: float(value) / images for name, value in sums.items()}, images)


def cosine_similarity(tokens: Tensor) -> Tensor:
    """Return the mean cosine of pairs of different tokens (B, N, C), of each image (B,), in fp64; NaN of one token.

    Σ_{i≠j} ûᵢ·ûⱼ = ‖Σ ûᵢ‖² − Σ ‖ûᵢ‖², so that no (N, N) matrix is needed. A token of zeros has cosine 0 with all.
    """
    unit = torch.nn.functional.normalize(tokens.double(), dim=-1)
    n = tokens.shape[1]
    total = unit.sum(dim=1).square().sum(dim=-1) - unit.square().sum(dim=(1, 2))
    return total / (n * (n - 1)) if n > 1 else torch.full_like(total, torch.nan)

"""Average flatness: the loss under Gaussian noise on the weights (Chen et al. 2022, Table 1)."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, load_batches
from vtk.analysis.probes.losses import CrossEntropy, Loss, mean_loss
from vtk.errors import UsageError


@dataclass(frozen=True)
class Flatness(MeasureResult):
    """L^N = E[L(w + ε)], ε of independent N(0, σ²).

    Attributes:
        loss: L(w).
        noisy_loss: L^N.
        standard_error: of ``noisy_loss``, over pairs of draws; NaN of one pair.
        sigma: σ.
        draws: how many ε.
        images: number of images.
    """

    loss: float
    noisy_loss: float
    standard_error: float
    sigma: float
    draws: int
    images: int

    @property
    def noise_rise(self) -> float:
        """L^N − L: by how much the noise raises the loss, which a smaller L alone does not lower."""
        return self.noisy_loss - self.loss

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "noise_rise": self.noise_rise}


@torch.no_grad()
def average_flatness(
    model: nn.Module,
    batches: Batches,
    *,
    sigma: float = 0.01,
    draws: int = 100,
    loss: Loss | None = None,
    max_images: int | None = None,
    seed: int = 0,
    show_progress: bool = False,
) -> Flatness:
    """Return the mean loss over draws of Gaussian noise on all parameters, the model in eval mode.

    The paper averages over 1,000 draws and does not state σ; here it is an argument and part of the result, and only
    numbers of the same σ can be compared. Draws come in pairs ε and −ε, whose linear terms cancel. The weights are put
    back from a copy, bit for bit.

    Args:
        model: all of whose parameters get noise, frozen ones too; unchanged on return.
        batches: held in memory.
        sigma: σ, in units of the weights.
        draws: even, 2 or more.
        loss: by default plain cross-entropy.
        max_images: use only the first ones.
        seed: of the noise.
        show_progress: show a progress bar.

    Raises:
        UsageError: an argument is out of range.
        DataError: there are no images.
    """
    if draws < 2 or draws % 2:
        raise UsageError(f"`draws` is {draws}; noise comes in pairs: give an even number, 2 or more")
    if not (math.isfinite(sigma) and sigma > 0):
        raise UsageError(f"`sigma` is {sigma}; give a standard deviation above 0")
    held = load_batches(model, batches, max_images)
    criterion = loss or CrossEntropy()
    parameters = list(model.parameters())
    saved = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    pairs: list[float] = []
    with eval_mode(model), console.progress("flatness", draws, unit="draws", enabled=show_progress) as bar:
        plain = mean_loss(criterion, model, held)
        try:
            for _ in range(draws // 2):
                noise = [_noise(p, sigma, generator) for p in parameters]
                both = 0.0
                for sign in (1, -1):
                    for p, own, change in zip(parameters, saved, noise, strict=True):
                        p.copy_(own).add_(change, alpha=sign)
                    both += mean_loss(criterion, model, held) / 2
                pairs.append(both)
                bar.advance(2)
        finally:
            for p, own in zip(parameters, saved, strict=True):
                p.copy_(own)
    values = torch.tensor(pairs, dtype=torch.float64)
    error = float(values.std() / math.sqrt(len(pairs))) if len(pairs) > 1 else math.nan
    return Flatness(plain, float(values.mean()), error, sigma, draws, sum(len(batch[0]) for batch in held))


def _noise(parameter: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    # drawn on the CPU, so that every device gets the same
    return (torch.randn(parameter.shape, generator=generator) * sigma).to(parameter)

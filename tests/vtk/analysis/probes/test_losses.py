"""The losses whose landscape is looked at, against their formulas in fp64."""

import pytest
import torch
from torch import nn

from vtk.analysis import BinaryCrossEntropy, CrossEntropy
from vtk.analysis.probes.losses import mean_loss

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [-3.0, 4.0, 0.0]], dtype=torch.float64)


class Fixed(nn.Module):
    """Gives what it is asked for; one parameter of norm 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1.0, dtype=torch.float64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + 0 * self.weight.sum()


def test_binary_cross_entropy_is_the_mean_over_images_and_classes() -> None:
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.25]], dtype=torch.float64)
    p = 1 / (1 + torch.exp(-LOGITS))
    wanted = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    assert float(BinaryCrossEntropy()(Fixed(), LOGITS, labels)) == pytest.approx(float(wanted), rel=1e-12)


def test_cross_entropy_takes_numbers_and_mixed_labels() -> None:
    logs = LOGITS - LOGITS.exp().sum(dim=1, keepdim=True).log()
    assert float(CrossEntropy()(Fixed(), LOGITS, torch.tensor([0, 2]))) == pytest.approx(
        float(-(logs[0, 0] + logs[1, 2]) / 2), rel=1e-12
    )
    mixed = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    assert float(CrossEntropy()(Fixed(), LOGITS, mixed)) == pytest.approx(float(-(mixed * logs).sum() / 2), rel=1e-12)


def test_the_l2_term_is_half_the_factor_times_the_squared_norm() -> None:
    batches = [(LOGITS, torch.tensor([0, 2]))]
    plain, more = (mean_loss(CrossEntropy(weight_decay=w), Fixed(), batches) for w in (0.0, 0.3))
    assert more - plain == pytest.approx(0.5 * 0.3 * 4, rel=1e-12)

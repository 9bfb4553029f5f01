"""Average flatness in closed form, and the miss rate by hand."""

import math

import pytest
import torch
from torch import nn

from tests.vtk.analysis._models import images, tiny_vit
from vtk.analysis import CrossEntropy, average_flatness, miss_rate
from vtk.errors import DataError, UsageError


class Quadratic:
    """½ (w − 1)ᵀ A (w − 1), whatever the images: E over N(0, σ²) adds ½ σ² tr A."""

    weight_decay = 0.0

    def __init__(self, size):
        root = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        self.matrix = root @ root.T

    def __call__(self, model, x, labels):
        w = torch.cat([p.detach().flatten() for p in model.parameters()]) - 1
        return 0.5 * w @ self.matrix @ w


def test_flatness_of_a_quadratic_is_half_sigma_squared_times_the_trace():
    model = nn.Linear(3, 2).double()
    loss = Quadratic(8)
    found = average_flatness(model, images(2), sigma=0.3, draws=2000, loss=loss, seed=1)
    expected = float(loss(model, None, None)) + 0.5 * 0.3**2 * float(loss.matrix.trace())
    assert found.loss == pytest.approx(float(loss(model, None, None)), rel=1e-12)
    assert found.noisy_loss == pytest.approx(expected, rel=0.05)
    assert abs(found.noisy_loss - expected) < 4 * found.standard_error
    assert found.standard_error < 0.03 * expected and (found.draws, found.sigma) == (2000, 0.3)


def test_the_loss_is_the_mean_over_images_with_its_l2_term_and_the_model_is_put_back_bit_for_bit():
    model = tiny_vit().train()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    batches = images(7, sizes=(4, 3))
    found = average_flatness(model, batches, draws=2, loss=CrossEntropy(weight_decay=0.5))
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    plain = nn.functional.cross_entropy(model.eval()(x), y).item()
    norm = sum(p.square().sum().item() for p in model.parameters())
    assert found.loss == pytest.approx(plain + 0.25 * norm, rel=1e-12) and found.images == 7
    assert math.isnan(found.standard_error)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


def test_a_sharper_minimum_has_the_larger_noisy_loss_and_a_failure_puts_the_weights_back():
    model = nn.Linear(3, 2).double()
    loss = Quadratic(8)
    flat, sharp = Quadratic(8), Quadratic(8)
    flat.matrix, sharp.matrix = loss.matrix * 0.1, loss.matrix * 10
    rise = [(f := average_flatness(model, images(2), draws=50, loss=one)).noisy_loss - f.loss for one in (flat, sharp)]
    assert rise[1] == pytest.approx(100 * rise[0])
    before = model.weight.clone()

    class Broken(Quadratic):
        calls = 0

        def __call__(self, *args):
            self.calls += 1
            if self.calls == 3:
                raise ArithmeticError
            return super().__call__(*args)

    with pytest.raises(ArithmeticError):
        average_flatness(model, images(2), draws=4, loss=Broken(8))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("arguments, match", [
    ({"draws": 3}, "`draws` is 3; noise comes in pairs"), ({"draws": 0}, "2 or more"),
    ({"sigma": 0.0}, "`sigma` is 0.0"), ({"sigma": math.nan}, "`sigma` is nan"),
])  # fmt: skip
def test_mistakes_are_named(arguments, match):
    with pytest.raises(UsageError, match=match):
        average_flatness(tiny_vit(), images(2), **arguments)


class Nearest(nn.Module):
    """Takes an image of constant value v for class round(v): half-way between classes 0 and 2 it says 1, a miss."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        centre = torch.arange(3, dtype=x.dtype)
        return -((x.mean(dim=(1, 2, 3))[:, None] - centre) ** 2)


def test_a_miss_is_a_prediction_of_neither_class():
    labels = torch.tensor([0, 2, 0, 2])
    batch = labels.double()[:, None, None, None].expand(4, 3, 2, 2), labels
    found = miss_rate(Nearest(), [batch], seed=3)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(3))
    expected = sum(int(labels[i] != labels[j]) for i, j in zip(order, order.roll(1), strict=True)) / 4
    assert 0 < expected < 1 or expected == 1
    assert (found.rate, found.pairs) == (expected, 4)
    same = torch.zeros(4, dtype=torch.int64)
    assert miss_rate(Nearest(), [(torch.zeros(4, 3, 2, 2, dtype=torch.float64), same)]).rate == 0.0


def test_the_miss_rate_needs_two_images_and_one_label_each():
    with pytest.raises(DataError, match="two images or more"):
        miss_rate(tiny_vit(), images(1))
    with pytest.raises(UsageError, match="one label per image"):
        miss_rate(tiny_vit(), [(images(2)[0][0], torch.full((2, 3), 1 / 3))])

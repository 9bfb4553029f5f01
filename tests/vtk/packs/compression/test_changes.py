"""Changes cut at one threshold: what is kept, what it takes, and what the weighing by gradients is worth."""

import math

import pytest
import torch
from torch import Tensor, nn

from vtk.packs.compression.changes import Change, decompose, ranks_at, threshold_for
from vtk.packs.compression.moments import gradient_moments


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (1, 5)])
def test_all_components_are_the_change_itself(shape: tuple[int, int]) -> None:
    change = random(*shape)
    assert (Change.of(change).cut(min(shape)).change(torch.float64) - change).abs().max() < 1e-12


def test_the_decomposition_is_that_of_torch() -> None:
    matrix = random(40, 24) @ torch.diag(torch.logspace(0, -6, 24, dtype=torch.float64))
    left, values, right = decompose(matrix)
    torch.testing.assert_close(values, torch.linalg.svdvals(matrix), rtol=1e-6, atol=1e-12)
    assert (left.T @ left - torch.eye(24)).abs().max() < 1e-6
    assert ((left * values) @ right - matrix).abs().max() < 1e-12


def test_a_cut_loses_the_smallest_singular_values() -> None:
    change = random(40, 24)
    lost = change - Change.of(change).cut(10).change(torch.float64)
    assert float(lost.norm()) == pytest.approx(float(torch.linalg.svdvals(change)[10:].norm()))
    assert Change.of(change).error(Change.of(change).cut(10)) == pytest.approx(float(lost.norm() / change.norm()))


def test_weighed_components_are_those_of_the_weighed_change() -> None:
    change, rows, columns = random(12, 8), random(12, 30, seed=1), random(8, 30, seed=2)
    sides = rows @ rows.T, columns @ columns.T
    weighed = Change.of(change, sides)
    assert (weighed.cut(8).change(torch.float64) - change).abs().max() < 1e-9
    ridged = [side + 0.01 * side.diagonal().mean() * torch.eye(len(side)) for side in sides]

    def loss(rank: int) -> float:
        lost = change - weighed.cut(rank).change(torch.float64)
        return float(torch.trace(lost.T @ ridged[0] @ lost @ ridged[1]))

    for rank in range(8):  # what is lost is the sum of the squared weights left out, and no other cut loses less
        assert loss(rank) == pytest.approx(float(weighed.weight[rank:].square().sum()), rel=1e-6)
        plain = change - Change.of(change).cut(rank).change(torch.float64)
        assert loss(rank) <= float(torch.trace(plain.T @ ridged[0] @ plain @ ridged[1])) * (1 + 1e-9)


def test_one_threshold_gives_each_number_where_it_is_worth_most_within_the_budget() -> None:
    changes = {"a": Change.of(random(96, 32)), "b": Change.of(random(32, 32, seed=1)), "t": Change.of(random(3, 32))}
    for rank in (0, 1, 5, 40):
        ranks = ranks_at(changes, threshold_for(changes, rank))
        budget = sum(min(rank, *c.shape) * c.cost for c in changes.values())
        spent = sum(ranks[name] * c.cost for name, c in changes.items())
        assert budget - max(c.cost for c in changes.values()) <= spent <= budget
        kept = [float(c.scores()[i]) for name, c in changes.items() for i in range(ranks[name])]
        left = [float(c.scores()[i]) for name, c in changes.items() for i in range(ranks[name], len(c.weight))]
        assert not kept or not left or min(kept) >= max(left)


def test_factors_pay_only_where_they_are_smaller_than_the_matrix() -> None:
    change = Change.of(random(96, 32))
    for dtype, each in (("fp32", 4 * 128), ("bf16", 2 * 128), ("int8", 128 + 8)):
        most = math.ceil(4 * 96 * 32 / each) - 1
        assert change.pays(most, dtype) and not change.pays(most + 1, dtype)  # type: ignore[arg-type]


class Net(nn.Module):
    """Two layers, of which the first is read without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(nn.functional.linear(x, self.first.weight)))
        return out


@pytest.mark.parametrize("multi_label", [False, True])
def test_moments_are_those_of_the_gradients_of_each_image(multi_label: bool) -> None:
    torch.manual_seed(0)
    net, images = Net(), random(3, 6)
    weight = net.first.weight
    whole = [torch.stack([torch.autograd.grad(y, weight, retain_graph=True)[0] for y in net(x)]) for x in images]
    gradients = torch.stack([g if multi_label else g - g.mean(dim=0) for g in whole])  # (images, classes, F, K)
    rows = torch.einsum("icfk,icgk->fg", gradients, gradients) / 3
    columns = torch.einsum("icfk,icfl->kl", gradients, gradients) / 3
    net.eval().requires_grad_(False)
    batches = [images] * 500
    found = gradient_moments(net, ["first.weight"], batches, multi_label=multi_label, seed=0, count=3)["first.weight"]
    for mine, exact in zip(found, (rows, columns), strict=True):
        expected = exact / exact.trace().sqrt()
        assert float((mine - expected).norm() / expected.norm()) < 0.12
    assert not any(p.requires_grad for p in net.parameters())

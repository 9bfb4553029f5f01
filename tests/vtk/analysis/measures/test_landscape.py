"""The loss on a plane: in closed form for a quadratic, and by a model built anew for each point."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import CrossEntropy, Share, loss_landscape, random_directions
from vtk.errors import DataError, UsageError


class Quadratic:
    """½ wᵀ A w + bᵀ w, whatever the images."""

    def __init__(self, size, weight_decay=0.0):
        generator = torch.Generator().manual_seed(5)
        root = torch.randn(size, size, dtype=torch.float64, generator=generator)
        self.matrix, self.vector = root @ root.T, torch.randn(size, dtype=torch.float64, generator=generator)
        self.weight_decay = weight_decay

    def of(self, w):
        return 0.5 * w @ self.matrix @ w + self.vector @ w

    def __call__(self, model, x, labels):
        return self.of(torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_a_quadratic_is_a_paraboloid_in_closed_form():
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    loss = Quadratic(15)
    found = loss_landscape(model, images(1), grid=5, span=0.8, loss=loss, seed=2)
    w = model.weight.detach().flatten()
    d1, d2 = (d["weight"].flatten() for d in random_directions(model, seed=2))
    a, b = np.meshgrid([-0.8, -0.4, 0.0, 0.4, 0.8], [-0.8, -0.4, 0.0, 0.4, 0.8], indexing="ij")
    slope = loss.matrix @ w + loss.vector
    expected = float(loss.of(w)) + a * float(slope @ d1) + b * float(slope @ d2)
    for left, right, both in ((d1, d1, a * a / 2), (d2, d2, b * b / 2), (d1, d2, a * b)):
        expected = expected + both * float(left @ loss.matrix @ right)
    np.testing.assert_allclose(np.array(found.losses), expected, rtol=1e-10)
    assert found.steps == pytest.approx((-0.8, -0.4, 0.0, 0.4, 0.8)) and found.images == 1
    assert found.centre == pytest.approx(float(loss.of(w)), rel=1e-12)
    assert np.array(found.l2).tolist() == np.zeros((5, 5)).tolist()


@pytest.mark.parametrize("directions", ["filter", "reference"])
def test_points_are_losses_of_models_with_those_weights(directions):
    model, batches = tiny_vit(), images(7, sizes=(4, 3))
    whole = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    decayed = CrossEntropy(weight_decay=0.1)
    found = loss_landscape(model, batches, grid=3, span=0.5, directions=directions, loss=decayed, seed=1)
    d1, d2 = random_directions(model, mode=directions, seed=1)
    for i, a in enumerate((-0.5, 0.0, 0.5)):
        for j, b in enumerate((-0.5, 0.0, 0.5)):
            other = copy.deepcopy(model)
            state = {n: p + a * d1.get(n, 0) + b * d2.get(n, 0) for n, p in model.state_dict().items()}
            other.load_state_dict(state)
            plain = F.cross_entropy(other(whole[0]), whole[1]).item()
            norms = [p.detach().square().sum().item() for p in other.parameters()]
            l2 = 0.1 * (sum(map(math.sqrt, norms)) if directions == "reference" else 0.5 * sum(norms))
            assert found.losses[i][j] == pytest.approx(plain + l2, rel=1e-10)
            assert found.l2[i][j] == pytest.approx(l2, rel=1e-10)


def test_batchnorm_keeps_its_statistics():
    model = timm_model("resnet18", layers=(1, 1, 1, 1), channels=(4, 4, 8, 8), num_classes=3).double().train()
    batch = images(4, side=32)[0]
    before = {n: v.clone() for n, v in model.state_dict().items()}
    found = loss_landscape(model, [batch], grid=3)
    assert model.training and all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    # of one image alone the loss is the same: statistics of the batch are not used
    alone = [loss_landscape(model, [(x[None], y[None])], grid=3) for x, y in zip(*batch, strict=True)]
    np.testing.assert_allclose(np.mean([one.losses for one in alone], axis=0), np.array(found.losses), rtol=1e-9)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_model_is_as_it_was_also_when_broken_off(error):
    class Breaks(CrossEntropy):
        calls = 0

        def __call__(self, model, x, labels):
            type(self).calls += 1
            if type(self).calls == 4:
                raise error
            return super().__call__(model, x, labels)

    model = tiny_vit().float().train()
    with torch.no_grad():
        model.head.weight[0, 0] = -0.0
    model.head.weight.requires_grad_(False)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    batch = [(x.float(), y) for x, y in images(3)]
    with pytest.raises(error):
        loss_landscape(model, batch, grid=3, loss=Breaks(), vectors=True)
    loss_landscape(model, batch, grid=3, vectors=True)
    after = model.state_dict()
    assert all(torch.equal(before[n].view(torch.int32), after[n].view(torch.int32)) for n in before)
    assert model.training and [n for n, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]


def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_numbers():
    kept, calls = [], 0

    class Counts(CrossEntropy):
        def __call__(self, model, x, labels):
            nonlocal calls
            calls += 1
            return super().__call__(model, x, labels)

    model = tiny_vit()
    whole = loss_landscape(model, images(3), grid=3, save=lambda rows: kept.append([list(row) for row in rows]))
    assert [len(rows) for rows in kept] == list(range(1, 10))
    again = loss_landscape(model, images(3), grid=3, known=kept[5], loss=Counts())
    assert again == whole and calls == 3
    lost = loss_landscape(model, images(3), grid=3, known=[[None, 0.0], *kept[5][1:]])
    assert math.isnan(lost.losses[0][0]) and lost.losses[0][1:] == whole.losses[0][1:]


def test_processes_share_points_and_get_the_same_surface():
    """Two processes in turn: the first run of each records its own rows, whose sum is what both would have got."""
    model, parts = tiny_vit(), {0: [], 1: []}
    alone = loss_landscape(model, images(3), grid=3)

    def recorder(rank):
        def total(tensor):
            parts[rank].append(tensor.clone())
            return tensor

        return Share(rank, 2, total)

    for rank in (0, 1):
        loss_landscape(model, images(3), grid=3, share=recorder(rank))
    joined = [a + b for a, b in zip(parts[0], parts[1], strict=True) if a.ndim == 2]
    rows = torch.cat(joined)[:9, 0].reshape(3, 3)
    np.testing.assert_array_equal(rows.numpy(), np.array(alone.losses))
    assert all(
        bool(a[1].eq(0).all()) and bool(b[0].eq(0).all()) for a, b in zip(*parts.values(), strict=True) if a.ndim == 2
    )


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"grid": 4}, UsageError, "`grid` is 4; give an odd number"),
        ({"span": 0.0}, UsageError, "`span` is 0.0"),
        ({"directions": "layer"}, UsageError, "unknown directions 'layer'"),
        ({"batches": []}, DataError, "no images to analyse"),
    ],
)
def test_mistakes_are_named(arguments, error, match):
    batches = arguments.get("batches", images(2))
    with pytest.raises(error, match=match):
        loss_landscape(tiny_vit(), batches, **{k: v for k, v in arguments.items() if k != "batches"})

"""The classification loss in fp64 by hand; mixing of odd batches and its seeds."""

import numpy as np
import pytest
import torch

from vtk.training.objectives.base import Batch, Classification


class Logits(torch.nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :4]


def fp64_loss(logits, targets):
    z = logits.double()
    z = z - z.max(dim=1, keepdim=True).values
    log_p = z - z.exp().sum(dim=1, keepdim=True).log()
    return float(-(targets.double() * log_p).sum(dim=1).mean())


def some(n):
    generator = torch.Generator().manual_seed(n)
    return Batch(torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_label_smoothing(smoothing):
    batch = some(7)
    loss, _ = Classification(4, smoothing=smoothing).loss(Logits(), batch)
    targets = torch.nn.functional.one_hot(batch.labels, 4).double() * (1 - smoothing) + smoothing / 4
    assert float(loss) == pytest.approx(fp64_loss(Logits()(batch.images), targets), rel=1e-6)


@pytest.mark.parametrize("mix", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_mixing_any_batch_size(mix, n):
    objective = Classification(4, smoothing=0.1, **mix)
    for epoch in range(4):
        objective.start_epoch(epoch)
        before = some(n)
        after = objective.prepare(Batch(before.images.clone(), before.labels))
        assert after.images.shape == before.images.shape and after.labels.shape == (n, 4)
        assert torch.allclose(after.labels.sum(dim=1), torch.ones(n))
        assert bool((after.labels >= 0.1 / 4 - 1e-6).all())
        if n % 2:
            assert torch.equal(after.images[-1], before.images[-1])
            assert int(after.labels[-1].argmax()) == int(before.labels[-1])


def test_mixup_mixes_images_as_it_mixes_labels():
    objective = Classification(4, mixup=0.8)
    objective.start_epoch(3)
    before = some(4)
    after = objective.prepare(Batch(before.images.clone(), before.labels))
    lam = float(after.labels[0, 0])  # images 0 and 3 have labels 0 and 3
    assert 0 < lam < 1 and float(after.labels[0, 3]) == pytest.approx(1 - lam, abs=1e-6)
    expected = lam * before.images[0].double() + (1 - lam) * before.images[3].double()
    assert torch.allclose(after.images[0].double(), expected, atol=1e-6)


def test_mixing_depends_on_the_seed_and_leaves_numpys_generator_alone():
    objective = Classification(4, mixup=0.8, cutmix=1.0)

    def draw(seed, disturb):
        objective.start_epoch(seed)
        np.random.seed(disturb)
        state = np.random.get_state()[1].copy()
        labels = [objective.prepare(some(6)).labels for _ in range(3)]
        assert np.array_equal(np.random.get_state()[1], state)
        return torch.stack(labels)

    assert torch.equal(draw(5, 1), draw(5, 2))
    assert not torch.equal(draw(5, 1), draw(6, 1))


def test_no_mixing_is_no_change():
    batch = some(3)
    assert Classification(4).prepare(batch) is batch

"""Masks: as many hidden patches as asked for, whatever the shape, and the same for the same seed."""

import numpy as np
import pytest
import torch

from vtk.data.audit.result import Sample
from vtk.errors import UsageError
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import ImageStream
from vtk.training.pretrain.masks import make_masks
from vtk.training.pretrain.seeds import SeededStream, number_images, seeds_of

SEEDS = torch.arange(200) * 7919


@pytest.mark.parametrize("shape", ["random", "block"])
@pytest.mark.parametrize(
    ("grid", "ratio", "count"), [((14, 14), 0.4, 78), ((14, 14), 0.75, 147), ((3, 5), 0.5, 8), ((1, 2), 0.5, 1)]
)
def test_every_image_hides_the_same_number(shape, grid, ratio, count):
    mask = make_masks(grid, ratio, shape).draw(SEEDS)
    assert mask.dtype == torch.bool and mask.shape == (200, grid[0] * grid[1])
    assert (mask.sum(1) == count).all()


def test_masks_follow_from_the_seed_alone():
    masks = make_masks((8, 8), 0.6)
    whole = masks.draw(SEEDS)
    assert torch.equal(torch.cat([masks.draw(part) for part in SEEDS.split(7)]), whole)
    assert len({tuple(row) for row in whole.tolist()}) == 200
    # every patch is hidden about as often as any other: 120 of 200 expected, σ = 6.9
    assert ((whole.sum(0) - 120).abs() < 5 * 6.9).all()


def test_blocks_are_more_connected_than_random_patches():
    """Share of hidden patches whose right neighbour is hidden, too: 0.4 for random ones."""
    share = {}
    for shape in ("random", "block"):
        mask = make_masks((14, 14), 0.4, shape).draw(SEEDS).reshape(-1, 14, 14)
        share[shape] = float((mask[:, :, :-1] & mask[:, :, 1:]).sum() / mask[:, :, :-1].sum())
    assert share["random"] == pytest.approx(0.4, abs=0.02) and share["block"] > 0.7


def test_units_are_hidden_as_a_whole():
    mask = make_masks((8, 12), 0.6, unit=2).draw(SEEDS).reshape(-1, 4, 2, 6, 2)
    squares = mask.any(4).any(2)
    assert torch.equal(squares, mask.all(4).all(2)) and (squares.flatten(1).sum(1) == 14).all()  # 0.6 of 24


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((4, 4), 0.01), "hides nothing of 16 patches; give 0.062 to 0.94"),
        (((2, 2), 0.9), "hides everything of 4 patches"),
        (((1, 1), 0.5), "an image has only one patch"),
        (((4, 4), 0.5, "random", 4), "an image has only one square"),
        (((7, 8), 0.5, "random", 2), "does not divide the grid of 7×8 patches"),
        (((8, 8), 0.5, "block", 2), "--mask-shape random"),
    ],
)
def test_masks_that_cannot_be(arguments, text):
    with pytest.raises(UsageError, match=text):
        make_masks(*arguments)


def test_seeds_follow_images_and_epochs_not_batches_or_processes(photos):
    files = sorted((photos / "train").rglob("*.png"))
    samples = number_images([Sample(path, 0) for path in files])

    def seeds(world: int, batch: int, epoch: int) -> set[int]:
        found = []
        for rank in range(world):
            inner = ImageStream(
                samples, lambda image: torch.zeros(3, 2, 2), batch_size=batch, seed=1, workers=0,
                ranks=Ranks(torch.device("cpu"), rank, world),
            )  # fmt: skip
            stream = SeededStream(inner, 1)
            assert stream.sizes == inner.sizes
            found += [seed for part in stream.epoch(epoch) for seed in part.labels.tolist()]
        assert len(found) == len(set(found)) == 36 and min(found) >= 0
        return set(found)

    assert seeds(1, 8, 3) == seeds(2, 12, 3) == set(seeds_of(torch.arange(36), 1, 3).tolist())
    assert not seeds(1, 8, 3) & seeds(1, 8, 4)


def test_the_generator_is_numpys_own_for_that_seed():
    """A mask can be drawn again by who knows the seed: the first of a permutation of Philox."""
    mask = make_masks((4, 4), 0.5).draw(torch.tensor([42]))[0]
    order = np.random.Generator(np.random.Philox(42)).permutation(16)
    assert set(np.flatnonzero(mask.numpy())) == set(order[:8])

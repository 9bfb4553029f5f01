"""Repeated augmentation: timm's order over all its processes, and an augmentation of its own for every copy."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader
from torchvision.transforms import RandomCrop

from vtk.card import InputSpec
from vtk.data import eval_transform, train_transform
from vtk.data.audit.result import Sample
from vtk.data.loading.loader import make_loader, set_epoch
from vtk.data.loading.samplers import RepeatSampler
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import ImageStream


@pytest.mark.parametrize("length, repeats", [(300, 3), (300, 2), (7, 3), (10, 4), (5, 1)])
def test_the_order_is_timms_of_any_number_of_processes(length, repeats, monkeypatch):
    ours = RepeatSampler(length, repeats, seed=0)
    ours.set_epoch(2)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None: order)
    found = [image for _, image in ours]
    assert len(found) == len(ours) == length
    for world in (1, 2, 3):
        ranks = [
            RepeatAugSampler(range(length), world, rank, num_repeats=repeats, selected_round=0) for rank in range(world)
        ]
        parts = [list(each) for each in ranks]
        together = [parts[i % world][i // world] for i in range(sum(map(len, parts)))]  # as a batch is shared
        assert found == together[:length]


def test_copies_have_seeds_of_their_own_and_epochs_an_order_of_their_own():
    sampler = RepeatSampler(30, 3, seed=1)
    passes = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        passes.append(list(sampler))
        assert list(sampler) == passes[-1]
        assert set(Counter(image for _, image in passes[-1]).values()) == {3}
    assert len({pair for each in passes for pair in each}) == 90
    assert len({tuple(image for _, image in each) for each in passes}) == 3


def test_processes_share_a_batch_so_that_each_has_other_copies(tmp_path):
    rng = np.random.default_rng(0)
    samples = []
    for i in range(8):
        Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        samples.append(Sample(tmp_path / f"{i}.png", i))
    augment = train_transform(InputSpec(12, 12), crop_scale=(0.3, 1.0))

    def batches(world):
        streams = [
            ImageStream(
                samples, augment, batch_size=4, seed=0, workers=0, ranks=Ranks(torch.device("cpu"), rank, world),
                sampler=RepeatSampler(8, 2, seed=0),
            )
            for rank in range(world)
        ]  # fmt: skip
        return [list(stream.epoch(1)) for stream in streams]

    (whole,), (first, second) = batches(1), batches(2)
    assert len(whole) == 2
    for one, a, b in zip(whole, first, second, strict=True):
        assert torch.equal(one.images[0::2], a.images) and torch.equal(one.images[1::2], b.images)
        assert torch.equal(a.labels, b.labels) and not torch.equal(a.images, b.images)


def test_a_padded_crop_is_torchvisions_of_what_evaluation_sees():
    spec = InputSpec(16, 16, crop_pct=0.875)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    found = train_transform(spec, hflip=0.0, crop_pad=4)
    torch.manual_seed(3)
    cropped = found(image)
    torch.manual_seed(3)
    wanted = RandomCrop(16, padding=4)(image)
    torch.testing.assert_close(cropped, eval_transform(InputSpec(16, 16))(wanted), rtol=0, atol=0)
    # an image of another size is first what evaluation would take of it
    wide = Image.fromarray(np.random.default_rng(1).integers(0, 255, (20, 50, 3), dtype=np.uint8))
    assert found(wide).shape == (3, 16, 16)


def test_erasing_with_noise_differs_from_erasing_with_the_mean():
    image = Image.new("RGB", (16, 16), (128, 128, 128))
    spec = InputSpec(16, 16)
    torch.manual_seed(0)
    noisy = train_transform(spec, reprob=1.0, remode="pixel")(image)
    flat = train_transform(spec, reprob=1.0)(image)
    assert len(noisy.unique()) > 10 and len(flat.unique()) == 2


def test_the_loader_takes_the_epoch(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    loader = make_loader(
        [Sample(tmp_path / "a.png", 0)] * 6, eval_transform(InputSpec(8, 8)), batch_size=3, shuffle=True, seed=0,
        workers=0, sampler=RepeatSampler(6, 2, seed=0),
    )  # fmt: skip
    assert isinstance(loader, DataLoader)
    set_epoch(loader, 4)
    assert loader.sampler.epoch == 4

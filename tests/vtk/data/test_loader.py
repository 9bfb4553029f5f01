import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from vtk.card import InputSpec
from vtk.data import Sample, eval_transform, make_loader, set_epoch, train_transform
from vtk.errors import DataError, UsageError

SPEC = InputSpec(16, 24)
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def samples(tree: Callable[..., Path]) -> list[Sample]:
    root = tree({"a": 11, "b": 12})
    return [Sample(path, int(path.parent.name == "b")) for path in sorted(root.rglob("*.png"))]


def epochs(samples: list[Sample], workers: int, seed: int = 5, numbers: tuple[int, ...] = (0, 1)) -> list[Batches]:
    transform = train_transform(SPEC, auto_augment="rand-m9-mstd0.5", color_jitter=0.2, reprob=0.5)
    loader = make_loader(samples, transform, batch_size=5, shuffle=True, seed=seed, workers=workers)
    result = []
    for number in numbers:
        set_epoch(loader, number)
        result.append([(images.clone(), labels.clone()) for images, labels in loader])
    return result


def same(a: Batches, b: Batches) -> bool:
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True))


def test_batches_hold_the_samples_in_order(samples: list[Sample]) -> None:
    transform = eval_transform(SPEC)
    batches = list(make_loader(samples, transform, batch_size=10, shuffle=False, seed=0, workers=0))
    assert [tuple(images.shape) for images, _ in batches] == [(10, 3, 16, 24), (10, 3, 16, 24), (3, 3, 16, 24)]
    assert batches[0][0].dtype == torch.float32 and batches[0][1].dtype == torch.int64
    assert torch.cat([labels for _, labels in batches]).tolist() == [sample.label for sample in samples]
    images = torch.cat([images for images, _ in batches])
    assert torch.equal(images[7], transform(Image.open(samples[7].path)))


def test_a_seed_gives_the_same_batches_with_any_number_of_workers(samples: list[Sample]) -> None:
    here, beside = epochs(samples, 0), epochs(samples, 2)
    assert same(here[0], beside[0]) and same(here[1], beside[1])
    assert not same(here[0], here[1])
    assert same(epochs(samples, 0, numbers=(1,))[0], here[1])  # epoch 1 does not depend on epoch 0, for --resume
    assert not same(epochs(samples, 0, seed=6)[0], here[0])


def test_each_epoch_has_every_image_once(samples: list[Sample]) -> None:
    loader = make_loader(samples, eval_transform(SPEC), batch_size=4, shuffle=True, seed=0, workers=0)
    orders = []
    for epoch in range(3):
        set_epoch(loader, epoch)
        order = [pair[1] for batch in loader.batch_sampler for pair in batch]
        assert sorted(order) == list(range(len(samples)))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


def test_the_callers_random_generators_are_left_alone(samples: list[Sample]) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = draws()
    seed()
    epochs(samples, 0, numbers=(0,))
    assert draws() == expected


def test_through_accelerate(samples: list[Sample]) -> None:
    transform = train_transform(SPEC)
    plain = make_loader(samples, transform, batch_size=5, shuffle=True, seed=2, workers=0)
    same_again = make_loader(samples, transform, batch_size=5, shuffle=True, seed=2, workers=0)
    wrapped = Accelerator(cpu=True).prepare(same_again)
    for epoch in (0, 3, 1):
        set_epoch(plain, epoch)
        set_epoch(wrapped, epoch)
        assert same(list(plain), list(wrapped))


def test_drop_last(samples: list[Sample]) -> None:
    options = {"shuffle": False, "seed": 0, "workers": 0, "drop_last": True}
    assert [len(y) for _, y in make_loader(samples, eval_transform(SPEC), batch_size=5, **options)] == [5, 5, 5, 5]
    with pytest.raises(UsageError, match="23 images do not fill one batch of 24"):
        make_loader(samples, eval_transform(SPEC), batch_size=24, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_vanished_is_one_line(samples: list[Sample], workers: int) -> None:
    samples[3].path.unlink()
    loader = make_loader(samples, eval_transform(SPEC), batch_size=4, shuffle=False, seed=0, workers=workers)
    with pytest.raises(DataError) as error:
        list(loader)
    assert str(error.value) == f"cannot read the image {samples[3].path}: No such file or directory"


def test_wrong_arguments(samples: list[Sample]) -> None:
    transform = eval_transform(SPEC)
    with pytest.raises(UsageError, match="batch size is 0"):
        make_loader(samples, transform, batch_size=0, shuffle=True, seed=0, workers=0)
    with pytest.raises(UsageError, match="workers is -1"):
        make_loader(samples, transform, batch_size=1, shuffle=True, seed=0, workers=-1)
    with pytest.raises(DataError, match="no images"):
        make_loader([], transform, batch_size=1, shuffle=True, seed=0, workers=0)
    with pytest.raises(UsageError, match="make_loader"):
        set_epoch(torch.utils.data.DataLoader(samples), 1)


def test_neighbouring_seeds_are_unrelated() -> None:
    from vtk.data.loading.samplers import mix

    values = [mix(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(10)]
    assert len({value & 0xFFFFFFFF for value in values}) == 1000  # NumPy takes 32 bits
    assert abs(np.mean([bin(value).count("1") for value in values]) - 32) < 1

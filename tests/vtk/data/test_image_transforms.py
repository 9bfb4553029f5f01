import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vtk.card import InputSpec
from vtk.data import eval_transform, train_transform
from vtk.data.loading.normalization import Normalize
from vtk.errors import UsageError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def spec(height: int, width: int, **options: object) -> InputSpec:
    return InputSpec(height, width, **{"mean": MEAN, "std": STD, **options})


def test_normalisation_is_the_formula() -> None:
    image = photo(9, 13)
    expected = (np.asarray(image).astype(np.float64) / 255 - MEAN) / STD
    result = Normalize(spec(9, 13))(image)
    assert result.dtype == torch.float32 and result.is_contiguous()
    np.testing.assert_allclose(result.numpy(), expected.transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize("image_size", [(32, 32), (100, 40), (37, 211), (16, 16)])
@pytest.mark.parametrize("size", [(32, 32), (24, 48), (64, 32)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_crop_equals_timm_bit_for_bit(image_size: tuple[int, int], size: tuple[int, int], crop_pct: float) -> None:
    theirs = create_transform((3, *size), interpolation="bicubic", mean=MEAN, std=STD, crop_pct=crop_pct)
    ours = eval_transform(spec(*size, crop_pct=crop_pct))(photo(*image_size))
    assert ours.shape == (3, *size)
    assert torch.equal(ours, theirs(photo(*image_size)))


def test_squash_shows_the_whole_image_distorted() -> None:
    image = photo(50, 90)
    plain = spec(20, 30, mean=(0.0,) * 3, std=(1.0,) * 3, resize_mode="squash", crop_pct=0.8)
    expected = np.asarray(image.resize((30, 20), Image.Resampling.BICUBIC)).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(eval_transform(plain)(image).numpy(), expected, atol=1e-6)


def test_pad_fits_the_image_and_fills_with_the_mean() -> None:
    image = photo(50, 100)
    result = eval_transform(spec(40, 40, resize_mode="pad", crop_pct=0.8))(image)
    inside = np.asarray(image.resize((40, 20), Image.Resampling.BICUBIC)) / 255
    expected = ((inside - MEAN) / STD).transpose(2, 0, 1)
    np.testing.assert_allclose(result[:, 10:30].numpy(), expected, atol=1e-5)
    outside = torch.cat([result[:, :10], result[:, 30:]], dim=1)
    assert outside.abs().max() < 0.5 / 255 / min(STD) + 1e-4  # the mean, rounded to 8 bits


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
def test_every_mode_gives_height_by_width(mode: str) -> None:
    for size in [(5, 300), (300, 5), (1, 1)]:
        assert eval_transform(spec(16, 48, resize_mode=mode))(photo(*size)).shape == (3, 16, 48)


def test_one_channel_is_the_luminance() -> None:
    grey = InputSpec(8, 8, in_chans=1, mean=(0.5,), std=(0.25,), resize_mode="pad")
    image = photo(8, 8)
    r, g, b = np.asarray(image).astype(np.float64).transpose(2, 0, 1)
    expected = ((0.299 * r + 0.587 * g + 0.114 * b) / 255 - 0.5) / 0.25
    result = eval_transform(grey)(image)
    assert result.shape == (1, 8, 8)
    np.testing.assert_allclose(result[0].numpy(), expected, atol=1 / 255 / 0.25)
    assert train_transform(grey, auto_augment="rand-m5")(image).shape == (1, 8, 8)


def test_a_crop_of_a_tiny_image_has_a_pixel() -> None:
    transform = train_transform(spec(8, 8), crop_scale=(0.01, 0.02))
    for seed in range(20):
        random.seed(seed)
        assert transform(photo(2, 3)).shape == (3, 8, 8)


def test_train_equals_timm_for_square_sizes() -> None:
    options = {"hflip": 0.5, "color_jitter": 0.3, "interpolation": "bicubic", "mean": MEAN, "std": STD}
    theirs = create_transform((3, 32, 32), is_training=True, scale=(0.6, 1.0), **options)
    ours = train_transform(spec(32, 32), color_jitter=0.3)
    for seed in range(5):
        results = []
        for transform in (theirs, ours):
            random.seed(seed)
            torch.manual_seed(seed)
            results.append(transform(photo(60, 80)))
        assert torch.equal(*results)


def test_train_crops_keep_the_proportions_of_a_wide_input() -> None:
    # a horizontal ramp: the slope seen in the crop tells by how much it was stretched in width, likewise in height
    ramp = np.zeros((400, 400, 3), np.uint8)
    ramp[..., 0] = np.linspace(0, 255, 400)[None]
    ramp[..., 1] = np.linspace(0, 255, 400)[:, None]
    wide = spec(32, 96, mean=(0.0,) * 3, std=(1.0,) * 3)
    random.seed(0)
    for _ in range(20):
        out = train_transform(wide, crop_scale=(0.1, 0.3), hflip=0)(Image.fromarray(ramp)).numpy()
        per_pixel = (out[0, 16, 80] - out[0, 16, 16]) / 64, (out[1, 28, 48] - out[1, 4, 48]) / 24
        assert 0.7 < per_pixel[0] / per_pixel[1] < 1.4


@pytest.mark.parametrize(
    "words", ["rand-m9-mstd0.5-inc1", "rand-m10-inc1", "rand-mstd1-tweights", "original", "augmix-m5-w4-d2", "3a"]
)
def test_augmentations_run_and_travel_to_workers(words: str) -> None:
    transform = train_transform(spec(24, 32), auto_augment=words, reprob=0.5, color_jitter=0.2)
    transform = pickle.loads(pickle.dumps(transform))
    for seed in range(60):
        random.seed(seed)
        np.random.seed(seed)
        result = transform(photo(30, 40))
        assert result.shape == (3, 24, 32) and bool(torch.isfinite(result).all())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"crop_scale": (0.0, 1.0)}, "crop scale is 0.0 to 1.0"),
        ({"crop_scale": (0.9, 0.5)}, "crop scale"),
        ({"hflip": 1.5}, "hflip is 1.5"),
        ({"reprob": -0.1}, "reprob"),
        ({"color_jitter": -1.0}, "colour jitter"),
        ({"auto_augment": "rand-banana"}, "rand-banana"),
        ({"auto_augment": "rand-m9-inc"}, "rand-m9-inc"),
        ({"auto_augment": "rand-q3"}, "rand-q3"),
        ({"auto_augment": "magic"}, "magic"),
    ],
)
def test_wrong_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        train_transform(spec(32, 32), **options)


def test_wrong_specs() -> None:
    with pytest.raises(UsageError, match="4 channels; give as many values"):
        eval_transform(InputSpec(8, 8, in_chans=4))
    with pytest.raises(UsageError, match="interpolation 'cubic'"):
        eval_transform(spec(8, 8, interpolation="cubic"))

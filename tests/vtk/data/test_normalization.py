"""Normalisation by mean and standard deviation: against the formula in double precision, in both directions."""

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.card import InputSpec
from vtk.data.loading.normalization import Normalize, mean_and_std, to_input, to_pixels
from vtk.errors import UsageError

MEAN, STD = (0.48, 0.45, 0.4, 0.1), (0.22, 0.23, 0.21, 0.5)
SPEC = InputSpec(4, 6, in_chans=4, mean=MEAN, std=STD)


def test_pixels_become_inputs_and_inputs_pixels() -> None:
    pixels = np.random.default_rng(0).random((2, 4, 4, 6))
    expected = (pixels - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    images = to_input(torch.from_numpy(pixels).float(), SPEC)
    assert images.dtype == torch.float32 and np.allclose(images.numpy(), expected, rtol=0, atol=1e-6)
    assert np.allclose(to_pixels(images, SPEC).numpy(), pixels, rtol=0, atol=1e-6)
    assert np.allclose(to_pixels(torch.from_numpy(expected), SPEC).numpy(), pixels, rtol=0, atol=1e-15)


def test_statistics_have_the_channels_first_and_the_type_asked_for() -> None:
    mean, std = mean_and_std(SPEC, torch.float64)
    assert mean.shape == std.shape == (4, 1, 1) and mean.dtype == torch.float64
    assert mean.flatten().tolist() == list(MEAN) and std.flatten().tolist() == list(STD)


def test_bands_are_normalised_each_by_its_own_values() -> None:
    planes = np.random.default_rng(1).integers(0, 256, (4, 4, 6)).astype(np.uint8)
    expected = (planes / 255 - np.array(MEAN)[:, None, None]) / np.array(STD)[:, None, None]
    tensor = Normalize(SPEC)(tuple(Image.fromarray(plane) for plane in planes))
    assert np.allclose(tensor.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("convert", [to_input, to_pixels])
def test_images_of_other_channels_are_refused(convert: object) -> None:
    with pytest.raises(UsageError, match="images have 3 channels, the input's mean and std 4"):
        convert(torch.zeros(1, 3, 4, 6), SPEC)  # type: ignore[operator]

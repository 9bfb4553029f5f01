"""Corruptions against NumPy, SciPy and Pillow, whatever the number of channels; accuracies are those of a loop."""

import io

import matplotlib.colors
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage

from tests.vtk.analysis._models import tiny_vit
from tests.vtk.analysis._robust import (
    Recorder,
    context,
    draws,
    labelled,
    linear,
    pictures,
    pictures_and_words,
    spec,
    to_input,
    to_pixels,
)
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.measures.blur_kernels import convolve, disc, lines
from vtk.analysis.measures.corruptions import corruption_accuracy
from vtk.analysis.measures.pixel_corruptions import KINDS, corrupt
from vtk.errors import UsageError


def smooth(count: int, height: int, width: int, channels: int = 3) -> torch.Tensor:
    """Pictures with structure, from 0 to 1, fp64."""
    x = torch.rand(count, channels, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return F.interpolate(x, (height, width), mode="bilinear", align_corners=False)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_pictures_of_any_size_and_channels_ever_more(kind, channels):
    x = smooth(3, 40, 56, channels)
    changes = []
    for severity in range(1, 6):
        changed = corrupt(x, draws(x), kind, severity)
        assert changed.shape == x.shape and changed.dtype == x.dtype and 0 <= changed.min() <= changed.max() <= 1
        changes.append(float((changed - x).square().mean()))
    assert changes[0] > 0 and changes[4] > 1.2 * changes[0]
    assert corrupt(x, draws(x), kind, 0) is x
    parts = [corrupt(x[:1], draws(x[:1]), kind, 3), corrupt(x[1:], draws(x[1:], first=1), kind, 3)]
    assert torch.allclose(torch.cat(parts), corrupt(x, draws(x), kind, 3), atol=1e-12)  # at any batch size


@pytest.mark.parametrize(
    "kind", [kind for kind, one in KINDS.items() if one.group != "weather" and "noise" not in kind]
)
def test_a_grey_picture_stays_grey_under_blur_and_files(kind):
    x = torch.full((1, 3, 32, 32), 0.5, dtype=torch.float64)
    assert torch.allclose(corrupt(x, draws(x), kind, 5), x, atol=0.01)


def test_blurs_are_convolutions_that_keep_the_light():
    x = smooth(2, 24, 31)
    kernels = torch.cat([disc(2.3, x), disc(2.3, x).flip(-1)])
    kernels[1, 0, 1] += 0.5  # not symmetric
    found = convolve(x, kernels).numpy()
    for image, kernel, planes in zip(x.numpy(), kernels.numpy(), found, strict=True):
        for plane, expected in zip(planes, image, strict=True):
            assert np.allclose(plane, ndimage.convolve(expected, kernel, mode="mirror"), atol=1e-12)
    angles = torch.tensor([0.0, torch.pi / 2, 0.4], dtype=torch.float64)
    for kernel in (*disc(3.0, x), *lines(9.0, 1.0, angles)):
        assert float(kernel.sum()) == pytest.approx(1) and kernel.min() >= 0
    flat, upright, _ = lines(9.0, 1.0, angles)
    middle = len(flat) // 2
    assert torch.allclose(flat[middle, middle - 4 : middle + 5], torch.full((9,), 1 / 9, dtype=torch.float64))
    assert torch.allclose(upright, flat.T, atol=1e-12)
    assert torch.allclose(
        convolve(x[..., :4, :4], disc(9.0, x)).mean(dim=(-2, -1)), x[..., :4, :4].mean(dim=(-2, -1)), atol=0.2
    )


def test_defocus_has_the_radius_of_its_severity_at_224_pixels_and_shrinks_with_the_picture():
    for side, radius in ((224, 6), (112, 3)):
        dot = torch.zeros(1, 1, side, side, dtype=torch.float64)
        dot[0, 0, side // 2, side // 2] = 1
        spread = corrupt(dot, draws(dot), "defocus-blur", 3)[0, 0]
        reached = (spread > 1e-9).any(0).nonzero().flatten()
        assert int(reached[-1] - reached[0]) == 2 * radius


def test_impulse_noise_makes_half_of_its_share_black_and_half_white():
    x = torch.full((2, 3, 100, 100), 0.5, dtype=torch.float64)
    found = corrupt(x, draws(x), "impulse-noise", 5)
    for value in (0.0, 1.0):
        assert float((found == value).double().mean()) == pytest.approx(0.135, abs=0.01)
    assert float((found == 0.5).double().mean()) == pytest.approx(0.73, abs=0.01)


def test_light_contrast_and_blocks_are_their_formulas():
    x = 0.2 + 0.3 * smooth(1, 40, 40)
    pixels = x.numpy()
    hsv = matplotlib.colors.rgb_to_hsv(pixels[0].transpose(1, 2, 0))
    hsv[..., 2] = np.minimum(hsv[..., 2] + 0.2, 1)
    brighter = corrupt(x, draws(x), "brightness", 2)[0].permute(1, 2, 0)
    assert np.allclose(brighter, matplotlib.colors.hsv_to_rgb(hsv), atol=1e-6)
    assert np.allclose(corrupt(x[:, :1], draws(x[:, :1]), "brightness", 2), pixels[:, :1] + 0.2)
    assert np.allclose(corrupt(0 * x, draws(x), "brightness", 2), 0.2)
    mean = pixels.mean(axis=(2, 3), keepdims=True)
    assert np.allclose(corrupt(x, draws(x), "contrast", 4), mean + 0.1 * (pixels - mean))
    blocks = pixels.reshape(1, 3, 10, 4, 10, 4).mean(axis=(3, 5))
    assert np.allclose(corrupt(x, draws(x), "pixelate", 5), blocks.repeat(4, 2).repeat(4, 3))


def test_jpeg_is_pillows():
    x = smooth(1, 48, 48)
    stored = (x[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(stored).save(buffer, "JPEG", quality=10)
    by_pillow = np.asarray(Image.open(buffer)) / 255
    found = corrupt(x, draws(x), "jpeg", 4)[0].permute(1, 2, 0).numpy()
    assert abs(found - by_pillow).mean() < 0.003 < abs(found - stored / 255).mean()


def test_fog_lifts_the_dark_and_varies_slowly():
    x = torch.zeros(1, 3, 64, 64, dtype=torch.float64)
    haze = corrupt(x, draws(x), "fog", 3)[0].numpy()
    assert np.allclose(haze[0], haze[2]) and haze.min() == pytest.approx(0.8 / 3) and haze.max() == pytest.approx(2 / 3)
    power = abs(np.fft.fft2(haze[0] - haze[0].mean())) ** 2
    radius = np.hypot(*np.meshgrid(np.fft.fftfreq(64) * 64, np.fft.fftfreq(64) * 64))
    assert power[radius < 8].sum() > 0.8 * power.sum()  # of white noise it is 5 %


def test_snow_covers_about_its_share():
    x = torch.zeros(4, 3, 112, 112, dtype=torch.float64)
    covered = [float((corrupt(x, draws(x), "snow", s) > 0.4).double().mean()) for s in (1, 3, 5)]
    assert covered[0] < covered[1] < covered[2] and 0.05 < covered[1] < 0.35


def test_elastic_moves_by_its_distance_and_keeps_colours():
    ramp = torch.linspace(0, 1, 224, dtype=torch.float64).expand(1, 1, 224, 224)
    moved = corrupt(ramp, draws(ramp), "elastic", 3)[..., 20:-20] - ramp[..., 20:-20]
    assert float(moved.square().mean().sqrt()) * 223 == pytest.approx(4.0, rel=0.25)  # pixels, one of two directions


def test_accuracy_is_that_of_a_loop_by_hand_whatever_the_batches():
    of, model = spec(16), linear(16)
    batches = labelled(model, pictures(20, of))
    options = {"spec": of, "kinds": ("fog", "impulse-noise"), "severities": (5, 1), "seed": 3}
    found = corruption_accuracy(model, batches, **options)
    (x, y) = batches[0]
    pixels = to_pixels(x, of)
    by_hand = [
        float((model(to_input(corrupt(pixels, draws(pixels, seed=3), kind, s), of)).argmax(1) == y).double().mean())
        for kind in ("fog", "impulse-noise")
        for s in (1, 5)
    ]
    assert [a for curve in found.kinds for a in curve.accuracies] == by_hand and min(by_hand) < 1
    assert found.clean == 1 and found.mean == found.relative == pytest.approx(sum(by_hand) / 4)
    assert found.groups == ("weather", "noise") and found.kinds[0].strengths == (1, 5)
    pieces = list(zip(x.split(3), y.split(3), strict=True))
    assert corruption_accuracy(model, pieces, **options) == found
    assert corruption_accuracy(model, batches, **{**options, "seed": 4}) != found


def test_all_kinds_are_measured_by_default_and_kept_from_0_to_1():
    of, model = spec(32, 1), Recorder()
    found = corruption_accuracy(model, pictures(2, of), spec=of)
    assert len(model.seen) == 1 + 3 * len(KINDS) and [curve.name for curve in found.kinds] == list(KINDS)
    for seen in model.seen:
        assert -1e-12 <= to_pixels(seen, of).min() <= to_pixels(seen, of).max() <= 1 + 1e-12


def test_an_unknown_kind_is_named_with_those_there_are():
    of = spec()
    with pytest.raises(UsageError, match=r"corruption frost is not known; choose gaussian-noise, .*jpeg"):
        corruption_accuracy(tiny_vit(), pictures(1, of), spec=of, kinds=("frost",))
    with pytest.raises(UsageError, match="`severities`"):
        corruption_accuracy(tiny_vit(), pictures(1, of), spec=of, severities=(0,))


def test_the_diagnostic_draws_and_reads():
    one = diagnostic("corruptions")
    of = spec(32)
    found = one.measure(context(tiny_vit(img_size=32), pictures(6, of), of))
    words = pictures_and_words(one, found, runs=2)
    assert "are not the images of ImageNet-C" in words[-1] and found["images"] == 6
    kinds = [{**kind, "accuracies": [0.3] * 3 if group == "noise" else [0.8] * 3}
             for kind, group in zip(found["kinds"], found["groups"], strict=True)]  # fmt: skip
    told = one.read({**found, "clean": 0.9, "images": 500, "kinds": kinds, "mean": 0.68, "relative": 0.76})
    assert "76 % of the clean accuracy" in told[1] and "noise hurts most (accuracy 30.0 %)" in told[2]
    assert "nothing can be lost" in one.read({**found, "clean": 0.3})[0]

"""Noise of one band has power only in its ring, by NumPy's FFT, and accuracies are those of a loop by hand."""

import numpy as np
import pytest
import torch

from tests.vtk.analysis._models import tiny_vit
from tests.vtk.analysis._robust import Recorder, context, labelled, pictures, pictures_and_words, spec, to_pixels
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.measures.frequency_noise import band, cut, frequency_noise
from vtk.errors import DataError, UsageError


def ring(height, width):
    """Larger component of the frequency, in units of π, by NumPy."""
    return np.maximum(*np.meshgrid(abs(np.fft.fftfreq(height)) * 2, abs(np.fft.fftfreq(width)) * 2, indexing="ij"))


@pytest.mark.parametrize("centre", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("size", [(64, 64), (40, 56), (33, 33)], ids=str)
def test_noise_has_power_in_its_band_only(centre, size):
    height, width = size
    noise = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = cut(noise, band(height, width, centre, 0.1)).numpy()
    power = abs(np.fft.fft2(found)) ** 2
    inside = abs(ring(height, width) - centre) <= 0.05 + 1e-9
    assert power[..., ~inside].max() < 1e-20 * power.max()
    assert np.allclose(power[..., inside], abs(np.fft.fft2(noise.numpy())[..., inside]) ** 2)  # and all that was there


def test_bands_of_all_centres_are_the_whole_noise():
    masks = torch.stack([band(64, 64, i / 10, 0.1) for i in range(11)])
    assert masks.sum(0).min() >= 1 and masks.float().mean(dim=(1, 2))[1] < masks.float().mean(dim=(1, 2))[9]


def test_what_the_model_sees_is_the_picture_and_noise_of_the_stated_strength():
    of, model = spec(32), Recorder()
    batches = pictures(3, of)
    frequency_noise(model, batches, spec=of, centres=(0.2, 0.9), rms=0.07)
    for seen, centre in zip(model.seen[1:], (0.2, 0.9), strict=True):
        noise = (to_pixels(seen, of) - to_pixels(batches[0][0], of)).numpy()
        assert np.sqrt((noise**2).mean(axis=(1, 2, 3))) == pytest.approx([0.07] * 3, rel=1e-9)
        power = abs(np.fft.fft2(noise)) ** 2
        assert power[..., abs(ring(32, 32) - centre) > 0.0501].max() < 1e-15 * power.max()
    assert float(to_pixels(model.seen[1], of).max()) > 1  # not cut off, as in the paper


def test_unscaled_noise_is_the_papers_formula():
    of, model = spec(32), Recorder()
    batches = pictures(2, of)
    frequency_noise(model, batches, spec=of, centres=(0.5, 0.9), rms=0.1, equal_power=False)
    low, high = (to_pixels(seen, of) - to_pixels(batches[0][0], of) for seen in model.seen[1:])
    for noise, centre in ((low, 0.5), (high, 0.9)):  # the power of white noise, by the share of frequencies in the band
        share = (abs(ring(32, 32) - centre) <= 0.05 + 1e-9).mean()
        assert float(noise.square().mean()) == pytest.approx(0.01 * share, rel=0.15)
    assert high.square().mean() > 1.3 * low.square().mean()


def test_accuracy_is_that_of_a_loop_by_hand_whatever_the_batches():
    of, model = spec(16), tiny_vit(img_size=16)
    batches = labelled(model, pictures(12, of))
    found = frequency_noise(model, batches, spec=of, centres=(0.0, 1.0), window=0.2, rms=2.0, seed=5)
    recorder = Recorder()
    frequency_noise(recorder, batches, spec=of, centres=(0.0, 1.0), window=0.2, rms=2.0, seed=5)
    (_, labels) = batches[0]
    with torch.no_grad():
        by_hand = [float((model(seen).argmax(1) == labels).double().mean()) for seen in recorder.seen]
    assert [found.clean, *found.bands.accuracies] == by_hand and found.clean == 1 and min(by_hand) < 1
    (x, y) = batches[0]
    pieces = list(zip(x.split((1, 6, 5)), y.split((1, 6, 5)), strict=True))
    options = {"spec": of, "centres": (0.0, 1.0), "window": 0.2, "rms": 2.0}
    assert frequency_noise(model, pieces, seed=5, **options) == found
    assert frequency_noise(model, batches, spec=of, centres=(0.0, 1.0), rms=0, window=0.2).bands.accuracies == (1, 1)


@pytest.mark.parametrize("channels", [1, 5])
def test_any_number_of_channels(channels):
    of = spec(16, channels)
    model = tiny_vit(img_size=16, in_chans=channels)
    assert 0 <= frequency_noise(model, pictures(4, of), spec=of, window=0.2).bands.accuracies[-1] <= 1


def test_what_cannot_be_done_is_said_in_one_line():
    of = spec()
    with pytest.raises(
        UsageError, match=r"8×8 pixels have no frequency within 0.05π of 0.1π.*`window` of at least that"
    ):
        frequency_noise(tiny_vit(), pictures(2, of), spec=of)
    with pytest.raises(UsageError, match="`centres`"):
        frequency_noise(tiny_vit(), pictures(2, of), spec=of, centres=(1.5,))
    with pytest.raises(UsageError, match="channels"):
        frequency_noise(tiny_vit(), pictures(2, of), spec=spec(8, 4), window=0.3)
    soft = [(x, torch.eye(3)[y]) for x, y in pictures(2, of)]
    with pytest.raises(UsageError, match=r"labels are \(2, 3\)"):
        frequency_noise(tiny_vit(), soft, spec=of, window=0.3)
    with pytest.raises(DataError, match="no images"):
        frequency_noise(tiny_vit(), [], spec=of, window=0.3)


def test_the_diagnostic_draws_and_reads():
    one = diagnostic("frequency-noise")
    found = one.measure(context())
    assert found["window"] == 0.25 and len(found["bands"]["accuracies"]) == 11
    words = pictures_and_words(one, found, runs=2)
    assert "clean images is 100.0 %; with 12 images its 95 % interval is 75.8 to 100.0 %." in words[0]
    for low, high, expected in ((0.9, 0.1, "ConvNets"), (0.1, 0.9, "ViTs"), (0.5, 0.5, "within the uncertainty")):
        accuracies = [low if x < 0.5 else high for x in found["bands"]["strengths"]]
        told = one.read({**found, "images": 500, "bands": {**found["bands"], "accuracies": accuracies}})
        assert expected in told[-1]
    assert "nothing can be lost" in one.read({**found, "clean": 0.3})[0]

"""Noise by its mean and variance, blur by SciPy, accuracies by hand; the random numbers of an image by its place."""

import numpy as np
import pytest
import torch
from scipy import ndimage

from tests.vtk.analysis._models import tiny_vit
from tests.vtk.analysis._robust import (
    Recorder,
    context,
    draws,
    labelled,
    pictures,
    pictures_and_words,
    spec,
    to_pixels,
)
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.measures.accuracy import accuracies
from vtk.analysis.measures.noise import gaussian_blur, gaussian_noise, noise_accuracy, shot_noise
from vtk.analysis.probes.share import Share
from vtk.errors import UsageError


def test_shot_noise_has_a_poisson_counts_mean_and_variance():
    grey = torch.full((2, 3, 100, 100), 0.3, dtype=torch.float64)
    found = shot_noise(grey, draws(grey), 0.2)  # 25 photons where it is white
    counts = found.numpy() * 25
    assert np.allclose(counts, counts.round())
    assert counts.mean() == pytest.approx(7.5, abs=0.05) and counts.var() == pytest.approx(7.5, rel=0.03)
    white = torch.ones_like(grey)
    assert float((shot_noise(white, draws(white), 0.2) - 1).std()) == pytest.approx(0.2, rel=0.02)


def test_gaussian_noise_has_its_deviation_and_no_bias():
    grey = torch.full((2, 3, 100, 100), 0.5, dtype=torch.float64)
    added = gaussian_noise(grey, draws(grey), 0.1) - grey
    assert float(added.std()) == pytest.approx(0.1, rel=0.02) and abs(float(added.mean())) < 0.002


@pytest.mark.parametrize("deviation", [0.5, 1.0, 3.0])
def test_blur_is_scipys(deviation):
    x = torch.rand(1, 2, 40, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = gaussian_blur(x, draws(x), deviation).numpy()[0]
    radius = int(np.ceil(3 * deviation))
    for plane, expected in zip(found, x[0].numpy(), strict=True):
        assert np.allclose(plane, ndimage.gaussian_filter(expected, deviation, mode="mirror", radius=radius), atol=1e-9)


def test_blur_wider_than_the_image_is_still_a_mean_of_it():
    x = torch.rand(1, 3, 5, 7, dtype=torch.float64)
    assert x.min() <= gaussian_blur(x, draws(x), 8.0).min() <= gaussian_blur(x, draws(x), 8.0).max() <= x.max()


def test_an_image_has_the_same_noise_in_any_batch_and_other_noise_than_its_neighbours():
    x = torch.rand(5, 3, 4, 4, dtype=torch.float64)
    whole = draws(x)
    for kind in ("normal", "uniform"):
        parts = [getattr(draws(x[:2]), kind)("a"), getattr(draws(x[2:], first=2), kind)("a")]
        assert torch.equal(torch.cat(parts), getattr(whole, kind)("a"))
    assert torch.equal(torch.cat([draws(x[:2]).poisson("a", 9 * x[:2]), draws(x[2:], first=2).poisson("a", 9 * x[2:])]),
                       whole.poisson("a", 9 * x))  # fmt: skip
    a = whole.normal("a")
    assert whole.normal("a") is a and not torch.equal(a[0], a[1])
    assert not torch.equal(a, whole.normal("b")) and not torch.equal(a, draws(x, seed=1).normal("a"))


def test_what_the_model_sees_stays_from_0_to_1_and_strength_0_is_clean():
    of, model = spec(), Recorder()
    noise_accuracy(model, pictures(3, of), spec=of)
    for seen in model.seen:
        assert -1e-12 <= to_pixels(seen, of).min() <= to_pixels(seen, of).max() <= 1 + 1e-12
    vit = tiny_vit()
    found = noise_accuracy(vit, labelled(vit, pictures(9, of)), spec=of, deviations=(0.0,), blurs=(0.0,))
    assert found.clean == 1 and [curve.accuracies for curve in found.curves] == [(1.0,)] * 3


def test_accuracy_is_the_same_by_hand_at_any_batch_size_and_in_two_processes():
    of, model = spec(), tiny_vit(2)
    batches = labelled(model, pictures(12, of))
    options = {"spec": of, "deviations": (40.0, 200.0), "blurs": (4.0,), "seed": 2}
    found = noise_accuracy(model, batches, **options)
    (x, y) = batches[0]
    pixels = to_pixels(x, of)
    dealt = draws(pixels, seed=2)
    for curve, change, strengths in zip(
        found.curves,
        (gaussian_noise, shot_noise, gaussian_blur),
        ((40 / 255, 200 / 255), (40 / 255, 200 / 255), (4.0,)),
        strict=True,
    ):
        for value, strength in zip(curve.accuracies, strengths, strict=True):
            mean, std = (torch.tensor(v, dtype=x.dtype)[:, None, None] for v in (of.mean, of.std))
            changed = (change(pixels, dealt, strength).clamp(0, 1) - mean) / std
            assert value == float((model(changed).argmax(1) == y).double().mean())
    assert found.curves[0].accuracies[1] < 1
    pieces = list(zip(x.split((5, 1, 6)), y.split((5, 1, 6)), strict=True))
    assert noise_accuracy(model, pieces, **options) == found == noise_accuracy(model, batches, **options)
    assert noise_accuracy(model, batches, **{**options, "seed": 3}).curves != found.curves

    counts = []
    for rank in range(2):  # the second adds what the first has counted
        told = noise_accuracy(model, pieces, **options, share=Share(rank, 2, lambda t: counts.append(t) or sum(counts)))
    assert told == found


def test_nothing_of_the_model_changes():
    of, model = spec(), tiny_vit(drop_path_rate=0.5, proj_drop_rate=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = (noise_accuracy(model, pictures(4, of), spec=of) for _ in range(2))
    assert first == second and model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_max_images_takes_the_first_and_labels_must_be_the_models():
    of, model = spec(), tiny_vit()
    batches = pictures(6, of, sizes=(4, 2))
    few = noise_accuracy(model, batches, spec=of, max_images=3)
    assert few == noise_accuracy(model, [(batches[0][0][:3], batches[0][1][:3])], spec=of) and few.images == 3
    with pytest.raises(UsageError, match="labels reach 7; VisionTransformer has 3 outputs"):
        accuracies(model, [(batches[0][0], torch.full((4,), 7))], {}, spec=of)
    with pytest.raises(UsageError, match="needs logits"):
        accuracies(torch.nn.Conv2d(3, 3, 1).double(), batches, {}, spec=of)
    with pytest.raises(UsageError, match="`blurs`"):
        noise_accuracy(model, batches, spec=of, blurs=(-1.0,))


def test_the_diagnostic_draws_and_reads():
    one = diagnostic("noise")
    found = one.measure(context(seed=1))
    assert found == one.measure(context(seed=1))
    pictures_and_words(one, found, runs=2)
    curve = {"name": "Gaussian noise", "unit": "", "strengths": [5.0, 40.0, 80.0], "accuracies": [0.9, 0.6, 0.3]}
    told = one.read({"clean": 0.9, "classes": 10, "images": 500, "curves": [curve]})
    assert (
        "half of the lead over chance is lost at a deviation of 80/255" in told[1]
    )  # (0.6 − 0.1)/(0.9 − 0.1) is above one half
    told = one.read({"clean": 0.9, "classes": 10, "images": 500, "curves": [{**curve, "accuracies": [0.9, 0.4, 0.3]}]})
    assert "half of the lead over chance is lost at a deviation of 40/255" in told[1] and "--sam auto" in told[2]
    assert "nothing can be lost" in one.read({**found, "clean": 1 / 3})[0]

"""Frequencies of feature maps: plane waves, a filter of known response, and the paper's recipe in numpy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import feature_spectra
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.measures.fourier import EPSILON, log_amplitudes
from vtk.errors import DataError, UsageError


def recipe(maps):
    """Park and Kim's notebook: shifted transform, mean of logarithms, half of the diagonal, minus its first entry."""
    logs = np.log(np.abs(np.fft.fft2(maps)) + 1e-6)
    height, width = maps.shape[-2:]
    logs = np.roll(logs, (height // 2, width // 2), axis=(-2, -1)).mean(axis=(0, 1))
    diagonal = np.diagonal(logs)[height // 2 :]
    return diagonal - diagonal[0]


def random_maps(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("side", [14, 7, 8, 2, 1])
def test_the_half_diagonal_is_that_of_the_papers_recipe(side):
    maps = random_maps(2, 3, side, side) + 1
    found = log_amplitudes(maps).mean(dim=(0, 1))
    expected = recipe(maps.numpy())
    assert (found - found[0]).numpy() == pytest.approx(expected, abs=1e-9)
    assert len(expected) == math.ceil(side / 2)


def test_a_plane_wave_has_its_amplitude_at_its_frequency_and_nothing_elsewhere():
    side, waves = 14, 3
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    wave = 2 + 5 * torch.cos(2 * math.pi * waves * (x + y).double() / side)
    found = log_amplitudes(wave[None, None])[0, 0]
    assert found[0].item() == pytest.approx(math.log(2 * side**2)), "the mean, 2"
    assert found[waves].item() == pytest.approx(math.log(5 / 2 * side**2)), "half of 5 there, half at the negative"
    for k in set(range(7)) - {0, waves}:
        assert found[k].item() == pytest.approx(math.log(EPSILON), abs=1e-4)


def test_an_averaging_filter_lowers_frequencies_by_its_response():
    maps = random_maps(2, 4, 16, 16)
    padded = F.pad(maps, (1, 1, 1, 1), mode="circular")
    smooth = F.avg_pool2d(padded, 3, stride=1)
    lowered = (log_amplitudes(smooth) - log_amplitudes(maps)).mean(dim=(0, 1))
    response = [abs(1 + 2 * math.cos(2 * math.pi * k / 16)) / 3 for k in range(8)]  # of a mean of three, for each axis
    assert lowered.tolist() == pytest.approx([2 * math.log(r) for r in response], abs=1e-4)


def test_maps_that_are_not_square_have_the_same_frequency_along_both_axes():
    y, x = torch.meshgrid(torch.arange(8), torch.arange(16), indexing="ij")
    wave = torch.cos(2 * math.pi * (2 * y / 8 + 4 * x / 16)).double()
    found = log_amplitudes(wave[None, None])[0, 0]
    assert found.argmax() == 2 and len(found) == 4
    assert torch.equal(log_amplitudes(wave.T[None, None])[0, 0].argmax(), found.argmax())


def test_a_vits_units_are_its_blocks_halves_over_all_images_and_channels():
    model = tiny_vit(depth=2, img_size=24, init_values=0.4, reg_tokens=1)
    batches = images(5, side=24, sizes=(2, 2, 1))
    x = torch.cat([x for x, _ in batches])
    found = feature_spectra(model, batches)
    with torch.no_grad():
        points = [model._pos_embed(model.patch_embed(x))]
        for block in model.blocks:
            middle = points[-1] + block.ls1(block.attn(block.norm1(points[-1])))
            points += [middle, middle + block.ls2(block.mlp(block.norm2(middle)))]
    assert found.images == 5 and not found.without_map
    for unit, tokens in zip(found.units, points, strict=True):
        expected = recipe(tokens[:, 2:].transpose(1, 2).reshape(5, -1, 6, 6).numpy())
        assert unit.amplitudes == pytest.approx(expected, abs=1e-6)
        assert unit.high == unit.amplitudes[-1] and unit.frequencies == pytest.approx([0, 1 / 3, 2 / 3])
        assert (unit.height, unit.width) == (6, 6)


def test_it_does_not_depend_on_batches_and_leaves_the_model_alone():
    model = timm_model("test_resnet").double().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    whole = feature_spectra(model, images(4, side=64))
    parts = feature_spectra(model, images(4, side=64, sizes=(1, 3)))
    for one, other in zip(whole.units, parts.units, strict=True):
        assert one.amplitudes == pytest.approx(other.amplitudes, abs=1e-9)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_maps_of_one_position_have_no_high_frequency_and_images_of_two_sizes_are_refused():
    found = feature_spectra(timm_model("test_resnet").double(), images(2, side=16))
    assert found.units[-1].high is None and found.units[-1].amplitudes == (0.0,)
    model = timm_model("test_resnet").double()
    with pytest.raises(UsageError, match="have different sizes"):
        feature_spectra(model, [*images(1, side=64), *images(1, side=96)])
    with pytest.raises(DataError):
        feature_spectra(model, [])


def unit(kind, high, name="u", side=8):
    return {"name": name, "kind": kind, "height": side, "width": side, "high": high, "amplitudes": [0, high],
            "frequencies": [0, 0.75]}  # fmt: skip


def told(*units):
    return " ".join(diagnostic("fourier").read({"units": list(units), "without_map": (), "images": 1}))


def test_the_reading_says_which_kinds_lower_high_frequencies():
    low_pass = [unit("other", -1.0)]
    for _ in range(4):
        low_pass += [unit("msa", low_pass[-1]["high"] - 0.5), unit("mlp", low_pass[-1]["high"] + 0.25)]
    text = told(*low_pass)
    assert "An MSA changes the amplitude of high frequencies by −0.5 nats on average; 4 of 4 MSAs lower it." in text
    assert "An MLP changes the amplitude of high frequencies by 0.75 nats on average; 0 of 4 MLPs lower it." in text
    assert "as Park and Kim (2022) find for ViTs" in text and "--stem" not in text
    rising = [unit("other", -3.0), unit("msa", -2.0), unit("mlp", -1.5), unit("msa", -1.0), unit("mlp", -1.2)]
    text = told(*rising, *rising[1:], *rising[1:])
    assert "here MSAs and MLPs do not" in text and "--stem conv" in text
    numbers = diagnostic("fourier").numbers({"units": rising})
    assert numbers["high-frequency change by an MSA, nats"] == pytest.approx((1.0 + 0.5) / 2)


def test_steps_over_subsampling_are_not_counted_and_what_has_no_frequency_is_said():
    text = told(unit("other", -1.0), unit("msa", -2.0), unit("msa", -9.0, side=4))
    assert "by −1 nats on average; 1 of 1 MSAs" in text
    none = {**unit("conv", None), "amplitudes": [0.0], "frequencies": [0.0]}
    assert "0 is their only frequency" in told(none, none)


def test_it_is_drawn_alone_and_beside_a_model_of_other_kinds():
    vit = feature_spectra(tiny_vit(depth=2, img_size=24), images(2, side=24)).to_dict()
    resnet = feature_spectra(timm_model("test_resnet").double(), images(2, side=32)).to_dict()
    for runs, axes in ([Run("a", vit)], 1), ([Run("a", vit), Run("b", vit)], 1), ([Run("a", vit), Run("b", resnet)], 2):
        high, curves = diagnostic("fourier").draw(runs)
        assert len(high.figure.axes) == axes and len(curves.figure.axes) == len(runs) + 1
        lines = [line for one in high.figure.axes for line in one.get_lines()]
        for run, line in zip(runs, lines, strict=True):
            expected = [math.nan if u["high"] is None else u["high"] for u in run.result["units"]]
            assert line.get_ydata() == pytest.approx(expected, nan_ok=True)

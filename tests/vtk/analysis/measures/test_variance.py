"""Variance of feature maps against numpy, and maps whose variance is known."""

import math

import numpy as np
import pytest
import torch

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import feature_variance
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.probes.residual_units import residual_units, watch_units


def test_a_vits_values_are_numpys_over_patches_only():
    model = tiny_vit(depth=2, img_size=16, reg_tokens=2, init_values=0.5)
    batches = images(5, side=16, sizes=(3, 2))
    seen = []
    with torch.no_grad(), watch_units(residual_units(model), lambda number, value: seen.append(value.numpy().copy())):
        model(torch.cat([x for x, _ in batches]))
    found = feature_variance(model, batches)
    assert found.images == 5 and len(found.units) == 5
    for unit, tokens in zip(found.units, seen, strict=True):
        assert unit.variance == pytest.approx(np.var(tokens[:, 3:], axis=1, ddof=1).mean(), rel=1e-9)


def test_a_resnets_values_are_numpys_with_running_statistics():
    model = timm_model("test_resnet").double()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.fill_(3.0)
    batches = images(3, side=64, sizes=(2, 1))
    seen = []
    with torch.no_grad(), watch_units(residual_units(model), lambda number, value: seen.append(value.numpy().copy())):
        model(torch.cat([x for x, _ in batches]))
    found = feature_variance(model.train(), batches)
    for unit, maps in zip(found.units, seen, strict=True):
        assert unit.variance == pytest.approx(np.var(maps, axis=(2, 3), ddof=1).mean(), rel=1e-9)
        assert (unit.height, unit.width) == maps.shape[2:]


def test_attention_that_is_uniform_adds_no_variance_and_one_position_has_none():
    model = tiny_vit(depth=1, img_size=16, class_token=False, global_pool="avg")
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[8:16] = 0  # keys alike: every token gets the same mean
        model.blocks[0].attn.qkv.bias[8:16] = 0
    stem, msa, mlp = feature_variance(model, images(2, side=16)).units
    assert msa.variance == pytest.approx(stem.variance, rel=1e-12) and mlp.variance != pytest.approx(msa.variance)
    single = feature_variance(timm_model("test_resnet").double(), images(2, side=16))
    assert single.units[-1].variance is None and single.units[0].variance > 0


def unit(kind, variance, name="u", side=8):
    return {"name": name, "kind": kind, "height": side, "width": side, "variance": variance}


def result(*units):
    return {"units": list(units), "without_map": (), "images": 1}


def test_the_reading_gives_factors_of_each_kind():
    found = result(unit("other", 1.0, "stem"), unit("msa", 0.5), unit("mlp", 2.0), unit("msa", 1.0), unit("mlp", 4.0))
    text = " ".join(diagnostic("variance").read(found))
    assert "An MSA multiplies the variance by 0.5 (geometric mean); 2 of 2 MSAs reduce it." in text
    assert "An MLP multiplies the variance by 4 (geometric mean); 0 of 2 MLPs reduce it." in text
    assert "what Park and Kim (2022) expect" in text
    assert diagnostic("variance").numbers(found)["factor of the variance by an MLP"] == pytest.approx(4)
    risen = result(unit("other", 1.0, "stem"), unit("msa", 2.0))
    assert "most MSAs here do not" in " ".join(diagnostic("variance").read(risen))


def test_a_network_whose_variance_peaks_at_the_ends_of_stages_is_pointed_to_alternet():
    stages = [unit("other", 1.0, "stem", 16)]
    for side in (16, 8, 4):
        stages += [unit("subsampling" if side < 16 else "conv", 1.0, side=side), unit("conv", 2.0, side=side)]
    assert "--model alternet_50" in " ".join(diagnostic("variance").read(result(*stages)))
    stages[-1] = unit("conv", 0.5, side=4)
    stages[-3] = unit("conv", 0.5, side=8)
    assert "alternet" not in " ".join(diagnostic("variance").read(result(*stages)))


def test_it_is_drawn_with_a_gap_where_there_is_no_number():
    found = result(unit("other", 1.0), unit("conv", 2.0), unit("conv", None))
    (picture,) = diagnostic("variance").draw([Run("a", found)])
    (axes,) = picture.figure.axes
    assert axes.get_lines()[0].get_ydata() == pytest.approx([1.0, 2.0, math.nan], nan_ok=True)
    assert axes.get_yscale() == "log"

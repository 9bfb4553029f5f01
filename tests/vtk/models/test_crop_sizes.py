"""Models on crops of another size than they were built for, against timm's models of dynamic size."""

import pytest
import timm
import torch
from torch import nn

from tests.vtk.papers import _cases  # noqa: F401 - registers small_volo in timm
from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.models.crop_sizes import at_size, check_runs

SMALL = {"patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 0}


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"no_embed_class": True, "reg_tokens": 2}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    ],
    ids=["class token", "registers", "distilled", "no prefix"],
)
@pytest.mark.parametrize("size", [(8, 8), (8, 12), (24, 24)])
def test_features_of_crops_are_those_of_timms_dynamic_model(name, own, size):
    torch.manual_seed(0)
    fixed = timm.create_model(name, img_size=16, **SMALL, **own).eval()
    with torch.no_grad():
        fixed.pos_embed.normal_()
    free = timm.create_model(name, img_size=16, dynamic_img_size=True, **SMALL, **own).eval()
    free.load_state_dict(fixed.state_dict())
    images, whole = torch.randn(2, 3, *size), torch.randn(2, 3, 16, 16)
    with at_size(fixed, size):
        found = fixed(images)
    assert torch.allclose(found, free(images), atol=1e-6)
    found.square().sum().backward()
    assert fixed.pos_embed.grad.abs().sum() > 0
    assert torch.allclose(fixed(whole), free(whole), atol=1e-6)  # and it is as before
    with pytest.raises(AssertionError, match="doesn't match"):
        fixed(images)


def test_a_stem_of_convolutions_takes_crops():
    torch.manual_seed(0)
    kwargs = {k: v for k, v in SMALL.items() if k != "num_classes"}
    stem = [Transform("replace_stem", {"stem": "conv"})]
    model = build_model(
        "vit_tiny_patch16_224", num_classes=0, img_size=16, pretrained=False, kwargs=kwargs, transforms=stem
    ).model.eval()
    with at_size(model, (8, 8)):
        tokens = model.forward_features(torch.randn(2, 3, 8, 8))
    assert tokens.shape == (2, 5, 16)


def test_the_cast_of_a_16_bit_run_is_what_is_resampled():
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, **SMALL)
    cast = torch.ones_like(model.pos_embed)
    model.__dict__["pos_embed"] = cast
    with at_size(model, (8, 8)):
        assert model.pos_embed.shape == (1, 5, 16) and torch.allclose(model.pos_embed, torch.ones(1, 5, 16))
    assert model.pos_embed is cast


def test_models_that_take_one_size_are_refused_in_one_line():
    swin = timm.create_model("test_vit", img_size=32, num_classes=0, global_pool="map")
    check_runs(swin, (16, 16), 3, "")
    one = nn.Sequential(nn.Flatten(), nn.Linear(48, 3)).train()
    with pytest.raises(UsageError, match=r"Sequential does not take crops of 2×2 px \(.*\); give --local-crops 0$"):
        check_runs(one, (2, 2), 3, "give --local-crops 0")
    assert one.training and one[1].training
    check_runs(one, (4, 4), 3, "")


def test_a_map_of_positions_is_not_spread_over_a_crop_of_one_place():
    """24 px are 3×3 patches and then one place, to which VOLO would add all 4×4 positions: a map of 16 places."""
    volo = timm.create_model("small_volo", img_size=64, num_classes=0)
    assert volo(torch.randn(1, 3, 64, 64)).shape == volo(torch.randn(1, 3, 24, 24)).shape  # it says nothing
    with pytest.raises(UsageError, match=r"VOLO does not take crops of 24×24 px \(its map of 4×4 positions is for one"):
        check_runs(volo, (24, 24), 3, "")

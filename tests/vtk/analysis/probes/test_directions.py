"""Random directions: norms by hand for both ways of scaling, and what stands still."""

import pytest
import torch
from torch import nn

from tests.vtk.analysis._models import timm_model, tiny_vit
from vtk.analysis import random_directions
from vtk.errors import UsageError

RESNET = {"layers": (1, 1, 1, 1), "channels": (4, 4, 8, 8), "num_classes": 3}


@pytest.fixture(scope="module")
def vit():
    return tiny_vit(class_token=True, reg_tokens=1, init_values=0.1)


def norms_of_outputs(t):
    return torch.stack([row.flatten().square().sum().sqrt() for row in t])


def norms_of_inputs(t):
    return t.reshape(len(t), -1).square().sum(0).sqrt()


@pytest.mark.parametrize("mode, norms", [("filter", norms_of_outputs), ("reference", norms_of_inputs)])
def test_parts_have_the_weights_norms(vit, mode, norms):
    named = dict(vit.named_parameters())
    for direction in random_directions(vit, mode=mode):
        assert {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "head.weight", "cls_token"} <= set(direction)
        for name, step in direction.items():
            torch.testing.assert_close(norms(step), norms(named[name].detach()), rtol=1e-5, atol=1e-6)
            assert step.dtype == named[name].dtype and not step.requires_grad


def test_reference_moves_every_number_of_a_class_token_by_its_own_size(vit):
    first, second = random_directions(vit, mode="reference")
    for direction in (first, second):
        torch.testing.assert_close(direction["cls_token"].abs(), vit.cls_token.detach().abs(), rtol=1e-4, atol=1e-5)
    spread = random_directions(vit)[0]["cls_token"].abs() / vit.cls_token.detach().abs()
    assert float(spread.max() / spread.min()) > 2


@pytest.mark.parametrize("mode", ["filter", "reference"])
def test_positions_vectors_and_buffers_stand_still(vit, mode):
    for model in (
        vit,
        timm_model("resnet18", **RESNET),
        timm_model(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2,), num_heads=(2,)
        ),
    ):
        moving = random_directions(model, mode=mode)[0]
        expected = {
            n
            for n, p in model.named_parameters()
            if p.ndim >= 2 and "pos_embed" not in n and "relative_position_bias_table" not in n
        }
        assert set(moving) == expected and expected < set(model.state_dict())


def test_vectors_can_move_each_scaled_as_a_whole_and_the_rest_is_drawn_alike(vit):
    without, both = random_directions(vit)[0], random_directions(vit, vectors=True)[0]
    assert all(torch.equal(without[name], both[name]) for name in without)
    named = dict(vit.named_parameters())
    assert set(both) == {n for n in named if "pos_embed" not in n}
    for name in set(both) - set(without):
        assert float(both[name].norm()) == pytest.approx(float(named[name].detach().norm()), rel=1e-5), name


def test_directions_are_gaussian_independent_and_of_the_seed():
    model = nn.Linear(400, 50).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    first, second = (direction["weight"].flatten() for direction in random_directions(model, seed=3))
    assert abs(float(first @ second) / float(first.norm() * second.norm())) < 0.03
    assert float((first**4).mean() / (first**2).mean() ** 2) == pytest.approx(3, abs=0.15)
    again = random_directions(model, seed=3)[0]["weight"].flatten()
    other = random_directions(model, seed=4)[0]["weight"].flatten()
    assert torch.equal(first, again) and not torch.equal(first, other)
    near = random_directions(model, mode="reference", seed=3)[0]["weight"].flatten()
    assert float(near @ first) / float(near.norm() * first.norm()) > 0.98  # the same numbers, scaled in another way


def test_mistakes_are_named(vit):
    with pytest.raises(UsageError, match="unknown directions 'layer'; give filter or reference"):
        random_directions(vit, mode="layer")
    with pytest.raises(UsageError, match="no weights to move"):
        random_directions(nn.BatchNorm2d(3))

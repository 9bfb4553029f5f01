"""LV-ViT (Jiang et al. 2021) against its formula and published sizes, and with the stems of Wang et al. 2022."""

import pytest
import timm
import torch
from torch import nn

import vtk
from tests.vtk.models.test_stems import lively
from vtk.card import Card, Transform
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.models.lvvit import SIZES
from vtk.models.meta_model import shapes_only
from vtk.models.parallel_models import build
from vtk.models.stems import Stem
from vtk.packs.adapters import timm_call
from vtk.training.policies import policy

SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 8}


def made(**kwargs):
    torch.manual_seed(0)
    return lively(build("lvvit_small", img_size=32, num_classes=3, **{**SMALL, **kwargs}))


@pytest.mark.parametrize("skip", [1.0, 2.0, 3.0])
def test_it_is_the_written_out_model(skip):
    model, x = made(skip=skip), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        convs = list(model.patch_embed.proj.conv)
        y = x
        for conv, norm, _ in zip(convs[::3], convs[1::3], convs[2::3], strict=True):
            y = nn.functional.relu(norm(conv(y)))
        y = model.patch_embed.proj.proj(y).flatten(2).transpose(1, 2)
        y = torch.cat([model.cls_token.expand(2, -1, -1), y], 1) + model.pos_embed
        for block in model.blocks:
            y = y + block.attn(block.norm1(y)) / skip
            y = y + block.mlp(block.norm2(y)) / skip
        y = model.norm(y)
        expected = model.head(y[:, 0]) + 0.5 * model.aux_head(y[:, 1:]).max(1)[0]
        torch.testing.assert_close(model(x), expected, atol=1e-12, rtol=0)
    assert model.norm.eps == 1e-5 and model.blocks[0].attn.qkv.bias is None
    assert model.blocks[0].mlp.fc1.out_features == 3 * 24


def test_sizes_are_the_published_ones():
    """Millions of parameters with both classifiers, in the published code."""
    published = {"tiny": 8.5, "small": 26.2, "medium": 55.8, "large": 150.5}
    assert published.keys() == SIZES.keys()
    with shapes_only():
        for size, millions in published.items():
            model = build(f"lvvit_{size}")
            assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
            assert model.patch_embed.proj.conv[0].out_channels == (128 if size == "large" else 64)


def test_stems_replace_its_own_which_is_conv():
    kwargs = {k: v for k, v in SMALL.items() if k != "patch_size"}
    for stem, convs in (("conv", 4), ("3conv+1proj", 4), ("1proj", 1)):
        found = build_model(
            "lvvit_small", num_classes=3, img_size=32, pretrained=False, kwargs=kwargs,
            transforms=[Transform("replace_stem", {"stem": stem})],
        )  # fmt: skip
        embed = found.model.patch_embed
        assert len(found.transforms) == (stem != "conv") and type(embed) is Stem and embed.is_own == (stem == "conv")
        assert sum(isinstance(m, nn.Conv2d) for m in embed.modules()) == convs
        assert found.model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_both_classifiers_are_heads_and_start_anew_for_other_classes():
    model = build("lvvit_small", img_size=32, num_classes=3, **SMALL)
    heads = {f"{head}.{part}" for head in ("head", "aux_head") for part in ("weight", "bias")}
    assert {name for name, group in policy.group_names(model).items() if group == "head"} == heads
    assert heads <= policy.select(model, "head")
    model.reset_classifier(7)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7) and model.aux_head.out_features == 7
    model.reset_classifier(0)
    assert model.aux_head is None and model(torch.randn(1, 3, 32, 32)).shape == (1, 24)


def test_what_does_not_know_it_says_so_in_one_line():
    model = made()
    with pytest.raises(UsageError, match="cannot fuse LvVit: its `forward_head` is its own; use the back-end eager"):
        vtk.fuse(model)
    created = build_model("lvvit_small", num_classes=3, img_size=32, pretrained=False, kwargs=SMALL)
    card = Card(created.spec, created.input, ("a", "b", "c"))
    with pytest.raises(UsageError, match="timm alone has no `lvvit_small`"):
        timm_call(card)
    assert timm.is_model("lvvit_tiny")

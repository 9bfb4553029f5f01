"""VOLO with the stems and FFNs of Wang et al. 2022 (Tables 2 and 5) against timm's own stem and formulas."""

import copy
import dataclasses
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.vtk.models.test_stems import lively
from tests.vtk.papers import _cases  # noqa: F401 - registers small_volo in timm
from vtk.card import Transform
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model, check_transforms
from vtk.models.inputs import patch_side
from vtk.models.meta_model import shapes_only
from vtk.models.stems import STEMS, replace_stem
from vtk.models.stems.own import VoloStem
from vtk.models.transforms.mlp_layers import TokenBatchNormAct, change_mlp
from vtk.training.policies import policy

TABLE_2 = (
    "3conv+3bn+3relu+1proj", "3conv+3bn+1proj", "3conv+3relu+1proj", "3conv+1proj", "1proj", "1proj+1relu",
    "1proj+1bn+1relu",
)  # fmt: skip


def made(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return lively(timm.create_model("small_volo", img_size=32, num_classes=3, **kwargs))


def pixels(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_full_stem_with_timms_weights_is_timms_stem():
    model, x = made(), pixels()
    plain = copy.deepcopy(model)
    keys = replace_stem(model, stem="conv", strides=[2, 1, 1, 4])
    assert {k for k, source in keys.items() if source is None} == {k for k in keys if k.startswith("patch_embed.")}
    own = {k.removeprefix("patch_embed."): v for k, v in plain.state_dict().items() if k.startswith("patch_embed.")}
    model.patch_embed.proj.load_state_dict(own)  # the same names: conv.0 … conv.8, proj
    assert type(model.patch_embed) is VoloStem and not model.patch_embed.training
    torch.testing.assert_close(model(x), plain(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("stem", TABLE_2)
def test_the_parts_of_table_2_are_those_of_its_rows(stem):
    model = made()
    if stem == "3conv+3bn+3relu+1proj":
        replace_stem(model, stem=stem)
    else:
        replace_stem(model, stem=stem, act=None)
    parts = [m for m in model.patch_embed.proj.modules() if not isinstance(m, nn.Sequential)]
    kinds = "".join({nn.Conv2d: "c", nn.BatchNorm2d: "b", nn.ReLU: "r"}[type(m)] for m in parts)
    rows = ("cbrcbrcbrc", "cbcbcbc", "crcrcrc", "cccc", "c", "cr", "cbr")
    assert kinds == dict(zip(TABLE_2, rows, strict=True))[stem]
    convs = [m for m in parts if isinstance(m, nn.Conv2d)]
    expected = [((7, 7), 2), ((3, 3), 1), ((3, 3), 1), ((4, 4), 4)] if stem[0] == "3" else [((8, 8), 8)]
    assert [(m.kernel_size, m.stride[0]) for m in convs] == expected and convs[-1].out_channels == 16
    assert model(pixels()).shape == (2, 3) and model.patch_embed(pixels()).shape == (2, 16, 4, 4)


@pytest.mark.parametrize("stem", [s for s in STEMS if s not in TABLE_2])
def test_other_stems_have_its_patches_too(stem):
    model = made()
    replace_stem(model, stem=stem)
    assert model.patch_embed(pixels()).shape == (2, 16, 4, 4)


def test_d5s_convolutions_keep_their_width_and_published_counts_are_met():
    with shapes_only():
        for name, width in (("volo_d1_224", 64), ("volo_d5_224", 128)):
            model = timm.create_model(name)
            count = sum(p.numel() for p in model.parameters())
            replace_stem(model, stem="conv", act="gelu")  # Table 5: ReLU→GELU in conv-stem
            assert model.patch_embed.proj.conv[0].out_channels == width
            assert type(model.patch_embed.proj.conv[2]) is nn.GELU
            assert sum(p.numel() for p in model.parameters()) == count


def test_a_models_own_stem_is_no_change_and_the_other_models_is():
    for name, own, other in (("small_volo", "conv", "1proj"), ("vit_tiny_patch16_224", "1proj", "conv")):
        kwargs = {} if name == "small_volo" else {"depth": 1, "embed_dim": 16, "num_heads": 2}
        for stem, transforms in ((own, ()), (other, (Transform("replace_stem", {"stem": other}),))):
            found = build_model(
                name, num_classes=3, img_size=32, pretrained=False, kwargs=kwargs,
                transforms=[Transform("replace_stem", {"stem": stem})],
            )  # fmt: skip
            assert found.transforms == transforms
            convs = sum(isinstance(m, nn.Conv2d) for m in found.model.patch_embed.modules())
            assert convs == {"conv": 4, "1proj": 1}[stem]
    note = "stem 1proj: 3,088 weights are randomly initialised"
    file_like = build_model("small_volo", num_classes=3, img_size=32, pretrained=False)
    base = copy.copy(file_like.base)
    object.__setattr__(base, "ref", copy.copy(base.ref))
    object.__setattr__(base.ref, "source", "a.safetensors")
    again = build_model(
        "small_volo", num_classes=3, img_size=32, base=base, transforms=[Transform("replace_stem", {"stem": "1proj"})]
    )
    assert note in again.notes


def test_weights_of_a_new_stem_are_trained_and_grey_images_adapt_it():
    change = [Transform("replace_stem", {"stem": "3conv+3relu+1proj"}), Transform("adapt_input", {"in_chans": 1})]
    found = build_model("small_volo", num_classes=3, img_size=32, pretrained=False, in_chans=1, transforms=change)
    groups = policy.group_names(found.model)
    stem = {name for name in groups if name.startswith("patch_embed.")}
    assert {groups[name] for name in stem} == {"stem"} and groups["pos_embed"] == "position"
    assert {name for name, group in groups.items() if group == "head"} == {
        f"{head}.{part}" for head in ("head", "aux_head") for part in ("weight", "bias")
    }
    assert stem <= policy.select(found.model, "attn", policy.created_names(found.key_map, found.model))
    assert found.model.patch_embed.proj.conv[0].in_channels == 1
    assert patch_side("small_volo") == patch_side("volo_d1_224") == 8


@pytest.mark.parametrize("design", ["relu", "bn", "no-norm"])
def test_table_5_changes_the_encoders_ffns(design):
    model, x = made(), pixels()
    plain = copy.deepcopy(model)
    keys = change_mlp(model, design=design)
    blocks = [stage[0] for stage in (model.network[0], model.network[2], model.network[3])]
    others = [stage[0] for stage in (plain.network[0], plain.network[2], plain.network[3])]
    for block, other in zip(blocks, others, strict=True):
        maps = torch.randn(2, 4, 4, block.mlp.fc1.in_features, dtype=torch.float64)
        hidden = maps if design == "no-norm" else other.norm2(maps)
        hidden = hidden @ other.mlp.fc1.weight.T + other.mlp.fc1.bias
        if design == "bn":  # of a new BatchNorm in eval mode: its statistics are 0 and 1
            hidden = hidden / (1 + 1e-5) ** 0.5
        hidden = hidden.clamp(min=0) if design == "relu" else nn.functional.gelu(hidden)
        expected = hidden @ other.mlp.fc2.weight.T + other.mlp.fc2.bias
        torch.testing.assert_close(block.mlp(block.norm2(maps)), expected, atol=1e-12, rtol=0)
    assert all(type(block.mlp.act) is nn.GELU for block in model.post_network)
    assert model(x).shape == (2, 3) and (None in keys.values()) == (design == "bn")


def test_batch_norm_of_maps_is_over_images_and_positions():
    layer = TokenBatchNormAct(5, nn.Identity()).double().train()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    flat = x.reshape(-1, 5)
    expected = (x - flat.mean(0)) / (flat.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"stem": "conv", "strides": [2, 2, 2, 2]}, "multiply to 16; this model's patch is 8"),
        ({"stem": "3conv+1proj", "act": "relu"}, "has no activation; leave it out"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_image(arguments, match):
    with pytest.raises(UsageError, match=match) as caught:
        check_transforms("volo_d1_224", [Transform("replace_stem", arguments)])
    assert "\n" not in str(caught.value)
    model = made()
    replace_stem(model, stem="1proj")
    with pytest.raises(UsageError, match="VOLO already has the stem 1proj; a stem is replaced once"):
        replace_stem(model, stem="conv")


def test_stems_of_other_models_are_refused_by_name():
    with shapes_only():
        model = timm.create_model("xcit_nano_12_p16_224")
    where = "a ConvPatchEmbed as its `patch_embed`, and --stem replaces the projection of timm.layers.PatchEmbed"
    with pytest.raises(UsageError, match=where):
        replace_stem(model, stem="conv")


@pytest.mark.parametrize(("name", "own", "files"), [("small_volo", "conv", "1proj"), ("test_vit", "1proj", "hmlp")])
def test_a_models_own_stem_is_no_wish_that_a_file_with_another_one_passes_over(name, own, files):
    options = {"num_classes": 3, "img_size": 32, "pretrained": False}
    plain = build_model(name, **options)
    base = dataclasses.replace(plain.base, transforms=(Transform("replace_stem", {"stem": files}),))
    with pytest.raises(DataError, match=rf"was made with `replace_stem` .*'{files}'.*, and .*'{own}'.* is requested"):
        build_model(name, **options, base=base, transforms=[Transform("replace_stem", {"stem": own})])
    assert build_model(name, **options, base=base).transforms == base.transforms

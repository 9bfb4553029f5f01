"""The local-transformer stem (Touvron et al. 2022, Table 7) against timm's TNT, the paper's cost, and refusals."""

import pytest
import torch
from timm.models.tnt import TNT
from torch.utils.flop_counter import FlopCounterMode

from tests.vtk.analysis._models import tiny_vit
from vtk.analysis.probes.attention_maps import watch_attention
from vtk.analysis.probes.depth_points import block_modules
from vtk.errors import UsageError
from vtk.models.meta_model import shapes_only
from vtk.models.stems import ACTIVATIONS, PATCHWISE, make_stem, replace_stem
from vtk.models.stems.shape import StemShape
from vtk.training.engine.param_groups import parameter_groups
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.policies import policy

LOCAL = "local-transformer"


def tnts_tokens(tnt, x):
    """What TNT's inner layers and first projection make of images, (B, N, C), by timm's modules alone."""
    inner = tnt.pixel_embed(x, tnt.pixel_pos)
    for block in tnt.blocks:
        inner = inner + block.attn_in(block.norm_in(inner))
        inner = inner + block.mlp_in(block.norm_mlp_in(inner))
    return tnt.norm2_proj(tnt.proj(tnt.norm1_proj(inner.reshape(len(x), tnt.num_patches, -1))))


def weights_of(tnt):
    """TNT's weights under the names of the stem."""
    own = {"conv": tnt.pixel_embed.proj, "local.norm1": tnt.norm1_proj, "local.proj": tnt.proj,
           "local.norm2": tnt.norm2_proj}  # fmt: skip
    for i, block in enumerate(tnt.blocks):
        own |= {
            f"local.layers.{i}.norm1": block.norm_in, f"local.layers.{i}.proj": block.attn_in.proj,
            f"local.layers.{i}.norm2": block.norm_mlp_in, f"local.layers.{i}.fc1": block.mlp_in.fc1,
            f"local.layers.{i}.fc2": block.mlp_in.fc2,
        }  # fmt: skip
    found = {f"{name}.{key}": value for name, part in own.items() for key, value in part.state_dict().items()}
    for i, block in enumerate(tnt.blocks):
        found[f"local.layers.{i}.qkv.weight"] = torch.cat([block.attn_in.qk.weight, block.attn_in.v.weight])
    found["local.position"] = tnt.pixel_pos.flatten(2).transpose(1, 2)
    return found


@pytest.mark.parametrize(("patch", "side"), [(16, (32, 48)), (8, (16, 24))])
def test_it_is_timms_tnt_among_the_places_of_a_patch(patch, side):
    torch.manual_seed(0)
    # its own form of 2021, whose convolution is over the image
    tnt = TNT(img_size=side, patch_size=patch, embed_dim=24, inner_dim=40, depth=3, num_heads_inner=4,
              num_heads_outer=2, legacy=True).double().eval()  # fmt: skip
    with torch.no_grad():
        for p in tnt.parameters():
            p.add_(0.2 * torch.randn_like(p))
        stem = make_stem(LOCAL, StemShape(3, 24, (patch, patch)), depth=3).double()
        stem.load_state_dict(weights_of(tnt))
        x = torch.randn(2, 3, *side, dtype=torch.float64)
        found = stem(x)
        assert found.shape == (2, 24, side[0] // patch, side[1] // patch)
        torch.testing.assert_close(found.flatten(2).transpose(1, 2), tnts_tokens(tnt, x), atol=1e-12, rtol=0)


def test_its_default_depth_costs_what_table_7_says():
    shape = StemShape(3, 768, (16, 16))
    flops = {}
    with shapes_only():
        for stem in ("1proj", LOCAL):
            layers = make_stem(stem, shape)
            with FlopCounterMode(display=False) as counter:
                layers(torch.empty(1, 3, 224, 224))
            flops[stem] = counter.get_total_flops() / 2e9
    # multiply-adds of ViT-B of twelve blocks: 17.58 with the linear stem, 19.12 with this one
    assert flops[LOCAL] - flops["1proj"] == pytest.approx(19.12 - 17.58, abs=0.01)


def test_its_layers_belong_to_the_stem_and_are_no_blocks_of_the_model():
    model = tiny_vit(img_size=16, patch_size=8, depth=2).float()
    replace_stem(model, stem=LOCAL, depth=2)
    groups = policy.group_names(model)
    assert {groups[k] for k in groups if k.startswith("patch_embed.")} == {"stem"} and LOCAL not in PATCHWISE
    decays = {
        id(p) for group in parameter_groups(model, FinetuneConfig()) if group["weight_decay"] for p in group["params"]
    }
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1}
    still = {name for name, p in model.named_parameters() if id(p) not in decays} & matrices
    assert still == {"cls_token", "pos_embed", "patch_embed.proj.local.position"}  # as TNT's pixel_pos
    assert list(block_modules(model)) == ["blocks.0", "blocks.1"]
    seen = []
    with watch_attention(model, lambda name, attention: seen.append(name)), torch.no_grad():
        model(torch.randn(1, 3, 16, 16))
    assert seen == ["blocks.0.attn", "blocks.1.attn"]


def test_flags_are_its_arguments_and_wrong_ones_are_refused():
    (change,) = FinetuneConfig(stem=LOCAL, stem_depth=6, stem_act="relu").transforms()
    assert change.args == {"stem": LOCAL, "act": "relu", "depth": 6}
    cases = [
        ((4, 4), {}, "needs patches of 8, 12, 16, … pixels; this model's are 4 × 4"),
        ((14, 16), {}, "this model's are 14 × 16"),
        ((8, 8), {"depth": 0}, "`--stem-depth` is 0; allowed is at least 1"),
        ((8, 8), {"strides": [2, 1, 1, 4]}, "has fixed strides, leave it out"),
    ]
    for patch, arguments, message in cases:
        with pytest.raises(UsageError, match=message):
            make_stem(LOCAL, StemShape(3, 16, patch), **arguments)
    with pytest.raises(UsageError, match="`--stem-depth` needs --stem local-transformer; --stem hmlp has fixed layers"):
        make_stem("hmlp", StemShape(3, 16, (8, 8)), depth=2)
    with pytest.raises(UsageError, match=r"`--stem-depth` needs another stem .*; add --stem local-transformer"):
        FinetuneConfig(stem_depth=3)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_is_over_the_channels_of_its_tokens(act):
    """``scaled-relu`` has numbers for each channel, of maps on the second axis and here on the last one."""
    torch.manual_seed(0)
    stem = make_stem(LOCAL, StemShape(3, 16, (8, 8)), act=act, depth=1)
    found = stem(torch.randn(2, 3, 16, 24))
    assert found.shape == (2, 16, 2, 3)
    found.sum().backward()
    assert all(p.grad is not None for p in stem.parameters())
    if act != "scaled-relu":
        return
    layer = stem.local.layers[0].act
    with torch.no_grad():
        layer.alpha.normal_(), layer.beta.normal_()
    x = torch.randn(6, 4, 160)
    for channel in (0, 7, 159):
        expected = layer.beta[channel] * (x[..., channel] + layer.alpha[channel]).clamp(min=0)
        assert torch.equal(layer(x)[..., channel], expected)

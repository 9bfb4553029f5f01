"""Residual units against forward passes written by hand, and their removal against models edited by hand."""

import copy
from itertools import pairwise

import pytest
import torch
from timm.models.convnext import ConvNeXt
from timm.models.mlp_mixer import MlpMixer
from timm.models.pit import PoolingVisionTransformer
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis.probes.convolutions import single_convolutions
from vtk.analysis.probes.feature_maps import Maps, grid_of
from vtk.analysis.probes.residual_units import residual_units, watch_units, without_unit
from vtk.errors import UsageError
from vtk.models.alternet import AlterNet
from vtk.models.parallel_models import build
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.models.transforms.extra_block import add_block

SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4)}
VIT = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "init_values": 0.5}
RESNET = {"layers": (2, 1, 1, 1), "channels": (8, 16, 16, 24), "stem_width": 8}
ALTERNET = {"layers": (2, 2, 2, 2), "channels": (8, 16, 24, 32), "basic": True, "msa_blocks": (0, 1, 1, 1),
            "window_size": 4, "heads": (1, 1, 2, 2), "head_dim": 8, "stem": "cifar"}  # fmt: skip
MODELS = {
    "parallel": (lambda: build("vit_small_patch16_18x2_224", num_classes=3, **VIT), 32),
    "dinov2": (lambda: build("vit_small_patch14_reg4_dinov2", num_classes=3, **{**VIT, "img_size": 28}), 28),
    "swin": (lambda: build("swin_tiny_patch4_window7_224", num_classes=3, **SWIN), 32),
    "swinv2": (lambda: build("swinv2_tiny_window8_256", num_classes=3, **SWIN), 32),
    "pit": (lambda: PoolingVisionTransformer(64, base_dims=(8, 8, 8), depth=(1, 1, 1), num_classes=3), 64),
    "mixer": (lambda: MlpMixer(3, 32, patch_size=8, num_blocks=2, embed_dim=32), 32),
    "resnet": (lambda: ResNet(Bottleneck, num_classes=3, **RESNET), 32),
    "basic": (lambda: ResNet(BasicBlock, num_classes=3, **RESNET), 32),
    "se": (lambda: ResNet(Bottleneck, num_classes=3, block_args={"attn_layer": "se"}, **RESNET), 32),
    "convnext": (lambda: ConvNeXt(dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), num_classes=3), 64),
    "alternet": (lambda: AlterNet(num_classes=3, **ALTERNET), 32),
}


def made(name):
    """A small model in fp64 whose weights are large enough that every unit counts, and images for it."""
    build_it, side = MODELS[name]
    torch.manual_seed(0)
    model = build_it().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, images(2, side=side)[0][0]


def features(model, x):
    units, seen = residual_units(model), {}
    with torch.no_grad(), watch_units(units, lambda number, value: seen.__setitem__(number, value.clone())):
        model(x)
    assert list(seen) == list(range(len(units))), "in the order in which they run"
    return units, list(seen.values())


def halves(block, x):
    """timm's Block by hand: attention and MLP with LayerScale and stochastic depth, each added to what came."""
    if isinstance(block, ResPostBlock):
        middle = x + block.drop_path1(block.norm1(block.attn(x)))
        return middle, middle + block.drop_path2(block.norm2(block.mlp(middle)))
    middle = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
    return middle, middle + block.drop_path2(block.ls2(block.mlp(block.norm2(middle))))


@pytest.mark.parametrize("options", [{"init_values": 0.3, "drop_path_rate": 0.2}, {"block_fn": ResPostBlock}],
                         ids=["layer-scale", "norm-behind"])  # fmt: skip
def test_the_features_of_a_vit_are_those_of_its_blocks_written_out(options):
    model = tiny_vit(depth=3, img_size=16, reg_tokens=2, **options)
    x = images(2, side=16)[0][0]
    units, seen = features(model, x)
    assert [unit.name for unit in units] == ["stem", *(f"blocks.{i}.{n}" for i in range(3) for n in ("attn", "mlp"))]
    assert [unit.kind for unit in units] == ["other", *("msa", "mlp") * 3]
    with torch.no_grad():
        expected = [model._pos_embed(model.patch_embed(x))]
        for block in model.blocks:
            expected += halves(block, expected[-1])
    for one, other in zip(seen, expected, strict=True):
        assert torch.equal(one, other)


def test_layer_scale_is_in_the_features_other_than_in_the_papers_code():
    model = tiny_vit(depth=1, init_values=0.3)
    x = images(2)[0][0]
    _, (stem, middle, _) = features(model, x)
    block = model.blocks[0]
    with torch.no_grad():
        assert not torch.allclose(middle, stem + block.attn(block.norm1(stem)), atol=1e-3)


def test_parallel_branches_are_summed_and_broadcast():
    model, x = made("parallel")
    add_context_broadcast(model, on="both")
    units, seen = features(model, x)
    assert [unit.name for unit in units][1:] == ["blocks.0.attns", "blocks.0.ffns", "blocks.1.attns", "blocks.1.ffns"]
    with torch.no_grad():
        value = seen[0]
        for number, block in enumerate(model.blocks):
            for at, (branches, context) in enumerate(((block.attns, block.cb_msa), (block.ffns, block.cb))):
                added = sum(branch(value) for branch in branches)
                value = value + context(added)
                assert torch.allclose(seen[1 + 2 * number + at], value, atol=1e-12)


def test_swin_and_mixer_in_the_middle_of_a_block():
    model, x = made("swin")
    units, seen = features(model, x)
    names = [unit.name for unit in units]
    assert [u.kind for u in units] == ["other", "msa", "mlp", "msa", "mlp", "subsampling", "msa", "mlp"]
    block, before = model.layers[0].blocks[1], seen[names.index("layers.0.blocks.0.mlp")]
    with torch.no_grad():
        middle = before + block._attn(block.norm1(before))
    found = Maps(model).lay(seen[names.index("layers.0.blocks.1.attn")], (32, 32))
    assert torch.equal(found.movedim(1, -1), middle), "tokens in the middle, a map of the same places before"
    mixer, x = made("mixer")
    _, (stem, middle, _, *_) = features(mixer, x)
    block = mixer.blocks[0]
    with torch.no_grad():
        assert torch.equal(middle, stem + block.mlp_tokens(block.norm1(stem).transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("pit", ["other", "msa", "mlp", "subsampling", "msa", "mlp", "subsampling", "msa", "mlp"]),
        ("mixer", ["other", "other", "mlp", "other", "mlp"]),
        ("resnet", ["other", "conv", "conv", "subsampling", "subsampling", "subsampling"]),
        ("convnext", ["other", "conv", *("subsampling", "conv") * 2, "conv", "subsampling", "conv"]),
        ("alternet", ["other", "conv", "conv", *("subsampling", "msa") * 3]),
    ],
)
def test_kinds(name, kinds):
    model, x = made(name)
    units, seen = features(model, x)
    assert [unit.kind for unit in units] == kinds
    sizes = [Maps(model).lay(value, x.shape[2:]).shape[2] for value in seen]
    shrunk = [behind < before for before, behind in pairwise(sizes)]
    assert shrunk == [kind == "subsampling" for kind in kinds[1:]], "a map shrinks there and nowhere else"


LASTS = ("attn.proj", "bn3", "bn2", "conv2", "mlp.fc2")  # of blocks with one branch, the first that is there


def zeroed(model, unit):
    """A copy without a unit: the last weights of its branch are 0, so that the branch is."""
    edited = copy.deepcopy(model)
    name, _, leaf = unit.name.rpartition(".")
    block = edited.get_submodule(name)
    if leaf in ("attns", "ffns"):
        lasts = [b.attn.proj if leaf == "attns" else b.mlp.fc2 for b in getattr(block, leaf)]
    elif leaf == "attn":
        lasts = [block.norm1 if "V2" in type(block).__name__ else block.attn.proj]
    elif leaf.startswith("mlp"):
        lasts = [block.norm2 if "V2" in type(block).__name__ else getattr(block, leaf).fc2]
    else:
        own = dict(edited.get_submodule(unit.name).named_modules())
        lasts = [next(own[last] for last in LASTS if last in own)]
    for last in lasts:
        for parameter in last.parameters(recurse=False):
            nn.init.zeros_(parameter)
    return edited


@pytest.mark.parametrize("name", MODELS)
def test_a_removed_unit_is_one_whose_last_weights_are_zero(name):
    model, x = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        whole = model(x)
        for unit in residual_units(model):
            if not unit.outlets:
                continue
            with without_unit(unit):
                found = model(x)
            assert torch.allclose(found, zeroed(model, unit)(x), atol=1e-12), unit.name
            assert not torch.allclose(found, whole, atol=1e-9), unit.name
        assert torch.equal(model(x), whole)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["resnet", "basic", "convnext", "alternet", "dinov2"])
def test_a_removed_convolution_is_one_whose_kernel_is_one_in_its_centre(name):
    model, x = made(name)
    removed, kept = [], []
    with torch.no_grad():
        whole = model(x)
        for unit in single_convolutions(model):
            if not unit.passes:
                kept.append(unit.kind)
                continue
            conv = model.get_submodule(unit.name)
            if not unit.outlets:
                assert conv.in_channels != conv.out_channels or conv.kernel_size[0] % 2 == 0, unit.name
                continue
            edited = copy.deepcopy(model)
            nn.init.dirac_(edited.get_submodule(unit.name).weight, conv.groups)
            if conv.bias is not None:
                nn.init.zeros_(edited.get_submodule(unit.name).bias)
            with without_unit(unit):
                found = model(x)
            assert torch.allclose(found, edited(x), atol=1e-12), unit.name
            assert not torch.allclose(found, whole, atol=1e-9), unit.name
            removed.append(conv.stride)
    assert len(removed) == {"resnet": 5, "basic": 7, "convnext": 5, "alternet": 6, "dinov2": 0}[name]
    assert kept.count("msa") == {"alternet": 3, "dinov2": 2}.get(name, 0)
    assert (2, 2) in removed or name != "resnet"


@pytest.mark.parametrize("kind", ["msa", "mlp"])
def test_an_extra_block_is_a_unit_of_its_kind(kind):
    model = tiny_vit(depth=1)
    add_block(model.double(), kind=kind)
    x = images(2)[0][0]
    units, seen = features(model, x)
    assert (units[-1].name, units[-1].kind) == ("blocks.1", kind)
    with without_unit(units[-1]):
        assert torch.equal(features(model, x)[1][-1], seen[-2])


def test_context_broadcasting_of_a_removed_mlp_adds_nothing():
    model = tiny_vit(depth=1)
    add_context_broadcast(model, on="both")
    x = images(2)[0][0]
    _, (stem, middle, behind) = features(model, x)
    msa, mlp = residual_units(model)[1:]
    with without_unit(msa):
        assert torch.equal(features(model, x)[1][1], stem)
    with without_unit(mlp):
        assert torch.equal(features(model, x)[1][2], middle)
    assert not torch.allclose(behind, middle)


def test_what_cannot_be_removed_is_refused():
    model = tiny_vit()
    stem, msa, _ = residual_units(model)
    with pytest.raises(UsageError, match="`stem` has no branch"), without_unit(stem):
        pass
    with pytest.raises(UsageError, match=r"`blocks.0.attn` did not run"), without_unit(msa):
        pass
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(UsageError, match="Sequential has no recognised blocks"):
        residual_units(nn.Sequential(nn.Linear(2, 2)))


def test_grids_have_the_images_proportions():
    assert grid_of(196, (224, 224)) == (14, 14)
    assert grid_of(140, (224, 160)) == (14, 10) and grid_of(140, (160, 224)) == (10, 14)
    assert grid_of(197, (224, 224)) is None and grid_of(0, (8, 8)) is None


def test_prefix_tokens_are_left_out_of_maps_and_places_kept():
    model = timm_model("vit_tiny_patch16_224", img_size=(64, 32), embed_dim=48, depth=1, reg_tokens=3)
    tokens = torch.arange(12.0)[None, :, None].expand(2, 12, 5)
    found = Maps(model).lay(tokens, (64, 32))
    assert found.shape == (2, 5, 4, 2)
    assert found[0, 0].tolist() == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]
    assert Maps(model).lay(tokens[:, :1], (64, 32)) is None

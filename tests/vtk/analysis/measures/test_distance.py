"""Attention distance against closed forms, and against loops over pairs of patches."""

import json
import math
from itertools import product

import pytest
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from tests.vtk.analysis._attention import GivenViT, context, fused, random_attention, unfused_attention
from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.distance import DIAGNOSTIC
from vtk.analysis.diagnostics.entropy import DIAGNOSTIC as ENTROPY
from vtk.analysis.measures.distance import attention_distance
from vtk.analysis.probes.attention_maps import looks_like_attention
from vtk.card import Transform
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model


def distances(attention, prefix, grid, whole):
    """By hand, of one image or window and head (N, N): per query its distance, relative distance and prefix share."""
    places = [(row / whole[0], column / whole[1]) for row, column in product(range(grid[0]), range(grid[1]))]
    found = []
    for i, one in enumerate(places):
        weights = attention[prefix + i].tolist()[prefix:]
        euclid = sum(a * math.dist(one, two) for a, two in zip(weights, places, strict=True)) / sum(weights)
        city = sum(a * (abs(one[0] - two[0]) + abs(one[1] - two[1])) for a, two in zip(weights, places, strict=True))
        found.append((euclid, city, 1 - sum(weights)))
    return [sum(column) / len(places) for column in zip(*found, strict=True)]


def check(layer, attention, prefix, grid, whole):
    by_head = [[distances(one, prefix, grid, whole) for one in attention[:, h]] for h in range(attention.shape[1])]
    mean = lambda rows, k: sum(row[k] for row in rows) / len(rows)  # noqa: E731
    assert layer.heads == pytest.approx([mean(rows, 0) for rows in by_head], abs=1e-5)
    assert layer.mean == pytest.approx(sum(layer.heads) / len(layer.heads), abs=1e-6)
    assert layer.relative == pytest.approx(sum(mean(rows, 1) for rows in by_head) / len(by_head), abs=1e-5)
    assert layer.prefix == pytest.approx(sum(mean(rows, 2) for rows in by_head) / len(by_head), abs=1e-5)
    assert (layer.grid, layer.map) == (grid, whole)


@pytest.mark.parametrize("sides", [(16, 16), (8, 24)], ids=["square", "wide"])
def test_uniform_attention_has_the_distance_of_the_closed_form(sides):
    model = tiny_vit(depth=2, img_size=sides)
    with torch.no_grad():
        for block in model.blocks:  # all keys alike
            block.attn.qkv.weight[8:16] = 0
            block.attn.qkv.bias[8:16] = 0
    h, w = sides[0] // 4, sides[1] // 4
    x = torch.randn(2, 3, *sides, dtype=torch.float64)
    # the mean of |i - j| over i and j below h is (h² - 1) / 3h
    city = (h * h - 1) / (3 * h * h) + (w * w - 1) / (3 * w * w)
    found = attention_distance(model, [(x, torch.zeros(2))])
    for layer in found.layers:
        assert layer.relative == pytest.approx(city * h * w / (h * w + 1), abs=1e-6)
        assert layer.prefix == pytest.approx(1 / (h * w + 1), abs=1e-6)
        for value in (layer.mean, *layer.heads):
            assert value == pytest.approx(layer.uniform, abs=1e-6)
    assert found.images == 2 and not found.unplaced and not found.unseen


def test_two_by_two_uniform_patches_are_known_by_heart():
    found = attention_distance(GivenViT((2, 2), [torch.full((1, 5, 5), 0.2)]), images_of(2))
    assert found.layers[0].uniform == pytest.approx((0 + 0.5 + 0.5 + math.sqrt(0.5)) / 4)
    assert found.layers[0].mean == pytest.approx(found.layers[0].uniform)


def images_of(side):
    return [(torch.rand(3, 3, side, side), torch.zeros(3))]


def test_attention_to_oneself_has_no_distance_and_to_the_class_token_none_that_is_defined():
    identity = torch.eye(5)[None]
    layer = attention_distance(GivenViT((2, 2), [identity]), images_of(2)).layers[0]
    assert (layer.mean, layer.relative, layer.prefix) == (0.0, 0.0, 0.0)
    neighbour = torch.eye(5)[[0, 2, 1, 4, 3]][None]  # left and right change places
    layer = attention_distance(GivenViT((2, 2), [neighbour]), images_of(2)).layers[0]
    assert (layer.mean, layer.relative) == (0.5, 0.5)
    half = torch.cat([identity, torch.zeros(1, 5, 5).index_fill(2, torch.tensor([0]), 1.0)])  # second head: class token
    layer = attention_distance(GivenViT((2, 2), [half]), images_of(2)).layers[0]
    assert layer.heads[0] == 0.0 and math.isnan(layer.heads[1])
    assert layer.mean == 0.0 and layer.prefix == 0.5


SMALL = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 3}
GRID = ((2, 2), (2, 2))
MODELS = {
    "vit": ("vit_tiny_patch16_224", SMALL, 1, [GRID] * 2),
    "no class token": ("vit_tiny_patch16_224", {**SMALL, "class_token": False, "global_pool": "avg"}, 0, [GRID] * 2),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL, 2, [GRID] * 2),
    "registers": ("vit_small_patch14_reg4_dinov2", {**SMALL, "img_size": 42}, 5, [((3, 3), (3, 3))] * 2),
    "parallel": ("vit_small_patch16_18x2_224", {**SMALL, "depth": 1}, 1, [GRID] * 2),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)},
        0,
        [((4, 4), (8, 8))] * 2 + [((4, 4), (4, 4))] * 2,
    ),
    "pit": (
        "pit_ti_224",
        {"img_size": 48, "base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (1, 2, 2)},
        1,
        [((5, 5), (5, 5)), ((3, 3), (3, 3)), ((2, 2), (2, 2))],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_the_distances_of_loops_over_its_patches(name):
    kind, kwargs, prefix, grids = MODELS[name]
    model = timm_model(kind, **kwargs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # attention that is not all alike
    x = torch.randn(3, 3, kwargs["img_size"], kwargs["img_size"])
    expected = unfused_attention(model, x)
    batches = [(x[:2], torch.zeros(2)), (x[2:], torch.zeros(1))]
    found = attention_distance(model, batches)
    with fused(model, False):
        unfused = attention_distance(model, batches)
    assert [layer.name for layer in found.layers] == list(expected)
    for layer, other, (grid, whole) in zip(found.layers, unfused.layers, grids, strict=True):
        check(layer, expected[layer.name], prefix, grid, whole)
        assert layer.heads == pytest.approx(other.heads, abs=1e-6)


def test_windows_of_an_alternet_are_measured_in_sides_of_the_image():
    model = build_model(
        "alternet_18_cifar", num_classes=3, pretrained=False,
        kwargs={"channels": (8, 8, 8, 8), "heads": (1, 2, 2, 2), "head_dim": 4},
    ).model  # fmt: skip
    with torch.no_grad():
        for module in model.modules():
            if looks_like_attention(module):
                module.q.weight.zero_()
                module.relative_position_bias_table.zero_()  # uniform attention
    found = {}
    for on in (True, False):
        with fused(model, on):
            found[on] = attention_distance(model, [(x.float(), y) for x, y in images(2, side=32)])
    assert found[True] == found[False]
    assert [(layer.grid, layer.map) for layer in found[True].layers] == [((4, 4), (side, side)) for side in (16, 8, 4)]
    for layer in found[True].layers:  # (h² - 1) / 3h of each axis, h = 4 positions
        assert layer.relative == pytest.approx(2 * 15 / 12 / layer.map[0], abs=1e-6)


def test_context_broadcasting_and_local_attention_are_seen():
    model = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=48, pretrained=False, kwargs={"depth": 2, "embed_dim": 24},
        transforms=[
            Transform("local_attention", {"kernel": 1}), Transform("add_context_broadcast", {"on": "both"}),
        ],
    ).model  # fmt: skip
    found = attention_distance(model, [(torch.randn(2, 3, 48, 48), torch.zeros(2))])
    assert [layer.mean for layer in found.layers] == [0.0, 0.0]  # a patch sees itself and the class token
    assert all(0 < layer.prefix < 1 for layer in found.layers)


@pytest.mark.parametrize("kind", ["ResNet", "MlpMixer"])
def test_models_without_attention_are_refused(kind):
    mixer = MlpMixer(img_size=32, patch_size=16, num_blocks=1, embed_dim=8)
    model = {"ResNet": timm_model("test_resnet"), "MlpMixer": mixer}[kind]
    with pytest.raises(UsageError, match=f"{kind}: it has no attention; distance is of attention over patches"):
        attention_distance(model, [(torch.randn(1, 3, 32, 32), torch.zeros(1))])


def test_tokens_of_unknown_places_are_refused_and_no_images_are_an_error():
    model = GivenViT((2, 2), [random_attention(1, 7)])
    model.tokens = 7
    with pytest.raises(UsageError, match=r"the places of the tokens of blocks\.0 are not known"):
        attention_distance(model, images_of(2))
    with pytest.raises(DataError, match="no images"):
        attention_distance(tiny_vit(), [])


def test_the_model_is_left_as_it_was():
    model = tiny_vit(depth=2).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert attention_distance(model, images(2)) == attention_distance(model, images(4, sizes=(2, 2)), max_images=2)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_diagnostic_draws_one_and_two_models_and_says_where_local_heads_are():
    local, wide = torch.eye(17)[None], torch.full((1, 17, 17), 1 / 17)
    model = GivenViT((4, 4), [torch.cat([local, wide]), wide, wide])
    batches = [(torch.rand(2, 3, 4, 4), torch.zeros(2))]
    result = json.loads(json.dumps(DIAGNOSTIC.measure(context(model, batches, side=4))))
    told = " ".join(DIAGNOSTIC.read(result))
    assert "1 of 4 heads are local" in told and "in layers 1." in told
    assert "The upper third of the layers has a larger distance than the lower one." in told
    numbers = DIAGNOSTIC.numbers(result)
    assert numbers["local heads, share"] == 0.25
    assert numbers["mean distance, of uniform"] == pytest.approx(2.5 / 3)
    for runs in ([Run("one", result)], [Run("one", result), Run("t$o", result)]):
        assert [picture.name for picture in DIAGNOSTIC.draw(runs)] == ["distance", "distance-relative"]


def test_the_diagnostic_suggests_what_the_model_can_have():
    x = [(torch.randn(2, 3, 48, 48), torch.zeros(2))]
    vit = timm_model("vit_tiny_patch16_224", img_size=48, depth=3, embed_dim=24)  # at random: no local heads
    assert any(
        "`--local-attention 5`" in told for told in DIAGNOSTIC.read(DIAGNOSTIC.measure(context(vit, x, side=48)))
    )
    pit = timm_model("pit_ti_224", img_size=48, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2))
    told = " ".join(DIAGNOSTIC.read(DIAGNOSTIC.measure(context(pit, x, side=48))))
    assert "None of the 5 heads is local" in told and "--" not in told
    for model, can in ((vit, True), (pit, True), (GivenViT((2, 2), [torch.full((1, 5, 5), 0.2)] * 2), False)):
        result = ENTROPY.measure(context(model, x, side=48))
        assert ("--cb-layers upper" in " ".join(ENTROPY.read(result))) == can


def test_attention_that_hides_is_refused_by_name():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.qkv = 1, nn.Linear(12, 3)

        def forward(self, x):
            return self.qkv(x.flatten(1))

    with pytest.raises(UsageError, match=r"its attention \(0\) calls no softmax that can be seen"):
        attention_distance(nn.Sequential(Hidden()), images_of(2))

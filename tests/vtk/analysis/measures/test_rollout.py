"""Attention rollout against explicit matrix products."""

import json
import math

import pytest
import torch

from tests.vtk.analysis._attention import GivenViT, context, fused, random_attention, unfused_attention
from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.rollout import DIAGNOSTIC
from vtk.analysis.measures.rollout import attention_rollout
from vtk.analysis.result_files import finite
from vtk.card import Transform
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model

SMALL = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 3}


def batch(count=2, side=2):
    return [(torch.rand(count, 3, side, side), torch.zeros(count))]


def test_two_layers_are_an_explicit_product():
    one, two = random_attention(3, 5, seed=1), random_attention(3, 5, seed=2)
    a, b = one.mean(0).double(), two.mean(0).double()
    eye = torch.eye(5, dtype=torch.float64)
    product = (0.5 * b + 0.5 * eye) @ (0.5 * a + 0.5 * eye)
    found = attention_rollout(GivenViT((2, 2), [one, two]), batch(3))
    assert (found.layer, found.query, len(found.maps)) == ("all layers", "class token", 3)
    for image in found.maps:
        assert torch.allclose(image.mean.double(), product[0, 1:].reshape(2, 2), atol=1e-6)
        assert image.patches == pytest.approx(float(product[0, 1:].sum()), abs=1e-6)
        assert len(image.heads) == 0
    # and the other way round it would be another one
    assert not torch.allclose(product[0], ((0.5 * a + 0.5 * eye) @ (0.5 * b + 0.5 * eye))[0], atol=1e-3)


def test_without_class_token_it_is_the_mean_over_patches():
    one, two = random_attention(1, 6, seed=3), random_attention(1, 6, seed=4)
    product = (one[0] + torch.eye(6)) / 2
    product = (two[0] + torch.eye(6)) / 2 @ product
    found = attention_rollout(GivenViT((2, 3), [one, two], class_token=False), batch())
    assert found.query == "mean of all queries"
    assert torch.allclose(found.maps[0].mean, product.mean(0).reshape(2, 3), atol=1e-6)


MODELS = {
    "vit": ("vit_tiny_patch16_224", SMALL, 1, 2),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL, 2, 2),
    "registers": ("vit_small_patch14_reg4_dinov2", {**SMALL, "img_size": 42}, 5, 3),
    "parallel": ("vit_small_patch16_18x2_224", SMALL, 1, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_families_have_the_product_of_their_unfused_attention(name):
    kind, kwargs, prefix, side = MODELS[name]
    model = timm_model(kind, **kwargs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = torch.randn(3, 3, kwargs["img_size"], kwargs["img_size"])
    blocks = {}
    for layer, attention in unfused_attention(model, x).items():  # branches of a block come one after the other
        blocks.setdefault(layer.split(".")[1], []).append(attention.mean(dim=1))
    assert len(blocks) == 2 and len(blocks["0"]) == (2 if name == "parallel" else 1)
    product = torch.eye(side * side + prefix, dtype=torch.float64).expand(3, -1, -1)
    for branches in blocks.values():
        mean = torch.stack(branches).mean(dim=0)
        product = 0.5 * mean @ product + 0.5 * product
    batches = [(x[:2], torch.zeros(2)), (x[2:], torch.zeros(1))]
    found = attention_rollout(model, batches)
    with fused(model, False):
        unfused = attention_rollout(model, batches)
    for image, other, rows in zip(found.maps, unfused.maps, product, strict=True):
        assert torch.allclose(image.mean.double(), rows[0, prefix:].reshape(side, side), atol=1e-6)
        assert torch.allclose(image.mean, other.mean, atol=1e-6)


@pytest.mark.parametrize("mix", ["uniform", "cb"])
def test_uniform_heads_count_as_uniform(mix):
    model = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False,
        kwargs={"depth": 1, "embed_dim": 24, "num_heads": 3},
        transforms=[Transform("uniform_heads", {"variant": "a", "mix": mix})],
    ).model  # fmt: skip
    x = torch.randn(2, 3, 32, 32)
    ((_, learned),) = unfused_attention(model, x).items()
    eye = torch.eye(5, dtype=torch.float64)
    uniform = torch.full((5, 5), 0.2, dtype=torch.float64)
    third = uniform if mix == "uniform" else 0.5 * uniform + 0.5 * eye
    expected = 0.5 * (learned.sum(dim=1) + third) / 3 + 0.5 * eye
    found = attention_rollout(model, [(x, torch.zeros(2))])
    for image, rows in zip(found.maps, expected, strict=True):
        assert torch.allclose(image.mean.double(), rows[0, 1:].reshape(2, 2), atol=1e-6)


def test_attention_to_oneself_brings_nothing_of_the_patches():
    model = GivenViT((2, 2), [torch.eye(5)[None]] * 2)
    found = attention_rollout(model, batch())
    assert found.maps[0].patches == 0 and math.isnan(found.maps[0].half)
    result = json.loads(json.dumps(finite(DIAGNOSTIC.measure(context(model, batch(), side=2)))))
    assert DIAGNOSTIC.read(result) == ["Nothing of the class token comes from any patch."]
    assert DIAGNOSTIC.numbers(result) == {"rollout on patches, share": 0.0}
    assert len(DIAGNOSTIC.draw([Run("one", result)])) == 1


def test_windows_other_numbers_of_tokens_and_no_attention_are_refused_by_name():
    x = [(torch.randn(1, 3, 32, 32), torch.zeros(1))]
    swin = timm_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(1, 1), num_heads=(2, 4)
    )
    with pytest.raises(UsageError, match=r"SwinTransformer: layers\.0\.blocks\.0\.attn sees windows of 4×4 tokens"):
        attention_rollout(swin, x)
    pit = timm_model("pit_ti_224", img_size=32, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 2))
    with pytest.raises(UsageError, match=r"transformers\.1\.blocks\.0\.attn has 5 tokens, the layers before it 10"):
        attention_rollout(pit, x)
    with pytest.raises(UsageError, match="ResNet: it has no attention; rollout is of models whose layers all see"):
        attention_rollout(timm_model("test_resnet"), x)
    for model in (swin, pit):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(DataError, match="no images"):
        attention_rollout(tiny_vit(), [])


def test_a_layer_that_attends_twice_is_refused():
    model = GivenViT((2, 2), [random_attention(1, 5)])
    model.blocks.append(model.blocks[0])  # weights that two layers share have one name
    with pytest.raises(UsageError, match=r"blocks\.0 attends more than once"):
        attention_rollout(model, batch())


def test_a_layer_that_hides_is_refused():
    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.qkv = 1, torch.nn.Linear(1, 1)

        def forward(self, x):
            return self.qkv(x)

    model = GivenViT((2, 2), [random_attention(1, 5)])
    model.blocks.append(Hidden())
    with pytest.raises(UsageError, match=r"its attention \(blocks\.1\) calls no softmax that can be seen"):
        attention_rollout(model, batch())


def test_the_model_is_left_as_it_was_and_broadcasting_is_named():
    model = tiny_vit(depth=2).train()
    state = torch.get_rng_state()
    one, two = (attention_rollout(model, images(2)) for _ in range(2))
    assert all(torch.equal(a.mean, b.mean) for a, b in zip(one.maps, two.maps, strict=True))
    assert model.training and torch.equal(state, torch.get_rng_state())
    made = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, kwargs={"depth": 2, "embed_dim": 24},
        transforms=[Transform("add_context_broadcast", {})],
    )  # fmt: skip
    result = DIAGNOSTIC.measure(context(made.model, batch(2, 32), side=32))
    assert "which rollout ignores" in DIAGNOSTIC.read(result)[-1]

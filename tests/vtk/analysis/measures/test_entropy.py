"""Entropy of attention against closed forms and against timm's own unfused attention, whatever the model."""

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import attention_entropy
from vtk.analysis.measures.entropy import entropies
from vtk.analysis.probes.attention_maps import rebuild_attention, watch_attention
from vtk.card import Transform
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model


def unfused_entropies(model, x):
    """By hand: timm's softmax as its dropout module gets it, with fusion off (another way than the one tested)."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
            hook = lambda m, args, name=name: seen.__setitem__(name, args[0].detach())  # noqa: E731
            handles.append(module.attn_drop.register_forward_pre_hook(hook))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    return {name: (-(p * p.clamp_min(1e-300).log()).sum(-1)).double() for name, p in seen.items()}


MODELS = {
    "vit": ("test_vit", {}),
    "registers": ("vit_tiny_patch16_224", {"img_size": 32, "depth": 1, "embed_dim": 48, "reg_tokens": 2}),
    "qk-norm": ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 48, "qk_norm": True}),
    "parallel": ("vit_small_patch16_18x2_224", {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}),
    "relative": ("test_vit_relpos", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 32, "depth": 1, "embed_dim": 48}),
    "pit": ("pit_ti_224", {"img_size": 48, "base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (1, 2, 2)}),
    "beit": ("beit_base_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}),
}


@pytest.mark.parametrize("name", MODELS)
def test_fused_attention_has_the_entropy_of_timms_unfused(name):
    model = timm_model(MODELS[name][0], **MODELS[name][1])
    side = model.patch_embed.img_size[0]
    batches = [(x.float(), y) for x, y in images(3, side=side, sizes=(2, 1))]
    expected = unfused_entropies(model, torch.cat([x for x, _ in batches]))
    found = attention_entropy(model, batches)
    assert [layer.name for layer in found.layers] == list(expected) and found.images == 3 and not found.unseen
    for layer in found.layers:
        values = expected[layer.name]
        assert layer.mean == pytest.approx(float(values.mean()), abs=1e-5)
        assert layer.percentile15 == pytest.approx(np.percentile(values.numpy(), 15), abs=1e-4)
        assert (layer.heads, layer.keys) == (values.shape[1], values.shape[2])
        if getattr(model, "cls_token", None) is None:
            assert layer.cls is None
        else:
            assert layer.cls == pytest.approx(float(values[:, :, 0].mean()), abs=1e-5)


def test_heads_folded_into_the_batch_are_taken_apart():
    model = timm_model(
        "samvit_base_patch16",
        img_size=32,
        depth=1,
        embed_dim=24,
        num_heads=3,
        global_attn_indexes=(0,),
        use_rel_pos=False,
    )
    x = torch.randn(2, 3, 32, 32)
    found = []
    for fused in (True, False):
        model.blocks[0].attn.fused_attn = fused
        seen = {}
        with torch.no_grad(), watch_attention(model, seen.__setitem__):
            model(x)
        attention, layer = seen["blocks.0.attn"], attention_entropy(model, [(x, torch.zeros(2))]).layers[0]
        assert attention.shape == (2, 3, 4, 4) and layer.heads == 3
        found.append(attention)
    assert torch.allclose(*found, atol=1e-6)
    tokens = model.blocks[0].norm1(model.patch_embed(x) + model.pos_embed)
    weight, bias = model.blocks[0].attn.qkv.weight[8:16], model.blocks[0].attn.qkv.bias[8:16]  # of the second head
    q = torch.nn.functional.linear(tokens.flatten(1, 2), weight, bias)
    k = torch.nn.functional.linear(
        tokens.flatten(1, 2), model.blocks[0].attn.qkv.weight[32:40], model.blocks[0].attn.qkv.bias[32:40]
    )
    assert torch.allclose(found[0][:, 1], (q @ k.transpose(1, 2) / 8**0.5).softmax(-1), atol=1e-5)


def test_parallel_branches_are_layers_of_their_own():
    found = attention_entropy(
        timm_model("vit_small_patch16_18x2_224", img_size=32, depth=1, embed_dim=48, num_heads=3), images(1, side=32)
    )
    assert [layer.name for layer in found.layers] == ["blocks.0.attns.0.attn", "blocks.0.attns.1.attn"]


def test_uniform_attention_has_the_logarithm_of_the_number_of_tokens():
    model = tiny_vit(depth=2, img_size=16)
    with torch.no_grad():
        for block in model.blocks:  # all keys alike
            block.attn.qkv.weight[8:16] = 0
            block.attn.qkv.bias[8:16] = 0
    for layer in attention_entropy(model, images(2, side=16)).layers:
        for value in (layer.mean, layer.percentile15, layer.cls, layer.maximum):
            assert value == pytest.approx(math.log(17), abs=1e-6)


def test_one_sharp_key_has_no_entropy_and_masked_keys_count_nothing():
    assert float(entropies(torch.tensor([1.0, 0.0, 0.0]))) == 0.0
    q = torch.zeros(1, 1, 4, 2)
    mask = torch.zeros(4, 4).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -math.inf)
    expected = [math.log(n) for n in (1, 2, 3, 4)]
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask == 0}):
        assert entropies(rebuild_attention(q, q, q, **options)).flatten().tolist() == pytest.approx(expected)


def test_windows_of_a_swin_are_seen_fused_and_not():
    torch.manual_seed(0)
    model = timm_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(2, 2), num_heads=(2, 4)
    )
    batches = [(x.float(), y) for x, y in images(2, side=32)]
    found = {}
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        found[fused] = attention_entropy(model, batches)
    assert [layer.keys for layer in found[True].layers] == [16] * 4
    assert [layer.heads for layer in found[True].layers] == [2, 2, 4, 4]
    for one, two in zip(found[True].layers, found[False].layers, strict=True):
        assert one.name == two.name and one.cls is None
        assert (one.mean, one.percentile15) == pytest.approx((two.mean, two.percentile15), abs=1e-5)


def test_windows_of_an_alternet_have_the_entropy_of_their_unfused_softmax():
    made = build_model("alternet_18_cifar", num_classes=3, pretrained=False,
                        kwargs={"channels": (8, 8, 8, 8), "heads": (1, 2, 2, 2), "head_dim": 4})  # fmt: skip
    batches = [(x.float(), y) for x, y in images(2, side=32)]
    found = []
    for fused in (True, False):
        for module in made.model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        found.append(attention_entropy(made.model, batches).layers)
    assert [(layer.heads, layer.keys) for layer in found[0]] == [(2, 16)] * 3
    for one, two in zip(*found, strict=True):
        assert one.name == two.name and one.mean == pytest.approx(two.mean, abs=1e-5) and 0 < one.mean < one.maximum


@pytest.mark.parametrize("transforms", [
    [Transform("add_context_broadcast", {"on": "both", "layers": "all"})],
    [Transform("uniform_heads", {"variant": "a"}), Transform("add_context_broadcast", {"scale": True})],
], ids=["both", "uniform heads"])  # fmt: skip
def test_context_broadcasting_models_have_the_entropy_of_their_unfused_attention(transforms):
    made = build_model(
        "test_vit", num_classes=3, img_size=32, pretrained=False, kwargs={"patch_size": 16}, transforms=transforms
    )
    batches = [(x.float(), y) for x, y in images(2, side=32)]
    expected = unfused_entropies(made.model, batches[0][0])
    found = attention_entropy(made.model, batches)
    assert len(found.layers) == len(made.model.blocks)
    for layer in found.layers:
        values = expected[layer.name]
        assert layer.mean == pytest.approx(float(values.mean()), abs=1e-5) and layer.heads == values.shape[1]
        assert layer.cls == pytest.approx(float(values[:, :, 0].mean()), abs=1e-5)


def test_training_mode_and_random_numbers_are_left_alone():
    model = tiny_vit(attn_drop_rate=0.5).train()
    state = torch.get_rng_state()
    first, second = (attention_entropy(model, images(2)) for _ in range(2))
    assert first == second and model.training and model.blocks[0].attn.attn_drop.training
    assert torch.equal(state, torch.get_rng_state())
    assert not model.blocks[0].attn._forward_hooks


def test_a_model_without_visible_attention_is_refused_never_empty():
    for model in (timm_model("test_resnet"), MlpMixer(img_size=32, patch_size=16, num_blocks=1, embed_dim=8)):
        with pytest.raises(UsageError, match="it has no attention"):
            attention_entropy(model, [(torch.zeros(1, 3, 32, 32), torch.zeros(1))])

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.qkv = 1, nn.Linear(192, 3)

        def forward(self, x):
            return self.qkv(x.flatten(1))

    with pytest.raises(UsageError, match=r"its attention \(attn\) calls no softmax that can be seen"):
        attention_entropy(nn.Sequential(OrderedDict(attn=Linear())).double(), images(1))


def test_outputs_are_what_they_are_without_being_watched():
    model, (x, _) = tiny_vit(depth=2), images(2)[0]
    seen = []
    with torch.no_grad(), watch_attention(model, lambda name, attention: seen.append((name, attention))):
        watched = model(x)
    assert torch.equal(watched, model(x)) and [name for name, _ in seen] == ["blocks.0.attn", "blocks.1.attn"]
    assert all(torch.allclose(a.sum(-1), torch.ones((), dtype=a.dtype)) for _, a in seen)


def test_an_error_inside_leaves_no_hooks_and_no_images_are_an_error():
    model = tiny_vit()
    with pytest.raises(RuntimeError), watch_attention(model, lambda *_: None):
        raise RuntimeError
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(DataError, match="no images"):
        attention_entropy(model, [])


def test_max_images_takes_the_first():
    model = tiny_vit()
    batches = images(6, sizes=(4, 2))
    assert attention_entropy(model, batches, max_images=3) == attention_entropy(model, images(6, sizes=(3, 3))[:1])

"""Every memory mode gives the loss and the gradients of timm's own autograd, whatever the blocks are made of."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention, set_reentrant_ckpt
from timm.models.vision_transformer import ParallelThingsBlock

from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.training.finetune_config import MODES
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.policies import policy

PARALLEL = {p: {"block_fn": partial(ParallelThingsBlock, num_parallel=p)} for p in (2, 3)}
CASES = {
    "sequential": {},
    "LayerScale, qk-norm": {"init_values": 0.1, "qk_norm": True},
    "drop-path, registers": {"drop_path_rate": 0.4, "reg_tokens": 3},
    "averaged, no bias": {"global_pool": "avg", "class_token": False, "qkv_bias": False, "proj_bias": False},
    "2 branches, drop-path": {**PARALLEL[2], "drop_path_rate": 0.4, "init_values": 0.1},
    "3 branches, qk-norm": {**PARALLEL[3], "qk_norm": True},
    "norm behind attention": {"scale_attn_norm": True, "qk_norm": True},
}
BROADCASTS = {
    "CB": ({}, {}),
    "CB_S on both": ({}, {"scale": True, "on": "both"}),
    "CB_S in the middle": ({}, {"scale": True, "placement": "mid"}),
    "CB_S in front of both": ({}, {"scale": True, "placement": "front", "on": "both"}),
    "CB_S, 2 branches": (PARALLEL[2], {"scale": True, "on": "both"}),
    "CB_S in front, 2 branches": (PARALLEL[2], {"scale": True, "placement": "front"}),
}


def build(tiny, broadcast=None, width=32, **kwargs):
    """A model in fp64 whose weights hide nothing: γ ≠ 1, biases and Λ ≠ 0; 10 tokens, or 9."""
    model = tiny(embed_dim=width, img_size=48, **kwargs)
    if broadcast is not None:
        add_context_broadcast(model, layers="all", **broadcast)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.ndim == 1:
            p.data += 0.2 * torch.randn(p.shape, generator=generator)
    policy.apply(model, policy.select(model, "attn"))
    policy.train_mode(model)
    return model.double()


def gradients(model, mode=None, accumulate=1, autocast=False):
    if mode is not None:
        plan = apply_memory_mode(model, mode)
        assert plan.note is None and plan.changed == plan.blocks == 2, plan
    generator = torch.Generator().manual_seed(2)
    dtype = next(model.parameters()).dtype
    torch.manual_seed(3)
    for _ in range(accumulate):
        images = torch.randn(3, 3, 48, 48, generator=generator).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(images)
        loss = F.cross_entropy(logits.float() if dtype == torch.float32 else logits, torch.arange(3))
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst(found, expected):
    """The largest relative error of a tensor; what is 0 but for rounding (a bias of keys) is measured by the rest."""
    assert found.keys() == expected.keys()
    floor = 1e-4 * max(float(g.norm()) for g in expected.values())
    return max(float((found[n] - g).norm()) / max(float(g.norm()), floor) for n, g in expected.items())


def cosine(found, expected):
    flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in (found, expected)]
    return float(F.cosine_similarity(*flat, dim=0))


def check(model, limit=1e-13):
    loss, expected = gradients(copy.deepcopy(model))
    for mode in MODES:
        own_loss, found = gradients(copy.deepcopy(model), mode)
        assert float((own_loss - loss).abs()) < 1e-13, mode
        if mode == "act8":
            assert cosine(found, expected) >= 0.9999, mode
        else:
            assert worst(found, expected) <= limit, mode


@pytest.mark.parametrize("name", CASES)
def test_blocks(tiny, name):
    check(build(tiny, **CASES[name]))


@pytest.mark.parametrize("name", BROADCASTS)
def test_context_broadcasting(tiny, name):
    kwargs, broadcast = BROADCASTS[name]
    check(build(tiny, broadcast, **kwargs))


def test_attention_that_is_not_fused(tiny):
    model = build(tiny, qk_norm=True)
    for block in model.blocks:
        block.attn.fused_attn = False
    check(model)


def test_gated_attention(tiny):
    model = build(tiny)
    for block in model.blocks:
        block.attn = Attention(32, num_heads=2, qkv_bias=True, gated=True).double()
    check(model)


def test_bytes_for_gelu_cost_less_than_bf16_rounding(tiny):
    """At ViT-B's width: the error of a byte averages out over channels."""
    model = tiny("vit_base_patch16_224", embed_dim=768, num_heads=12, img_size=48)
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(p, mean=1.0 if "weight" in name else 0.0, std=0.2)
        elif p.ndim > 1 and "blocks" in name:
            torch.nn.init.normal_(p, std=0.04)
    policy.apply(model.double(), policy.select(model, "attn"))
    _, expected = gradients(copy.deepcopy(model))
    _, found = gradients(model, "act8")
    assert worst(found, expected) <= 4e-3
    assert cosine(found, expected) >= 0.99999


def test_a_frozen_position_table(tiny):
    """The first block's input then needs no gradient."""
    model = build(tiny)
    model.pos_embed.requires_grad_(False)
    check(model)


def test_accumulated_gradients(tiny):
    model = build(tiny)
    _, expected = gradients(copy.deepcopy(model), accumulate=3)
    for mode in ("plain", "recompute", "minimal"):
        assert worst(gradients(copy.deepcopy(model), mode, accumulate=3)[1], expected) <= 1e-13


@pytest.mark.parametrize("name", ["LayerScale, qk-norm", "2 branches, drop-path"])
def test_autocast(tiny, name):
    """No farther from fp64 than timm under autocast is, times two."""
    model = build(tiny, **CASES[name])
    _, exact = gradients(copy.deepcopy(model))
    _, theirs = gradients(copy.deepcopy(model).float(), autocast=True)
    for mode in MODES:
        _, ours = gradients(copy.deepcopy(model).float(), mode, autocast=True)
        assert {g.dtype for g in ours.values()} == {torch.float32}
        distance = [1 - cosine({n: g.double() for n, g in side.items()}, exact) for side in (ours, theirs)]
        assert distance[0] <= 2 * distance[1] + 1e-5, mode


def test_gradient_checkpointing(tiny):
    model = build(tiny, drop_path_rate=0.4)
    _, expected = gradients(copy.deepcopy(model))
    set_reentrant_ckpt(False)
    model.set_grad_checkpointing(True)
    for mode in ("plain", "recompute", "minimal"):
        assert worst(gradients(copy.deepcopy(model), mode)[1], expected) <= 1e-13

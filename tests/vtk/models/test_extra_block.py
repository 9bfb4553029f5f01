"""The extra attention or FFN of Hyeon-Woo et al. 2023 (Figure 3) against its formula, counts, runs and refusals."""

import math

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vtk.analysis.measures.neurons import active_neurons
from vtk.bank.folded import fold
from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.models.meta_model import shapes_only
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.models.transforms.extra_block import KINDS, SublayerBlock, add_block
from vtk.models.transforms.uniform_heads import uniform_heads
from vtk.training.finetune_config import FinetuneConfig

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 4, "num_classes": 3}


def vit(**kwargs):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**SMALL, **kwargs}).double().eval()


def normed(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def attention(attn, x):
    """Multi-head attention of tokens (N, C), head by head."""
    q, k, v = (x @ attn.qkv.weight.T + attn.qkv.bias).split(16, -1)
    heads = [
        ((q[:, h : h + 4] @ k[:, h : h + 4].T) / 2).softmax(-1) @ v[:, h : h + 4]  # √4 = 2
        for h in range(0, 16, 4)
    ]
    return torch.cat(heads, -1) @ attn.proj.weight.T + attn.proj.bias


def ffn(mlp, x):
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    return hidden @ mlp.fc2.weight.T + mlp.fc2.bias


@pytest.mark.parametrize("kind", KINDS)
def test_it_adds_a_scaled_branch_after_the_last_block(kind):
    model = vit(init_values=0.3)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    seen = []
    model.blocks[-1].register_forward_hook(lambda *call: seen.append(call[-1]))
    keys = add_block(model, kind=kind)
    block = model.blocks[-1]
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.3 * torch.randn_like(p))
        found = model.forward_features(x)
        before = seen[0]
        inner = [normed(tokens, block.norm) for tokens in before]
        branch = [attention(block.attn, t) if kind == "msa" else ffn(block.mlp, t) for t in inner]
        expected = normed(before + block.ls.gamma * torch.stack(branch), model.norm)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    new = {key for key, source in keys.items() if source is None}
    assert new == {key for key in model.state_dict() if key.startswith("blocks.1.")} and len(new) == 7
    assert len(model.feature_info) == 2 and model.feature_info[-1]["module"] == "blocks.1"


def test_both_have_nearly_the_same_weights_and_operations_in_a_vit_of_eight_blocks():
    weights, flops = {}, {}
    for kind in ("none", *KINDS):
        with shapes_only():
            model = timm.create_model("vit_small_patch16_224", depth=1)  # each block is alike
            if kind != "none":
                add_block(model, kind=kind)
            with FlopCounterMode(display=False) as counter:
                model(torch.empty(1, 3, 224, 224))
        weights[kind], flops[kind] = sum(p.numel() for p in model.parameters()), counter.get_total_flops()
    added = {kind: weights[kind] - weights["none"] for kind in KINDS}
    assert added == {"msa": 4 * 384**2 + 4 * 384 + 2 * 384, "mlp": 4 * 384**2 + 3 * 384 + 2 * 384}
    cost = {kind: flops[kind] - flops["none"] for kind in KINDS}
    # attention also multiplies queries by keys and weights by values: 2·N·C multiply-adds a token
    assert cost["mlp"] == 2 * 197 * 4 * 384**2 and cost["msa"] - cost["mlp"] == 2 * 2 * 197**2 * 384


def test_its_weights_are_drawn_from_the_seed_as_timm_draws_those_of_its_vits():
    small = {"patch_size": 8, "embed_dim": 128, "depth": 1, "num_heads": 4}
    made = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        made.append(
            build_model(
                "vit_tiny_patch16_224", num_classes=3, img_size=16, pretrained=False, kwargs=small,
                transforms=[Transform("add_block", {"kind": "msa"})],
            ).model.state_dict()
        )  # fmt: skip
    assert all(torch.equal(made[0][k], made[1][k]) for k in made[0])
    assert made[0]["blocks.1.attn.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert not made[0]["blocks.1.attn.qkv.bias"].any() and not made[0]["blocks.1.attn.proj.bias"].any()


def test_it_is_like_the_models_own_blocks():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL, drop_path_rate=0.2, qk_norm=True, qkv_bias=False)
    uniform_heads(model, variant="c")
    add_context_broadcast(model)
    add_block(model, kind="msa")
    block = model.blocks[-1]
    assert block.attn.qkv.bias is None and isinstance(block.attn.q_norm, nn.LayerNorm) and block.norm.eps == 1e-6
    assert (block.attn.num_heads, block.attn.head_dim, block.training) == (4, 4, True)
    assert type(block).__mro__[:2] == (SublayerBlock, nn.Module) and type(block.attn) is not type(model.blocks[0].attn)


def test_a_mask_reaches_the_attention():
    model = vit()
    add_block(model, kind="msa")
    x, alone = torch.randn(1, 5, 16, dtype=torch.float64), torch.eye(5, dtype=torch.bool)
    block = model.blocks[-1]
    rows = torch.cat([block(x[:, i : i + 1]) for i in range(5)], 1)
    torch.testing.assert_close(block(x, attn_mask=alone), rows, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind", "match"),
    [
        ("vit_tiny_patch16_224", "both", "`--extra-block` is both; allowed is msa, mlp"),
        ("resnet18", "msa", "extends timm's VisionTransformer .*, not ResNet"),
        ("vit_base_patch16_xp_224", "mlp", r"blocks\.0 is a ParallelScalingBlock"),
        ("vit_giant_patch14_dinov2", "mlp", r"blocks\.0 has a GluMlp; only timm's Mlp"),
    ],
)
def test_what_cannot_have_it_is_named_and_left_as_it_was(name, kind, match):
    with shapes_only():
        model = timm.create_model(name, **({} if name == "resnet18" else {"depth": 1}))
    keys = model.state_dict().keys()
    with pytest.raises(UsageError, match=match) as caught:
        add_block(model, kind=kind)
    assert "\n" not in str(caught.value) and model.state_dict().keys() == keys


def test_it_is_added_once_and_after_changes_of_the_models_own_blocks():
    model = vit()
    add_block(model, kind="mlp")
    with pytest.raises(UsageError, match="is such a block already; it is added once"):
        add_block(model, kind="msa")
    with pytest.raises(UsageError, match="is a SublayerBlock, which cannot have Context Broadcasting"):
        add_context_broadcast(model)
    flags = FinetuneConfig(cb=True, extra_block="msa", se=True)
    assert [t.op for t in flags.transforms()] == ["add_squeeze_excite", "add_context_broadcast", "add_block"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_bank_refuses_it_in_one_line_and_blocks_without_an_ffn_have_no_neurons(kind):
    model = vit()
    add_block(model, kind=kind)
    with pytest.raises(UsageError, match=r"cannot fold `blocks\.1`: .*; create the bank with fused=False") as caught:
        fold(model, (16, 16), torch.float32)
    assert "\n" not in str(caught.value)
    found = active_neurons(model, [(torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.zeros(2))])
    assert not found.unseen and [layer.block for layer in found.layers] == ([1] if kind == "msa" else [1, 2])

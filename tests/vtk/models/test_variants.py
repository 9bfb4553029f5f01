"""Local attention, uniform heads and squeeze-and-excitation against written-out formulas and timm's own modules."""

import copy
import itertools

import numpy as np
import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.models.meta_model import shapes_only
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.models.transforms.local_attention import LocalAttention, local_attention, neighbours
from vtk.models.transforms.parallel_blocks import parallelize
from vtk.models.transforms.softmax_free import softmax_free
from vtk.models.transforms.squeeze_excite import add_squeeze_excite
from vtk.models.transforms.uniform_heads import uniform_heads

SMALL = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}


def vit(name="vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **kwargs}).double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def tokens(model):
    torch.manual_seed(1)
    return torch.randn(2, model.pos_embed.shape[1], 16, dtype=torch.float64)


def written_out(attn, x, sees):
    """Attention of every head and token by itself; ``sees`` tells which keys a query has."""
    qkv = (x @ attn.qkv.weight.T + attn.qkv.bias).detach().numpy()
    heads, dim, out = attn.num_heads, attn.head_dim, np.zeros(x.shape)
    q, k, v = np.split(qkv, 3, -1)
    for b, h, i in itertools.product(range(len(x)), range(heads), range(x.shape[1])):
        channels, keys = slice(h * dim, h * dim + dim), [j for j in range(x.shape[1]) if sees(i, j)]
        scores = k[b][keys][:, channels] @ q[b, i, channels] / np.sqrt(dim)
        share = np.exp(scores - scores.max())
        out[b, i, channels] = (share / share.sum()) @ v[b][keys][:, channels]
    return torch.from_numpy(out) @ attn.proj.weight.T + attn.proj.bias


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_a_patch_attends_to_its_neighbourhood_and_the_class_token_to_all(kernel, fused):
    model = vit()
    local_attention(model, kernel=kernel)
    attn, x = model.blocks[0].attn, tokens(model)
    attn.fused_attn = fused

    def sees(i, j):
        if 0 in (i, j):
            return True
        (y, x), (v, u) = divmod(i - 1, 6), divmod(j - 1, 6)  # the grid is 4×6
        return abs(y - v) <= kernel // 2 and abs(x - u) <= kernel // 2

    torch.testing.assert_close(attn(x), written_out(attn, x, sees), atol=1e-12, rtol=0)


def test_a_large_neighbourhood_is_plain_attention_and_weights_keep_their_names():
    model = vit(class_token=False, global_pool="avg", fc_norm=False)
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 32, 48, dtype=torch.float64)
    keys = local_attention(model, kernel=11)
    assert model.state_dict().keys() == plain.state_dict().keys() == keys.keys()
    torch.testing.assert_close(model(x), plain(x), atol=1e-12, rtol=0)
    assert bool(neighbours((4, 6), 11).all()) and not bool(neighbours((4, 6), 9).all())


def test_a_further_mask_hides_more_and_causal_order_too():
    model = vit(class_token=False, global_pool="avg", fc_norm=False)
    local_attention(model, kernel=3)
    attn, x = model.blocks[0].attn, tokens(model)
    n, mask = x.shape[1], attn.local_mask
    hidden = torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < 0.3
    hidden.fill_diagonal_(False)
    bias = torch.zeros(n, n, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    for fused in (True, False):
        attn.fused_attn = fused
        expected = written_out(attn, x, lambda i, j: bool(mask[i, j]) and not bool(hidden[i, j]))
        for given in (~hidden, bias):
            torch.testing.assert_close(attn(x, attn_mask=given), expected, atol=1e-12, rtol=0)
        causal = written_out(attn, x, lambda i, j: bool(mask[i, j]) and j <= i)
        torch.testing.assert_close(attn(x, is_causal=True), causal, atol=1e-12, rtol=0)


def test_the_mask_moves_with_the_model_and_other_numbers_of_tokens_are_refused():
    with shapes_only():
        blank = timm.create_model("vit_tiny_patch16_224", **SMALL)
        local_attention(blank, kernel=3)
    assert blank.blocks[0].attn.local_mask.is_meta
    model = vit()
    local_attention(model, kernel=3)
    with pytest.raises(UsageError, match="is for 25 tokens and got 24"):
        model.blocks[0](tokens(model)[:, 1:])
    assert copy.deepcopy(model)(torch.zeros(1, 3, 32, 48, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("where", ["blocks.1.attn", "blocks.0.attns.1.attn"])
def test_parallel_branches_have_it_too(where):
    model = vit()
    if "attns" in where:
        parallelize(model, branches=2)
    local_attention(model, kernel=3)
    assert type(model.get_submodule(where)) is LocalAttention
    x = torch.randn(1, 3, 32, 48, dtype=torch.float64)
    assert model(x).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_without_softmax_the_weights_are_the_scores(causal):
    model = vit()
    x, plain = tokens(model), copy.deepcopy(model)
    keys = softmax_free(model, layers=[1])
    assert keys.keys() == plain.state_dict().keys() and type(model.blocks[0].attn) is Attention
    attn = model.blocks[1].attn
    q, k, v = (part.numpy() for part in (x @ attn.qkv.weight.T + attn.qkv.bias).detach().chunk(3, -1))
    expected = np.zeros(x.shape)
    for h in range(attn.num_heads):
        own = slice(h * attn.head_dim, (h + 1) * attn.head_dim)
        for b, i in itertools.product(range(len(x)), range(x.shape[1])):
            for j in range(i + 1 if causal else x.shape[1]):
                expected[b, i, own] += q[b, i, own] @ k[b, j, own] / np.sqrt(attn.head_dim) * v[b, j, own]
    expected = torch.from_numpy(expected) @ attn.proj.weight.T + attn.proj.bias
    torch.testing.assert_close(attn(x, is_causal=causal), expected, atol=1e-12, rtol=0)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    if causal:
        torch.testing.assert_close(attn(x, attn_mask=hidden), expected, atol=1e-12, rtol=0)
        with pytest.raises(UsageError, match="masks of booleans"):
            attn(x, attn_mask=torch.zeros(hidden.shape, dtype=x.dtype))
    assert not torch.allclose(attn(x), plain.blocks[1].attn(x))


@pytest.mark.parametrize("mix", ["uniform", "cb"])
def test_a_replaced_head_is_the_one_whose_queries_are_zero(mix):
    model = vit()
    x, plain = tokens(model), copy.deepcopy(model.blocks[0].attn)
    uniform_heads(model, variant="a", heads=2, mix=mix)
    attn = model.blocks[0].attn
    assert attn.qkv.weight.shape == (2 * 8 + 16, 16)
    with torch.no_grad():
        plain.qkv.weight[8:16], plain.qkv.bias[8:16] = 0, 0  # scores of 0: every key has 1/N
    for fused in (True, False):
        attn.fused_attn = fused
        if mix == "uniform":
            expected = plain(x)
        else:  # half of the head's own value, eq. 1
            value = (x @ plain.qkv.weight[40:].T + plain.qkv.bias[40:]) - plain_mean(plain, x)
            expected = plain(x) + 0.5 * value @ plain.proj.weight[:, 8:].T
        torch.testing.assert_close(attn(x), expected, atol=1e-12, rtol=0)


def plain_mean(attn, x):
    """The mean value of the last two heads."""
    return (x @ attn.qkv.weight[40:].T + attn.qkv.bias[40:]).mean(1, keepdim=True)


def test_an_extra_head_changes_nothing_at_first_and_is_uniform():
    model = vit()
    x, plain = tokens(model), copy.deepcopy(model.blocks[0].attn)
    keys = uniform_heads(model, variant="c")
    attn = model.blocks[0].attn
    torch.testing.assert_close(attn(x), plain(x), atol=1e-12, rtol=0)
    assert keys["blocks.0.attn.proj.weight"] is None and keys["blocks.0.attn.proj.bias"] == "blocks.0.attn.proj.bias"
    nn.init.normal_(attn.proj.weight)
    plain.proj.weight.data = attn.proj.weight[:, :16].clone()
    extra = (x @ attn.qkv.weight[-4:].T + attn.qkv.bias[-4:]).mean(1, keepdim=True)
    torch.testing.assert_close(attn(x), plain(x) + extra @ attn.proj.weight[:, 16:].T, atol=1e-12, rtol=0)


def count(name, transforms=(), **kwargs):
    with shapes_only():
        model = timm.create_model(name, **kwargs)
        for apply, arguments in transforms:
            apply(model, **arguments)
    return sum(p.numel() for p in model.parameters())


def test_parameters_are_those_of_paper_b():
    """Table 1 in millions: ViT-S 22, (A) 21, (B) 22, (C) 29; CB_S adds 0.02 %."""
    name = "vit_small_patch16_224"
    plain = count(name)
    a, b, c = (count(name, [(uniform_heads, {"variant": v})]) for v in "abc")
    assert a == plain - 12 * 2 * (384 * 64 + 64) and c == plain + 12 * (2 * 384 * 64 + 64)
    assert (round(plain / 1e6), round(a / 1e6), round(b / 1e6)) == (22, 21, 22)
    assert abs(b - plain) < 0.001 * plain
    wide = count(name, [(uniform_heads, {"variant": "a"})], embed_dim=448, num_heads=7)
    assert round(wide / 1e6) == 29
    se = count(name, [(add_squeeze_excite, {})])
    assert se == plain + 12 * (2 * 384 * 24 + 24 + 384)
    cb = count(name, [(add_context_broadcast, {"scale": True})])
    assert cb == plain + 12 * 384 and round(100 * (cb - plain) / plain, 2) == 0.02


def test_wider_queries_keep_the_rows_they_had():
    model = vit()
    before = copy.deepcopy(model.blocks[0].attn)
    uniform_heads(model, variant="b", heads=2)
    after = model.blocks[0].attn
    assert (after.learned_heads, after.query_dim, after.head_dim, after.scale) == (2, 8, 4, 8**-0.5)
    q, k, v = after.qkv.weight.split((16, 16, 16))
    for part, own in ((q, before.qkv.weight[:16]), (k, before.qkv.weight[16:32])):
        torch.testing.assert_close(part.view(2, 8, 16)[:, :4], own.view(4, 4, 16)[:2], atol=0, rtol=0)
    assert torch.equal(v, before.qkv.weight[32:])


def test_squeeze_and_excitation_is_the_written_out_formula():
    model = vit()
    mlp, x = model.blocks[1].mlp, tokens(model)
    y = mlp(x)
    keys = add_squeeze_excite(model, reduction=4)
    made = {k for k, source in keys.items() if source is None}
    assert made == {f"blocks.{i}.mlp.se.fc{j}.{p}" for i in (0, 1) for j in (1, 2) for p in ("weight", "bias")}
    se = model.blocks[1].mlp.se
    w1, b1, w2, b2 = (p.detach().numpy() for p in (se.fc1.weight, se.fc1.bias, se.fc2.weight, se.fc2.bias))
    pooled = y.detach().numpy().mean(1)
    gate = 1 / (1 + np.exp(-(np.maximum(pooled @ w1.T + b1, 0) @ w2.T + b2)))
    expected = y * torch.from_numpy(gate)[:, None]
    torch.testing.assert_close(mlp(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("apply", "name", "arguments", "match"),
    [
        (local_attention, "resnet18", {"kernel": 3}, "ResNet is not timm's VisionTransformer"),
        (local_attention, "vit_tiny_patch16_224", {"kernel": 4}, "`kernel` is 4; allowed is an odd number"),
        (local_attention, "test_vit", {"kernel": 3}, "takes images of any size.*dynamic_img_size=false"),
        (local_attention, "mixer_s32_224", {"kernel": 3}, "MlpMixer is not timm's VisionTransformer"),
        (local_attention, "deit_tiny_distilled_patch16_224", {"kernel": 3}, "has its own `"),
        (local_attention, "vit_base_patch16_xp_224", {"kernel": 3}, r"blocks\.0 is a ParallelScalingBlock"),
        (local_attention, "vit_tiny_patch16_224", {"kernel": 3, "layers": [12]}, "the model's blocks are 0 to 11"),
        (uniform_heads, "vit_tiny_patch16_224", {"variant": "d"}, "`variant` is 'd'; allowed is a, b, c"),
        (uniform_heads, "vit_tiny_patch16_224", {"variant": "a", "heads": 3}, r"blocks\.0\.attn it may be 1 to 2"),
        (uniform_heads, "vit_tiny_patch16_224", {"variant": "a", "mix": "x"}, "`mix` is 'x'"),
        (uniform_heads, "mixer_s32_224", {"variant": "a"}, "a MixerBlock, which has no attention"),
        (uniform_heads, "vit_base_patch16_siglip_gap_224", {"variant": "a", "heads": 0}, "`heads` is 0"),
        (softmax_free, "mixer_s32_224", {}, "a MixerBlock, which has no attention"),
        (softmax_free, "vit_tiny_patch16_224", {"layers": [12]}, "the model's blocks are 0 to 11"),
        (softmax_free, "resnet18", {}, "ResNet cannot have attention without softmax"),
        (add_squeeze_excite, "vit_tiny_patch16_224", {"reduction": 0}, "`reduction` is 0"),
        (add_squeeze_excite, "vit_tiny_patch16_224", {"reduction": 400}, "has 192 channels: give less"),
        (add_squeeze_excite, "vit_small_patch14_dinov2", {"layers": "x"}, "give all, upper"),
        (add_squeeze_excite, "vit_giant_patch14_dinov2", {}, r"blocks\.0\.mlp is a GluMlp"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " not in v else None,
)
def test_what_cannot_have_it_is_named_and_left_as_it_was(apply, name, arguments, match):
    with shapes_only():
        model = timm.create_model(name, **({"depth": 1} if "giant" in name else {}))
    kinds, keys = [type(m) for m in model.modules()], model.state_dict().keys()
    with pytest.raises(UsageError, match=match) as caught:
        apply(model, **arguments)
    assert "\n" not in str(caught.value)
    assert [type(m) for m in model.modules()] == kinds and model.state_dict().keys() == keys


def test_one_attention_cannot_be_both_and_masks_are_not_dropped():
    model = vit()
    uniform_heads(model, variant="a")
    with pytest.raises(UsageError, match="is a UniformHeadAttention; only timm's plain Attention can have local"):
        local_attention(model, kernel=3)
    with pytest.raises(UsageError, match="support no mask"):
        model.blocks[0].attn(tokens(model), attn_mask=torch.ones(25, 25, dtype=torch.bool))
    with pytest.raises(UsageError, match="support no mask"):
        model.blocks[0].attn(tokens(model), is_causal=True)


def test_new_weights_are_drawn_from_the_seed_only():
    change = [Transform("uniform_heads", {"variant": "b"}), Transform("add_squeeze_excite", {"reduction": 4})]
    small = {k: v for k, v in SMALL.items() if k not in ("img_size", "num_classes")}
    made = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model = build_model(
            "vit_tiny_patch16_224", num_classes=3, img_size=(32, 48), pretrained=False, transforms=change, kwargs=small
        ).model
        assert torch.equal(torch.get_rng_state(), state)
        made.append(model.state_dict())
    assert all(torch.equal(made[0][k], made[1][k]) for k in made[0])
    assert type(model.blocks[0].attn).__bases__ == (Attention,)

"""AlterNet against its reference numbers, written-out attention, and timm's own pre-activation ResNet."""

import itertools

import numpy as np
import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, create_conv2d
from timm.models.resnetv2 import ResNetV2
from torch import nn

from vtk.card import ModelSpec, Transform
from vtk.errors import UsageError
from vtk.models.alternet import AlterNet, AttentionBlock, WindowAttention, build_up, per_stage, placement
from vtk.models.create import build_model, check_transforms
from vtk.models.inputs import check_size, input_spec
from vtk.models.meta_model import shapes_only
from vtk.packs.plain import _own_name

TINY = {"channels": [8, 16, 32, 64], "stem_chs": 8, "heads": [1, 2, 2, 3], "head_dim": 4}


def alternet(**kwargs) -> AlterNet:
    torch.manual_seed(0)
    return timm.create_model("alternet_18_cifar", num_classes=3, **{**TINY, **kwargs}).eval()


@pytest.mark.parametrize(
    ("name", "kwargs", "count"),
    [
        ("alternet_18", {}, 9_968_803),
        ("alternet_50", {}, 35_915_038),
        ("alternet_50_cifar", {"num_classes": 100}, 33_012_840),
        ("alternet_50_cifar", {"num_classes": 100, "msa_blocks": 6}, 34_062_538),
        ("alternet_18_cifar", {"num_classes": 100}, 9_499_063),
    ],
    ids=["18", "50", "50-cifar", "50-cifar-6", "18-cifar"],
)
def test_parameters_are_those_of_the_reference_code(name, kwargs, count):
    with shapes_only():
        model = timm.create_model(name, **kwargs)
    assert sum(p.numel() for p in model.parameters()) == count


def test_attention_in_windows_is_the_written_out_formula():
    torch.manual_seed(0)
    heads, dim, w = 2, 3, 4
    attn = WindowAttention(6, nn.Identity(), 5, heads, dim, w).double()
    for p in attn.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 6, 8, 4, dtype=torch.float64)
    weight = {n: p.detach().numpy() for n, p in attn.named_parameters()}
    table = weight["relative_position_bias_table"].reshape(2 * w - 1, 2 * w - 1)
    small = np.einsum("oc,bchw->bohw", weight["reduce.weight"][..., 0, 0], x.numpy())
    q = np.einsum("oc,bchw->bohw", weight["q.weight"][..., 0, 0], small)
    kv = np.einsum("oc,bchw->bohw", weight["kv.weight"][..., 0, 0], small)
    mixed = np.zeros((2, heads * dim, 8, 4))
    for b, head, y, x0 in itertools.product(range(2), range(heads), range(8), range(4)):
        channels, own = slice(head * dim, head * dim + dim), (y // w * w, x0 // w * w)
        places = [(own[0] + i, own[1] + j) for i in range(w) for j in range(w)]
        scores = [
            q[b, channels, y, x0] @ kv[b, channels, i, j] / np.sqrt(dim) + table[i - y + w - 1, j - x0 + w - 1]
            for i, j in places
        ]
        share = np.exp(scores - np.max(scores))
        values = [kv[b, heads * dim + head * dim : heads * dim + head * dim + dim, i, j] for i, j in places]
        mixed[b, channels, y, x0] = (share / share.sum()) @ values
    bias = weight["proj.bias"][:, None, None]
    expected = np.einsum("oc,bchw->bohw", weight["proj.weight"][..., 0, 0], mixed) + bias
    for fused in (True, False):
        attn.fused_attn = fused
        np.testing.assert_allclose(attn(x).detach().numpy(), expected, atol=1e-12)


def test_a_block_adds_to_its_raw_input_and_its_first_norm_is_followed_by_gelu():
    block = next(m for m in alternet().modules() if isinstance(m, AttentionBlock))
    x = torch.randn(2, 16, 16, 16)
    norm = block.norm1
    plain = nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    torch.testing.assert_close(block(x), x + block.attn(nn.functional.gelu(plain)))
    assert isinstance(block.attn.norm.act, nn.Identity)


def test_without_attention_it_is_the_resnet_of_timm():
    with shapes_only():
        counts = [
            sum(p.numel() for p in timm.create_model(n).parameters()) for n in ("preact_resnet_18", "resnetv2_18")
        ]
    assert counts[0] == counts[1]
    small = {"channels": (8, 16, 32, 64), "stem_chs": 8}
    ours, parts = timm.create_model("preact_resnet_18", **small), {"conv_layer": create_conv2d, **small}
    timms = ResNetV2((2, 2, 2, 2), basic=True, bottle_ratio=1.0, norm_layer=BatchNormAct2d, **parts)
    ours.load_state_dict(timms.state_dict(), strict=True)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), timms.eval()(x), rtol=0, atol=0)


def test_the_index_of_relative_positions_is_no_state_but_moves():
    model = alternet()
    assert not [k for k in model.state_dict() if k.endswith("index")]
    with shapes_only():
        blank = timm.create_model("alternet_18_cifar", **TINY)
    buffers = {n: b for n, b in blank.named_buffers() if n.endswith("relative_position_index")}
    assert len(buffers) == 3 and all(b.is_meta for b in buffers.values())


@pytest.mark.parametrize(
    ("blocks", "attention", "expected"),
    [(2, 1, "cm"), (4, 2, "cmcm"), (6, 3, "cmcmcm"), (6, 1, "ccccc" + "m"), (3, 0, "ccc")],
)
def test_attention_blocks_alternate_from_the_end_of_a_stage(blocks, attention, expected):
    assert "".join("m" if a else "c" for a in placement(blocks, attention)) == expected


def test_blocks_of_attention_are_where_the_rule_says():
    model = alternet(layers=[2, 3, 4, 4], msa_blocks=[0, 1, 2, 1])
    kinds = ["".join("m" if isinstance(b, AttentionBlock) else "c" for b in s.blocks) for s in model.stages]
    assert kinds == ["cc", "ccm", "cmcm", "cccm"]


def test_a_number_for_the_model_fills_the_last_stages_first():
    assert per_stage((3, 4, 6, 4), 6) == (0, 1, 3, 2)  # the paper's model for ImageNet
    assert per_stage((2, 2, 2, 2), 3) == (0, 1, 1, 1)
    assert per_stage((3, 4, 6, 3), 2) == (0, 0, 1, 1)
    for wrong, match in ((9, "is 0 to 8"), ([0, 1], "one for each of the 4"), ([0, 3, 0, 0], "stage 2: .* 0 to 2"),
                         (True, "is True"), ("6", "give one number")):  # fmt: skip
        with pytest.raises(UsageError, match=match) as caught:
            per_stage((3, 4, 6, 4), wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_resnet_keeps_its_weights_where_it_stays_convolutional(norm):
    torch.manual_seed(0)
    layers = {"norm_layer": BatchNormAct2d, "conv_layer": create_conv2d, "basic": True} if norm == "batch" else {}
    model = ResNetV2([2, 2, 2, 2], (128, 128, 128, 128), num_classes=3, stem_chs=32, **layers).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    keys = build_up(model, msa_blocks=2, window_size=2, heads=(1, 1, 1, 1), head_dim=8)
    after = model.state_dict()
    assert keys.keys() == after.keys()
    made = {k.rpartition(".attn.")[0] for k, source in keys.items() if source is None}
    assert made == {"stages.2.blocks.1", "stages.3.blocks.1"}
    assert all(torch.equal(after[k], before[source]) for k, source in keys.items() if source is not None)
    assert "stages.3.blocks.1.norm1.weight" in keys and "stages.3.blocks.1.conv1.weight" not in keys
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_what_cannot_be_built_up_is_named_and_left_as_it_was():
    faults = [
        ("resnet18", {"msa_blocks": 1}, "ResNet cannot be built up; supported are"),
        ("resnetv2_50x1_bit", {"msa_blocks": 1, "heads": [1]}, "`heads` is .*one number for each of the 4 stages"),
        ("resnetv2_18", {"msa_blocks": 1, "window_size": 0}, "`window_size` is 0"),
        ("alternet_18", {"msa_blocks": 1}, "is already an attention block"),
    ]
    for name, arguments, match in faults:
        with shapes_only():
            model = timm.create_model(name)
        kinds = [type(m) for m in model.modules()]
        with pytest.raises(UsageError, match=match):
            build_up(model, **arguments)
        assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("alternet_18", 256, "windows of 7×7 do not tile a feature map of 32×32.*use 224 or 448"),
        ("alternet_50_cifar", 16, "do not tile a feature map of 2×2.*use 32$"),
    ],
    ids=["imagenet", "cifar"],
)
def test_sizes_that_windows_do_not_tile_are_refused_with_those_they_do(name, size, message):
    with pytest.raises(UsageError, match=message) as caught:
        check_size(name, size)
    for side in map(int, str(caught.value).rpartition("use ")[2].split(" or ")):
        assert check_size(name, side) == (side, side)
    assert "\n" not in str(caught.value)


def test_sizes_of_a_transformed_or_rewindowed_model_are_refused_before_it_is_made():
    change = (Transform("build_up", {"msa_blocks": 3}),)
    with pytest.raises(UsageError, match=r"`--img-size` 32 32: windows of 7×7 do not tile .* use 224"):
        check_transforms("resnetv2_18", change, {}, (32, 32))
    check_transforms("resnetv2_18", change, {}, (224, 224))
    with pytest.raises(UsageError, match=r"windows of 5×5 do not tile .* use 160 or 320"):
        check_transforms("alternet_18", (), {"window_size": 5}, (224, 224))
    with pytest.raises(UsageError, match=r"do not tile a feature map of 10×4; give images of another size"):
        alternet()(torch.zeros(1, 3, 80, 32))


def test_a_window_of_another_size_takes_the_table_resampled():
    kwargs = {**TINY, "msa_blocks": [0, 0, 1, 1]}
    made = build_model("alternet_18_cifar", num_classes=3, img_size=64, pretrained=False, kwargs=kwargs)
    wide = {**kwargs, "window_size": 8}
    other = build_model("alternet_18_cifar", num_classes=3, img_size=64, base=made.base, kwargs=wide)
    key = "stages.3.blocks.1.attn.relative_position_bias_table"
    before, after = made.model.state_dict()[key], other.model.state_dict()[key]
    assert before.shape == (49, 1) and after.shape == (225, 1)
    torch.testing.assert_close(after.view(15, 15)[7, 7], before.view(7, 7)[3, 3], atol=1e-3, rtol=0)


def test_the_stem_of_cifar_keeps_the_size():
    model = timm.create_model("alternet_18_cifar", features_only=True, **TINY)
    assert [tuple(f.shape[1:]) for f in model(torch.zeros(1, 3, 32, 32))] == [
        (8, 32, 32), (8, 32, 32), (16, 16, 16), (32, 8, 8), (64, 4, 4)
    ]  # fmt: skip
    assert model.feature_info.reduction() == [1, 1, 2, 4, 8]


def test_the_input_of_cifar_is_its_own():
    spec = input_spec("alternet_50_cifar")
    assert spec.size == (32, 32) and spec.mean == (0.5071, 0.4867, 0.4408) and spec.crop_pct == 1.0
    assert input_spec("alternet_50").size == (224, 224)


def test_the_vits_of_the_paper_are_timms_by_other_arguments():
    for name, tokens in (("vit_tiny_patch2_32", 257), ("vit_tiny_patch2_gap_32", 256)):
        plain, kwargs, _ = _own_name(ModelSpec(name, {"depth": 1}))
        torch.manual_seed(0)
        ours = timm.create_model(name, depth=1, num_classes=3).eval()
        timms = timm.create_model(plain, img_size=32, num_classes=3, **kwargs).eval()
        timms.load_state_dict(ours.state_dict(), strict=True)
        x = torch.randn(2, 3, 32, 32)
        assert torch.equal(ours(x), timms(x)) and ours.pos_embed.shape[1] == tokens
        assert ours.blocks[0].attn.qkv.bias is None
    with pytest.raises(UsageError, match="timm alone has no `alternet_50`"):
        _own_name(ModelSpec("alternet_50"))

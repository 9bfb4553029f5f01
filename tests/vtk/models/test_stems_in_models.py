"""Models with another stem: timm's features, other sizes and channels, and what has no place for one."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from torch import nn

from vtk.card import Card, Transform
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model, check_transforms
from vtk.models.stems import STEMS, Stem, replace_stem
from vtk.models.transforms.mlp_layers import TokenBatchNormAct, change_mlp
from vtk.models.transforms.parallel_blocks import parallelize
from vtk.packs.load import card_metadata, load_checkpoint
from vtk.training.policies import policy
from vtk.training.policies.census import take_census

slow = pytest.mark.slow
SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 16, "num_heads": 2}


def vit(name: str = "vit_tiny_patch16_224", **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, "img_size": 32, "num_classes": 3, **kwargs}).eval()


def change(stem: str, **arguments: Any) -> Transform:
    return Transform("replace_stem", {"stem": stem, **arguments})


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True}),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg", "pos_embed": "none"}),
        ("vit_tiny_patch16_224", {"pre_norm": True, "embed_norm_layer": nn.LayerNorm}),
        ("vit_tiny_patch16_224", {"patch_size": (16, 8), "img_size": (32, 24)}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("beit_base_patch16_224", {}),
        pytest.param("eva02_tiny_patch14_224", {"img_size": 28}, marks=slow),
        pytest.param("cait_xxs24_224", {"depth_token_only": 1}, marks=slow),
        ("vit_tiny_patch16_2x2_224", {}),
    ],
    ids=str,
)
def test_only_the_tokens_are_others(name: str, kwargs: dict[str, Any]) -> None:
    """Everything behind the stem is the model's own: fed with the new tokens by hand, it gives the same logits."""
    from vtk.models import parallel_models as parallel

    torch.manual_seed(0)
    size = kwargs.get("img_size", 32)
    options = {**SMALL, "img_size": size, "num_classes": 3, **kwargs}
    options = {k: v for k, v in options.items() if not (k == "depth" and name.endswith("2x2_224"))}
    model = parallel.build(name, **options).eval()
    plain = copy.deepcopy(model)
    keys = replace_stem(model, stem="hmlp")
    assert {k for k, v in keys.items() if v is None} == {k for k in keys if k.startswith("patch_embed.proj.")}
    stem = model.patch_embed
    assert type(stem) is Stem and stem.grid_size == plain.patch_embed.grid_size
    images = torch.randn(2, 3, *((size, size) if isinstance(size, int) else size))
    with torch.no_grad():
        tokens = stem(images)
        assert tokens.shape == plain.patch_embed(images).shape
        plain.patch_embed.forward = lambda x: tokens
        assert torch.equal(model(images), plain(images))


def test_other_sizes() -> None:
    fixed, dynamic = vit(), vit(dynamic_img_size=True)
    dynamic.load_state_dict(fixed.state_dict())
    torch.manual_seed(1)
    replace_stem(fixed, stem="conv")
    torch.manual_seed(1)
    replace_stem(dynamic, stem="conv")
    images = torch.randn(1, 3, 48, 64)
    table = resample_abs_pos_embed(fixed.pos_embed, [3, 4], [2, 2], num_prefix_tokens=1)
    fixed.set_input_size((48, 64))
    assert fixed.patch_embed.grid_size == (3, 4) and torch.equal(fixed.pos_embed, table)
    with torch.no_grad():
        torch.testing.assert_close(fixed(images), dynamic(images), rtol=0, atol=1e-6)
    with pytest.raises(AssertionError, match=r"Input height \(32\) doesn't match model \(48\)"):
        fixed(torch.randn(1, 3, 32, 64))
    with pytest.raises(UsageError, match=r"`patch_size` 8: stem conv has patches of \(16, 16\)"):
        fixed.set_input_size(patch_size=8)
    fixed.set_input_size(img_size=32, patch_size=16)
    assert fixed(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    padded = vit(dynamic_img_size=True, dynamic_img_pad=True)
    replace_stem(padded, stem="levit")
    assert padded.patch_embed(torch.randn(1, 3, 33, 20)).shape == (1, 3, 2, 16)  # height, width and C last


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("resnet18", {}, "ResNet has no `patch_embed`"),
        ("mixer_s32_224", {}, "MlpMixer has no `patch_embed`"),
        ("pit_ti_224", {}, "PoolingVisionTransformer has a ConvEmbedding as its `patch_embed`"),
        pytest.param(
            "vit_small_r26_s32_224", {}, "VisionTransformer has a HybridEmbed as its `patch_embed`", marks=slow
        ),
        ("naflexvit_base_patch16_gap", {}, "NaFlexVit has no `patch_embed`"),
        (
            "swinv2_cr_tiny_224",
            {},
            r"SwinTransformerV2Cr has a timm.models.swin_transformer_v2_cr.PatchEmbed as its .* timm.layers.PatchEmbed",
        ),
        ("vit_tiny_patch16_224", {"patch_size": 7, "img_size": 28}, "halves a patch, and this model's is 7 pixels"),
    ],
    ids=str,
)
def test_models_without_a_place_for_it_are_refused_by_name(name: str, kwargs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        check_transforms(name, (change("hmlp"),), kwargs)
    assert "\n" not in str(error.value)


def test_a_stem_is_replaced_once_and_a_refusal_changes_nothing() -> None:
    model = vit()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UsageError, match="multiply to 8"):
        replace_stem(model, stem="conv", strides=(2, 2, 2, 1))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and before.keys()
    config = dict(model.pretrained_cfg)
    replace_stem(model, stem="hmlp")
    assert vit().pretrained_cfg["first_conv"] == config["first_conv"] == "patch_embed.proj"
    with pytest.raises(UsageError, match="VisionTransformer already has the stem hmlp; a stem is replaced once"):
        replace_stem(model, stem="conv")


def test_the_models_own_projection_stays_in_stems_of_it_alone() -> None:
    model = vit()
    own = model.patch_embed.proj.weight.clone()
    keys = replace_stem(model, stem="1proj+1bn+1relu")
    assert torch.equal(model.patch_embed.proj.proj.weight, own)
    assert keys["patch_embed.proj.proj.weight"] == "patch_embed.proj.weight"
    assert {k for k, v in keys.items() if v is None} == {
        f"patch_embed.proj.norm.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("attn", "hmlp"), ("ffn", "hmlp"), ("head", "1proj+1bn"), ("full", "1proj+1bn"),
        *(pytest.param(n, s, marks=slow) for n in ("attn", "attn+norm", "ffn", "head", "full")
          for s in ("levit-ln", "conv", "1proj+1bn+1relu")),
    ],
)  # fmt: skip
def test_every_policy_trains_what_is_new_of_a_stem(name: Any, stem: Any) -> None:
    created = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, kwargs=SMALL, transforms=(change(stem),)
    )
    model, made = created.model, policy.created_names(created.key_map, created.model)
    inside = {n for n, _ in model.named_parameters() if n.startswith("patch_embed.")}
    assert {policy.group_names(model)[n] for n in inside} == {"stem"}
    trained = policy.select(model, name, made)
    kept = {n for n in inside if created.key_map[n] is not None}  # the base's, which a conv stem has no use for
    assert len(kept) == (2 if stem.startswith("1proj") else 0)
    assert trained & inside == (inside if name == "full" else inside - kept)
    rows = {r.group: r for r in take_census(model, trained, name).rows}
    assert rows["stem"].trained_tensors == len(trained & inside)
    policy.apply(model, trained)
    policy.train_mode(model)
    assert all(m.training for m in model.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("design", ["relu", "bn", "no-norm"])
@pytest.mark.parametrize("branches", [1, 2])
def test_designs_of_the_ffn_are_their_formula(design: Any, branches: int) -> None:
    model = vit().double()
    if branches == 2:
        parallelize(model, branches=2)
    change_mlp(model, design=design)
    for p in model.parameters():
        p.data = 0.3 * torch.randn_like(p)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    block, x = model.blocks[0], torch.randn(2, 5, 16, dtype=torch.float64)
    pairs = [(b.norm, b.mlp) for b in block.ffns] if branches == 2 else [(block.norm2, block.mlp)]
    with torch.no_grad():
        attended = x + (sum(b(x) for b in block.attns) if branches == 2 else block.attn(block.norm1(x)))
        expected = attended.clone()
        for norm, mlp in pairs:
            h = attended
            if design == "no-norm":
                assert type(norm) is nn.Identity
            else:
                h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
                h = h * norm.weight + norm.bias
            h = h @ mlp.fc1.weight.T + mlp.fc1.bias
            if design == "bn":
                bn = mlp.act.bn
                h = (h - bn.running_mean) / (bn.running_var + bn.eps).sqrt() * bn.weight + bn.bias
            h = h.clamp_min(0) if design == "relu" else h * 0.5 * (1 + torch.erf(h / 2**0.5))
            expected = expected + h @ mlp.fc2.weight.T + mlp.fc2.bias
        assert float((block(x) - expected).abs().max()) <= 1e-12
    with pytest.raises(UsageError, match="already has one of these designs"):
        change_mlp(model, design=design)


def test_a_convolution_along_the_tokens_is_timms_ffn() -> None:
    mlp = vit().blocks[0].mlp
    conv = nn.Conv1d(16, 64, 1)
    conv.load_state_dict({"weight": mlp.fc1.weight[:, :, None], "bias": mlp.fc1.bias})
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        h = mlp.act(conv(x.transpose(1, 2)).transpose(1, 2))
        torch.testing.assert_close(mlp.fc2(h), mlp(x), rtol=1e-5, atol=1e-6)


def test_what_an_ffn_design_has_no_place_in() -> None:
    for name, kwargs, message in (
        ("resnet18", {}, "changes timm's VisionTransformer"),
        ("vit_tiny_patch16_224", {"mlp_layer": timm.layers.SwiGLU}, "the FFN of blocks.0 is a SwiGLU"),
        ("vit_tiny_patch16_224", {"block_fn": timm.models.vision_transformer.ParallelScalingBlock}, "ParallelScaling"),
    ):
        model = timm.create_model(name, **({} if name == "resnet18" else SMALL), **kwargs)
        with pytest.raises(UsageError, match=message):
            change_mlp(model, design="relu")
    with pytest.raises(UsageError, match="`--mlp` is gelu; allowed is relu, bn, no-norm"):
        change_mlp(vit(), design="gelu")  # type: ignore[arg-type]
    model = vit()
    change_mlp(model, design="bn")
    assert sum(isinstance(m, TokenBatchNormAct) for m in model.modules()) == 2


def checkpoint(path: Path, *transforms: Transform, in_chans: int = 3) -> Path:
    """A checkpoint with its card, and weights that no initialisation gives."""
    created = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, kwargs=SMALL, transforms=transforms,
        in_chans=in_chans,
    )  # fmt: skip
    state = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in created.model.state_dict().items()}
    card = Card(created.spec, created.input, tuple("abc"), transforms=created.transforms)
    save_file(state, path, metadata=card_metadata(card))
    return path


def again(weights: Path, *transforms: Transform, **kwargs: Any) -> Any:
    options = {"num_classes": 3, "img_size": 32, "kwargs": SMALL, **kwargs}
    return build_model("vit_tiny_patch16_224", weights=weights, transforms=transforms, **options)


@pytest.mark.parametrize(
    ("stem", "in_chans"),
    [
        ("hmlp", 1), ("conv", 3), ("1proj+1bn+1relu", 3),
        *(pytest.param(*case, marks=slow) for case in (("hmlp", 3), ("conv", 1), ("1proj+1bn+1relu", 1))),
    ],
)  # fmt: skip
def test_a_checkpoint_brings_its_stem_whether_or_not_it_is_asked_for(tmp_path: Path, stem: str, in_chans: int) -> None:
    file = checkpoint(tmp_path / "stem.safetensors", change(stem), in_chans=in_chans)
    want = load_checkpoint(file).model.state_dict()
    asked, unasked = again(file, change(stem), in_chans=in_chans), again(file, in_chans=in_chans)
    assert asked.transforms == unasked.transforms == load_checkpoint(file).card.transforms
    assert asked.notes == []
    assert unasked.notes == [f"{file} was made with `replace_stem` {{'stem': '{stem}'}}, and so is this model"]
    for created in (asked, unasked):
        assert all(torch.equal(v, want[k]) for k, v in created.model.state_dict().items())
    with pytest.raises(DataError, match=r"was made with `replace_stem` .* and \{'stem': 'levit'\} is requested"):
        again(file, change("levit"), in_chans=in_chans)


@pytest.mark.parametrize(
    ("stem", "first"),
    [("conv", "conv.0"), *(pytest.param(*case, marks=slow) for case in (("hmlp", "0"), ("levit", "conv1.linear")))],
)
def test_a_trained_stem_is_adapted_to_other_channels_by_timms_rule(tmp_path: Path, stem: str, first: str) -> None:
    file = checkpoint(tmp_path / "stem.safetensors", change(stem))
    key = f"patch_embed.proj.{first}.weight"
    want = load_checkpoint(file).model.state_dict()[key]
    created = again(file, in_chans=1)
    assert created.transforms == (change(stem), Transform("adapt_input", {"in_chans": 1}))
    torch.testing.assert_close(created.model.state_dict()[key], want.sum(1, keepdim=True))
    assert created.model(torch.randn(1, 1, 32, 32)).shape == (1, 3)
    grey = checkpoint(tmp_path / "grey.safetensors", change(stem), in_chans=1)
    assert again(grey, in_chans=1).transforms[0] == Transform("adapt_input", {"in_chans": 1})
    with pytest.raises(DataError, match="is for 1 channels, not 3; give --in-chans 1"):
        again(grey)


def test_new_stems_are_drawn_from_the_seed_and_leave_the_callers_numbers_alone(tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "plain.safetensors")
    state = torch.get_rng_state()
    one, two, other = (again(file, change("hmlp"), seed=seed).model.patch_embed for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.proj[0].weight, two.proj[0].weight)
    assert not torch.equal(one.proj[0].weight, other.proj[0].weight)
    count = sum(p.numel() for p in one.parameters())
    assert again(file, change("hmlp")).notes == [f"stem hmlp: {count:,} weights are randomly initialised"]
    assert again(file, change("1proj+1bn")).notes == ["stem 1proj+1bn: 32 weights are randomly initialised"]


@pytest.mark.slow
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_base_patch8_224"])
def test_every_stem_learns_in_every_model(name: str, stem: Any) -> None:
    kwargs = {"img_size": 16} if "patch8" in name else {}
    model = vit(name, **kwargs).train()
    replace_stem(model, stem=stem)
    side = model.patch_embed.img_size[0]
    out = model(torch.randn(4, 3, side, side))
    out.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.patch_embed.parameters())

"""Families beside timm's VisionTransformer and Eva, fused, against timm's own forward pass in fp64."""

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import RelPosBias
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch import Tensor, nn

from tests.vtk.fused.conftest import randomize
from vtk.errors import UsageError
from vtk.fused import FusedViT, count_launches, fuse, separate_qkv, to_fp8
from vtk.fused.stages import Plan
from vtk.models.create import build_model

SIZE = (8, 12)
"""Pixels: a grid of 2 × 3."""

SMALL = {"img_size": SIZE, "patch_size": 4, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}


def build(name: str, **kwargs: Any) -> nn.Module:
    return randomize(timm.create_model(name, **{**SMALL, **kwargs}))


def naflex(**kwargs: Any) -> nn.Module:
    config = {"patch_size": 4, "embed_dim": 32, "num_heads": 2, "depth": 2, "pos_embed_grid_size": (3, 3), **kwargs}
    return randomize(NaFlexVit(NaFlexVitCfg(**config), num_classes=5))


def difference(model: nn.Module, fused: FusedViT, size: tuple[int, int] = SIZE) -> float:
    """Largest error relative to the largest logit: torch's plan, the kernels' in both forms, and that of exporters."""
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    apart, divided = copy.deepcopy(fused), copy.deepcopy(fused)
    separate_qkv(apart)
    separate_qkv(divided, divide_scores=True)
    with torch.no_grad():
        expected = model(x)
        found = [fused(x), *(fused.compute(x, Plan(True, ln_folded=folds)) for folds in (False, True))]
        if fused.rotary is None or fused.image_size == size:
            found += [apart(x), divided(x)]
        else:
            for constant in (apart, divided):
                with pytest.raises(UsageError, match=r"of which its rotary tables are; fuse a model of that size"):
                    constant(x)
    return max(float((y - expected).abs().max() / expected.abs().max()) for y in found)


BEIT = {
    "a bias of each block": {},
    "a bias of the model": {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    "both": {"use_shared_rel_pos_bias": True},
    "a table of positions": {"use_abs_pos_emb": True, "use_rel_pos_bias": False},
    "class token": {"global_pool": "token"},
    "tokens": {"global_pool": "", "num_classes": 0},
    "no LayerScale, no biases": {"init_values": None, "qkv_bias": False},
    "gated, with a norm": {"swiglu_mlp": True, "scale_mlp": True},
    "odd heads": {"num_heads": 1, "embed_dim": 24},
}


@pytest.mark.parametrize("case", BEIT)
def test_beit(case: str) -> None:
    model = build("beit_base_patch16_224", **BEIT[case])
    assert difference(model, fuse(model)) <= 1e-12


RELPOS = {
    "table": {"rel_pos_type": "bias"},
    "network": {"rel_pos_type": "mlp", "rel_pos_dim": 8},
    "Swin's network": {"rel_pos_type": "mlp-swin", "rel_pos_dim": 8},
    "table and class token": {"rel_pos_type": "bias", "class_token": True, "global_pool": "token"},
    "network and class token": {"rel_pos_type": "mlp", "class_token": True, "global_pool": "token"},
    "shared": {"shared_rel_pos": True, "fc_norm": True},
    "qk-norm": {"qk_norm": True, "init_values": None, "qkv_bias": False},
    "mean without the class token": {"class_token": True, "global_pool": "avg"},
}


@pytest.mark.parametrize("case", RELPOS)
def test_relative_positions(case: str) -> None:
    model = build("vit_relpos_small_patch16_224", **RELPOS[case])
    assert difference(model, fuse(model)) <= 1e-12


BEIT3 = {
    "as released": {},
    "class token": {"global_pool": "token"},
    "gated with LayerScale": {"mlp_layer": timm.layers.SwiGLU, "init_values": 0.1},
    "registers and qk-norm": {"reg_tokens": 2, "qk_norm": True},
    "any size": {"dynamic_img_size": True},
}


@pytest.mark.parametrize("case", BEIT3)
def test_beit3(case: str) -> None:
    model = build("beit3_base_patch16_224", **BEIT3[case])
    assert all(type(b.attn.norm) is not nn.Identity and type(b.mlp.norm) is not nn.Identity for b in model.blocks)
    assert difference(model, fuse(model)) <= 1e-12


DISTILLED = {
    "two heads": {},
    "no classifier": {"num_classes": 0},
    "any size": {"dynamic_img_size": True},
    "an idle norm of the pooling": {"fc_norm": True},
}


@pytest.mark.parametrize("case", DISTILLED)
def test_distilled(case: str) -> None:
    model = build("deit_tiny_distilled_patch16_224", **DISTILLED[case])
    fused = fuse(model)
    assert fused.pruned == 2 and fused.head.queries == 2  # of the last block only both tokens are computed
    assert difference(model, fused) <= 1e-12


NAFLEX = {
    "mean": {"global_pool": "avg", "reg_tokens": 2},
    "attention pools": {"global_pool": "map"},
    "class token and pre-norm": {"global_pool": "token", "class_token": True, "pre_norm": True},
    "one side resampled, one cut": {"pos_embed_ar_preserving": True, "pos_embed_interp_mode": "bilinear"},
    "aligned corners": {"pos_embed_align_corners": True, "pos_embed_antialias": False},
    "factors": {"pos_embed": "factorized"},
    "no positions": {"pos_embed": "none"},
    "convolution": {"embed_proj_type": "conv"},
    "channels first": {"patchify_channels_last": False},
    "patches that are not square": {"patch_size": (4, 2)},
    "norm of patches": {"embed_norm_layer": "layernorm"},
    "sub-norms": {"scale_mlp_norm": True, "scale_attn_inner_norm": True},
    "rotary": {"rope_type": "dinov3", "rope_rotate_half": True, "class_token": True, "reg_tokens": 1},
    "rotary of each block": {"rope_type": "mixed", "pos_embed": "none"},
    "grouped keys, gated": {"rope_type": "axial", "num_kv_heads": (1, 2), "qkv_fused": False, "attn_gated": True,
                            "swiglu_mlp": True, "init_values": 0.1, "attn_only_layer_scale": True},
}  # fmt: skip


@pytest.mark.parametrize("case", NAFLEX)
def test_naflex_at_its_own_size_and_others(case: str) -> None:
    model = naflex(**NAFLEX[case])
    fused = fuse(model)
    height, width = fused.image_size
    assert (height // model.embeds.patch_size[0], width // model.embeds.patch_size[1]) == (3, 3)
    for size in (SIZE, (height, width), (20, 4)):
        assert difference(model, fused, size) <= 1e-12


def test_naflex_takes_the_size_of_its_weights_and_no_mixed_patches() -> None:
    small = {"patch_size": 4, "embed_dim": 32, "num_heads": 2, "depth": 1}
    made = build_model("naflexvit_base_patch16_gap", img_size=(16, 24), num_classes=5, pretrained=False, kwargs=small)
    fused = fuse(made.model.eval())
    assert fused.image_size == (16, 24)
    patches = {"patches": torch.zeros(1, 6, 48), "patch_coord": torch.zeros(1, 6, 2), "patch_valid": torch.ones(1, 6)}
    with pytest.raises(UsageError, match=r"images of one size.*not a dict"):
        fused(patches)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "vit_relpos_small_patch16_224"])
def test_what_is_loaded_changes_the_bias_too(name: str) -> None:
    model, other = build(name), randomize(timm.create_model(name, **SMALL), seed=1)
    fused, donor = fuse(model), fuse(other)
    assert not any(key.endswith((".bias", ".index")) and "attn_bias" in key for key in donor.state_dict())
    fused.load_state_dict(donor.state_dict())
    assert difference(other, fused) <= 1e-12
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert difference(other, copied) <= 1e-12


def test_in_bf16_a_bias_costs_no_more_than_in_plain_torch() -> None:
    model = build("beit_base_patch16_224", embed_dim=128, img_size=(32, 48))
    x = torch.randn(8, 3, 32, 48, dtype=torch.float64)

    def rms(value: Tensor) -> float:
        return float(value.double().pow(2).mean().sqrt())

    with torch.no_grad():
        expected = model(x)
        fused = fuse(model.float(), torch.bfloat16)
        got = fused(x.bfloat16()), fused.compute(x.bfloat16(), Plan(kernels=True))
        plain = model.bfloat16()(x.bfloat16())
    assert all(rms(y - expected) <= 2 * rms(plain - expected) for y in got)


def test_a_bias_starts_no_kernel_of_its_own() -> None:
    beit = timm.create_model("beit_base_patch16_224", **SMALL)
    plain = timm.create_model("vit_small_patch16_224", **SMALL, global_pool="avg")
    for folds in (False, True):
        assert count_launches(beit, ln_folded=folds) == count_launches(plain, ln_folded=folds)
    for stage in fuse(beit).stages[::2]:  # rows that SDPA reads without a copy
        bias: Tensor = stage.attn_bias()
        assert bias.shape[-1] % 8 == 0 and bias.is_contiguous()


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_in_fp8_a_bias_and_two_heads_are_kept(name: str) -> None:
    model = build(name, embed_dim=64, img_size=(8, 16)).float()
    x = torch.randn(6, 3, 8, 16)
    with torch.no_grad():
        expected = model(x)
        got = to_fp8(fuse(model, keep_source=False), [torch.randn(8, 3, 8, 16)])(x)
    assert float((got - expected).norm() / expected.norm()) < 0.06  # an e4m3 number is off by 2.6 %


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (partial(build, "vit_small_patch16_dinov3"), "a rotary embedding"),
        (partial(build, "beit3_base_patch16_224"), "a norm before its second layer"),
        (partial(build, "vit_small_patch16_224", mlp_layer=timm.layers.SwiGLU), "a gated FFN"),
        (partial(naflex, attn_gated=True), "gated attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fp8_refuses_what_it_would_leave_out(make: Callable[[], nn.Module], part: str) -> None:
    fused = fuse(make().float(), keep_source=False)
    with pytest.raises(UsageError, match=f"`stages.[01]` has {part}.*use bf16"):
        to_fp8(fused)


@pytest.mark.slow
def test_an_exported_bias_is_gathered_from_its_table() -> None:
    """A small one the exporter writes out; of a whole image the file holds table and index."""
    import onnxruntime

    from vtk.card import InputSpec
    from vtk_export.graph.convert import convert, export_form

    model = build("beit_base_patch16_224", img_size=224, patch_size=16, depth=1, num_heads=12, embed_dim=48).float()
    proto = convert(export_form(model), InputSpec(224, 224), opset=18)
    assert [node.op_type for node in proto.graph.node].count("Gather") == 1
    assert all(len(t.raw_data) < 12 * 197 * 197 * 4 for t in proto.graph.initializer)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(3, 3, 224, 224)
    with torch.no_grad():
        expected = model(x)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-4)


class _OwnBias(RelPosBias):
    def get_bias(self) -> Tensor:
        return 2 * super().get_bias()


def _own_bias(model: Any) -> None:
    model.blocks[1].attn.rel_pos = _OwnBias((2, 3), 2).double()


def _other_index(model: Any) -> None:
    model.blocks[1].attn.relative_position_index.copy_(model.blocks[1].attn.relative_position_index.flip(0))


def _own_head(model: Any) -> None:
    model.head_dist = nn.Sequential(model.head_dist)


def _own_positions(model: Any) -> None:
    model.embeds.__class__ = type("Own", (type(model.embeds),), {})


@pytest.mark.parametrize(
    ("name", "kwargs", "change", "part"),
    [
        ("vit_relpos_small_patch16_224", {}, _own_bias, "blocks.1.attn"),
        ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}, _other_index, "blocks.1.attn"),
        ("deit_tiny_distilled_patch16_224", {}, _own_head, "head_dist"),
        ("naflexvit_base_patch16_gap", {"img_size": None}, _own_positions, "embeds"),
    ],
)  # fmt: skip
def test_parts_of_unknown_arithmetic_are_refused_by_name(name: str, kwargs: Any, change: Any, part: str) -> None:
    model = build(name, **kwargs)
    change(model)
    with pytest.raises(UsageError, match=rf"`{re.escape(part)}`.*use the back-end eager"):
        fuse(model)

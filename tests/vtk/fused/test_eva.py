"""timm's Eva, fused, against timm in fp64: rotary embeddings of each type, grouped heads, sub-norms, gates, sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention, AttentionRope, GluMlp, RmsNorm, SwiGLU
from timm.models.eva import Eva
from torch import Tensor, nn

from tests.vtk.fused.conftest import randomize
from vtk.errors import UsageError
from vtk.fused import FusedViT, fuse, to_fp8
from vtk.fused.kernel_count import Counting, count
from vtk.fused.sizes import MOST
from vtk.fused.stages import Plan

Build = Callable[..., Any]
RMS = partial(RmsNorm, eps=1e-6)
PLANS = (Plan(False), Plan(True), Plan(True, None, True))
ROPE: dict[str, Any] = {"attn_type": "rope", "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_rotate_half": True}


def eva(**kwargs: Any) -> Any:
    """Build a model of DINOv3's form with images that are not square: 3 heads of 8 channels, a register."""
    arguments: dict[str, Any] = {
        "img_size": (8, 20), "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5,
        "num_reg_tokens": 1, **ROPE, **kwargs,
    }  # fmt: skip
    model = Eva(**arguments)
    freqs = {name: p.detach().double() for name, p in model.named_parameters() if name.startswith("rope.")}
    randomize(model)
    for name, value in freqs.items():
        model.get_parameter(name).data = value
    return model


def error(model: Any, fused: FusedViT, size: tuple[int, int] | None = None) -> float:
    """Return the largest error relative to the largest logit, over the plans of a CPU and both of CUDA."""
    x = torch.randn(2, 3, *(size or model.patch_embed.img_size), dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        found = [fused.compute(x, plan) for plan in PLANS]
    return max(float((got - expected).abs().max() / expected.abs().max()) for got in found)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"rope_rotate_half": False, "rope_type": "cat", "rope_grid_indexing": "xy", "ref_feat_shape": (4, 4)},
        {"rope_type": "mixed", "rope_rotate_half": False},
        {"rope_type": "mixed", "rope_rotate_half": False, "global_pool": "token", "embed_dim": 48},
        {"rope_type": "mrope", "rope_mrope_section": (1, 1, 1), "embed_dim": 36},
        {"use_rot_pos_emb": False, "attn_type": "eva"},
        {"attn_type": "eva", "qkv_fused": True, "rope_type": "cat", "rope_rotate_half": False, "num_reg_tokens": 0},
        {"attn_type": "eva", "qkv_fused": False, "scale_attn_inner": True, "swiglu_mlp": True, "scale_mlp": True},
        {"qkv_bias": False, "use_abs_pos_emb": False, "init_values": 0.3},
        {"qkv_fused": False, "num_kv_heads": (3, 1, 1), "qk_norm": True, "norm_layer": RMS, "swiglu_mlp": True},
        {"qkv_fused": False, "num_kv_heads": 1, "init_values": 0.3, "attn_only_layer_scale": True},
        {"swiglu_mlp": True, "swiglu_align_to": 64, "global_pool": "token", "no_embed_class": True},
        {"global_pool": "map", "use_pre_transformer_norm": True, "class_token": False, "num_reg_tokens": 0},
        {"global_pool": "map", "attn_pool_num_heads": 2, "scale_mlp": True, "num_classes": 0},
        {"global_pool": "avgmax", "use_fc_norm": True, "norm_layer": RMS, "use_pre_transformer_norm": True},
        {"global_pool": "", "num_classes": 0, "scale_mlp": True, "swiglu_mlp": True, "norm_layer": RMS},
    ],
    ids=lambda kwargs: ",".join(f"{k}={getattr(v, 'func', v)}" for k, v in kwargs.items())[:60] or "dinov3",
)
def test_a_fused_eva_is_timms(kwargs: dict[str, Any]) -> None:
    model = eva(**kwargs)
    assert error(model, fuse(model)) <= 1e-12


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_small_patch16_dinov3", {"global_pool": "token", "num_classes": 3}),
        ("eva02_tiny_patch14_224", {}),
        ("vit_pe_core_tiny_patch16_384", {}),
    ],
)
def test_registered_models(name: str, kwargs: dict[str, Any]) -> None:
    size = {"img_size": (28, 42)} if "14" in name else {"img_size": (32, 48)}
    model = randomize(timm.create_model(name, depth=2, **size, **kwargs))
    assert error(model, fuse(model)) <= 1e-12


def test_biases_added_behind_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = eva(attn_type="eva", rope_type="cat", rope_rotate_half=False)
    for block in model.blocks:
        block.attn.qkv_bias_separate = True
    assert error(model, fuse(model)) <= 1e-12


@pytest.mark.parametrize("kind", [AttentionRope, Attention])
@pytest.mark.parametrize("scale_norm", [False, True])
def test_gated_attention(kind: type[nn.Module], scale_norm: bool, vit: Build) -> None:
    rotated = kind is AttentionRope
    model = eva(global_pool="token") if rotated else vit()
    own: dict[str, Any] = {"num_prefix_tokens": 2, "rotate_half": True} if rotated else {}
    for block in model.blocks:
        dim = model.embed_dim
        norm = RMS if rotated else nn.LayerNorm
        block.attn = kind(
            dim, model.blocks[0].attn.num_heads, gated=True, scale_norm=scale_norm, norm_layer=norm, **own
        )
    randomize(model)
    assert error(model, fuse(model)) <= 1e-12


GLU: tuple[Any, ...] = (
    SwiGLU,
    partial(GluMlp, act_layer=nn.SiLU, gate_last=False),
    partial(GluMlp, act_layer=nn.GELU, gate_last=True),
    partial(SwiGLU, align_to=64, act_layer=nn.Sigmoid),
)


class _Glu:
    """timm gives an activation of its own; these have theirs."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __call__(self, *args: Any, act_layer: Any, **kwargs: Any) -> Any:
        return self.make(*args, **kwargs)


@pytest.mark.parametrize("branches", [None, 3])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("make", GLU, ids=["SwiGLU", "packed", "gate last", "sigmoid"])
def test_gated_ffns_and_sub_norms_of_a_vision_transformer(
    vit: Build, make: Any, norm: str, branches: int | None
) -> None:
    norms = {"scale_attn_norm": norm == "layernorm", "scale_mlp_norm": True, "norm_layer": norm}
    model = vit(branches=branches, mlp_layer=_Glu(make), mlp_ratio=3, global_pool="avg", **norms)
    fused = fuse(model)
    assert error(model, fused) <= 1e-12
    fused.cache_bytes = 0  # branch by branch
    assert error(model, fused) <= 1e-12


def test_norms_of_the_hidden_layer_of_beit_3(vit: Build) -> None:
    model = vit(scale_attn_norm=True, scale_mlp_norm=True, dim=48, heads=3)
    assert error(model, fuse(model)) <= 1e-12


# sizes


@pytest.mark.parametrize("rope", ["dinov3", "mixed", "cat"])
@pytest.mark.parametrize("pos", [False, True])
def test_a_dynamic_model_takes_any_size_and_makes_its_tables_once(
    rope: str, pos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = eva(dynamic_img_size=True, rope_type=rope, rope_rotate_half=rope == "dinov3", use_abs_pos_emb=pos)
    fused = fuse(model)
    assert fused.image_size == (8, 20) and fused.in_chans == 3
    for size in ((8, 20), (16, 12), (4, 4)):
        assert error(model, fused, size) <= 1e-12
    rotary: Any = fused.rotary
    monkeypatch.setattr(type(rotary.rope), "get_embed", None)
    monkeypatch.setattr("vtk.fused.embed.resample_abs_pos_embed", None)
    x = torch.randn(1, 3, 16, 12, dtype=torch.float64)
    with torch.inference_mode():
        assert fused(x).shape == (1, 5) and fused.compute(x, PLANS[1]).shape == (1, 5)


def test_sizes_of_as_many_patches_have_tables_of_their_own_in_fp32_too() -> None:
    model = eva(dynamic_img_size=True, rope_rotate_half=False, rope_type="cat")
    fused = fuse(model, torch.float32)
    for size in ((8, 20), (20, 8), (4, 40), (8, 20)):
        x = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(fused(x).double(), model(x.double()), rtol=0, atol=1e-5)


def test_a_model_that_has_run_computes_in_another_type_with_tables_of_that_type() -> None:
    model, x = eva(), torch.randn(2, 3, 8, 20, dtype=torch.float64)
    fused = fuse(model, torch.float32)
    with torch.no_grad():
        fused(x)
        expected = fuse(model, torch.float32).double()(x)
        torch.testing.assert_close(fused.double()(x), expected, rtol=0, atol=0)
        assert {t.dtype for t in fused.ropes(x)} == {torch.float64}


def test_padded_images_of_any_size() -> None:
    model = eva(dynamic_img_size=True, dynamic_img_pad=True)
    assert error(model, fuse(model), (9, 14)) <= 1e-12


def test_what_was_made_in_inference_mode_serves_gradients_too() -> None:
    fused, x = fuse(eva(dynamic_img_size=True)), torch.randn(1, 3, 12, 8, dtype=torch.float64)
    with torch.inference_mode():
        expected = fused(x).clone()
    x.requires_grad_()
    found = fused(x)
    torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-12)


def test_changed_frequencies_and_positions_are_seen() -> None:
    model = eva(dynamic_img_size=True, rope_type="mixed", rope_rotate_half=False)
    fused, size = fuse(model), (16, 12)
    assert error(model, fused, size) <= 1e-12 and error(model, fused) <= 1e-12
    other = eva(dynamic_img_size=True, rope_type="mixed", rope_rotate_half=False)
    with torch.no_grad():
        other.rope.freqs.mul_(1.5)
        other.pos_embed.add_(1)
    fused.load_state_dict(fuse(other).state_dict())
    assert error(other, fused) <= 1e-12 and error(other, fused, size) <= 1e-12
    with torch.no_grad():  # in place, as CUDA graphs see it
        model.rope.freqs.mul_(0.5)
        fused.rotary.rope.freqs.copy_(model.rope.freqs)  # type: ignore[union-attr]
        other.rope.freqs.copy_(model.rope.freqs)
    assert error(other, fused, size) <= 1e-12


def test_tables_of_many_sizes_are_let_go() -> None:
    fused = fuse(eva(dynamic_img_size=True))
    for i in range(1, MOST + 3):
        fused(torch.zeros(1, 3, 4, 4 * i, dtype=torch.float64))
    assert 0 < len(fused.rotary.sizes) <= MOST  # type: ignore[union-attr]


def test_angles_stay_in_fp32() -> None:
    fused = fuse(eva(), torch.bfloat16)
    rotary: Any = fused.rotary
    assert fused.dtype == torch.bfloat16 and rotary.table.dtype == torch.float32
    assert {t.dtype for t in fused.float().double().rotary.buffers()} == {torch.float64}  # type: ignore[union-attr]


def test_half_precision_is_near_timms() -> None:
    model = eva(swiglu_mlp=True, scale_mlp=True).float()
    x = torch.randn(4, 3, 8, 20)
    with torch.no_grad():
        exact, half = model(x), model.bfloat16()(x.bfloat16()).float()
        fused = fuse(model.float(), torch.bfloat16)
        for plan in PLANS:
            assert (fused.compute(x, plan).float() - exact).norm() <= 2 * (half - exact).norm() + 1e-2 * exact.norm()


# weights, refusals, kernels


def test_a_state_dict_of_one_serves_another() -> None:
    models = [eva(swiglu_mlp=True, qkv_fused=False, num_kv_heads=(3, 1, 3)) for _ in range(2)]
    with torch.no_grad():
        models[1].blocks[0].attn.k_proj.weight.mul_(2)
    fused = fuse(models[0])
    fused.load_state_dict(fuse(models[1]).state_dict())
    assert error(models[1], fused) <= 1e-12
    assert not {name for name in fused.state_dict() if name.endswith(("table", "periods"))}


@pytest.mark.parametrize("kwargs", [{}, {"rope_type": "mixed", "rope_rotate_half": False}])
def test_on_the_meta_device_it_runs_and_takes_no_weights_beside_tables_without_values(kwargs: dict[str, Any]) -> None:
    model = eva(dynamic_img_size=True, **kwargs)
    state = fuse(model).state_dict()
    empty = fuse(model.to("meta"), keep_source=False)
    assert empty(torch.zeros(2, 3, 8, 20, device="meta", dtype=torch.float64)).shape == (2, 5)
    with pytest.raises(UsageError, match=r"tables of `rotary` are in no state dict and have no values there; fuse a"):
        empty.load_state_dict(state, assign=True)


def _other_prefix(model: Any) -> None:
    model.blocks[1].attn.num_prefix_tokens = 1


def _other_pairs(model: Any) -> None:
    model.blocks[1].attn.rotate_half = False


def _other_layout(model: Any) -> None:
    model.rope.rotate_half = False
    model.rope._cache_embed(model.rope.feat_shape)


@pytest.mark.parametrize(
    ("kwargs", "change", "said"),
    [
        ({"use_post_norm": True}, None, r"`blocks.0` \(EvaBlockPostNorm\): its norms stand behind"),
        ({}, _other_prefix, r"`blocks.1.attn` .* leaves 1 tokens unrotated, of a model with 2"),
        ({}, _other_pairs, r"`blocks.1.attn` .* rotates other pairs"),
        ({}, _other_layout, "`rope`: the two channels"),
    ],
)
def test_refusals_name_the_part(kwargs: dict[str, Any], change: Callable[[Any], None] | None, said: str) -> None:
    model = eva(**kwargs)
    if change is not None:
        change(model)
    with pytest.raises(UsageError, match=f"cannot fuse {said}.*"):
        fuse(model)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"embed_dim": 48}, "a rotary embedding"),
        ({"use_rot_pos_emb": False, "scale_attn_inner": True}, "a norm before its second layer"),
        ({"use_rot_pos_emb": False, "swiglu_mlp": True}, "a gated FFN"),
    ],
)
def test_fp8_refuses_what_it_would_leave_out(kwargs: dict[str, Any], said: str) -> None:
    model = fuse(eva(**{"embed_dim": 48, "num_heads": 3, **kwargs}), torch.float32)
    with pytest.raises(UsageError, match=rf"`stages.\d` has {said}, which has no form in fp8; use bf16"):
        to_fp8(model)


@pytest.mark.parametrize(
    ("name", "kwargs", "separate", "folded", "timms"),
    [
        ("vit_base_patch16_dinov3", {"num_classes": 1000}, 89, 66, 321),
        ("eva02_base_patch14_224", {"num_classes": 1000}, 102, 66, 342),
    ],
)
def test_kernels_of_a_forward_pass(name: str, kwargs: dict[str, Any], separate: int, folded: int, timms: int) -> None:
    heads = {"embed_dim": 192, "num_heads": 3}  # the width does not change the count
    model = timm.create_model(name, **heads, **kwargs).eval()
    assert count(model, ln_folded=False).counts.total() == separate
    assert count(model, ln_folded=True).counts.total() == folded
    images = torch.zeros(1, 3, *model.patch_embed.img_size)
    with Counting() as counting, torch.no_grad():
        model(images)
    assert counting.counts.total() == timms


def test_the_first_token_alone_is_computed_where_it_is_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = eva(global_pool="token", swiglu_mlp=True)
    fused = fuse(model)
    assert fused.pruned == 4
    seen: list[tuple[int, ...]] = []
    head = fused.head.forward
    monkeypatch.setattr(fused.head, "forward", lambda h, kernels: seen.append(tuple(h.shape)) or head(h, kernels))
    x: Tensor = torch.randn(2, 3, 8, 20, dtype=torch.float64)
    for plan in PLANS:
        fused.compute(x, plan)
    assert set(seen) == {(2, 1, 24)}

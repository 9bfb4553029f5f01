"""Memory modes of Eva, SwiGLU, RMSNorm, sub-norms and relative positions: gradients of timm's own autograd, in fp64."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import AttentionRope, GluMlp, LayerNorm, SwiGLU
from timm.models.eva import EvaAttention

from tests.vtk.training.engine.test_static_step import Watch, static_step
from tests.vtk.training.test_memory_fused import Count
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.training.engine.precision import Bf16
from vtk.training.finetune_config import MODES
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.objectives.base import Batch
from vtk.training.policies import policy

EVA = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": (48, 32), "num_classes": 3}
ROPE = {**EVA, "use_rot_pos_emb": True, "num_reg_tokens": 2}
SPLIT = {"qkv_fused": False, "attn_type": "rope"}
VIT = {k: v for k, v in EVA.items() if k != "img_size"} | {"img_size": 48}
CASES = {
    "DINOv3": ("vit_small_patch16_dinov3_qkvb", {**EVA, "num_classes": 3}),
    "DINOv3 plus, SwiGLU": ("vit_small_plus_patch16_dinov3", EVA),
    "EVA-02, GluMlp": ("eva02_tiny_patch14_224", {**EVA, "patch_size": 16}),
    "EVA-02, sub-norm": ("eva02_base_patch14_224", {**EVA, "patch_size": 16}),
    "EVA-02 CLIP, two sub-norms": ("eva02_base_patch16_clip_224", EVA),
    "Perception Encoder": ("vit_pe_core_tiny_patch16_384", EVA),
    "RoPE-mixed": ("vit_small_patch16_rope_mixed_224", EVA),
    "Sapiens2": ("vit_base_patch16_sapiens2", {**EVA, "num_heads": 4, "num_kv_heads": (2, 4)}),
    "drop-path": ("vit_small_patch16_dinov3", {**EVA, "drop_path_rate": 0.4}),
    "odd heads of 6 channels, half": ("vit_small_patch16_dinov3", {**EVA, "embed_dim": 40, "num_heads": 5}),
    "BEiT": ("beit_base_patch16_224", VIT),
    "BEiT, shared positions, SwiGLU": (
        "beit_base_patch16_224",
        {**VIT, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True, "swiglu_mlp": True, "scale_mlp": True},
    ),
    "BEiT-3": ("beit3_base_patch16_224", VIT),
    "relative positions": ("vit_relpos_small_patch16_224", {**VIT, "qk_norm": True, "class_token": True}),
    "shared relative positions": ("vit_srelpos_small_patch16_224", VIT),
    "AIMv2": ("aimv2_large_patch14_224", {**VIT, "patch_size": 16}),
    "DINOv2 giant": ("vit_giant_patch14_dinov2", {**VIT, "patch_size": 16}),
    "gate last": ("vit_tiny_patch16_224", {**VIT, "mlp_layer": GluMlp, "act_layer": "silu"}),
    "SwiGLU without bias": (
        "vit_tiny_patch16_224",
        {**VIT, "mlp_layer": SwiGLU, "act_layer": "silu", "proj_bias": False},
    ),
    "CLIP's GELU": ("vit_base_patch32_clip_quickgelu_224", {**VIT, "patch_size": 16}),
    "SigLIP": ("vit_base_patch16_siglip_224", VIT),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT),
    "NaFlex": ("naflexvit_base_patch16_gap", {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 3}),
}  # fmt: skip


def build(name, kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.ndim == 1 or p.shape[0] > 3 * p.shape[-1]:  # also tables of relative positions, which begin at 0
            p.data += 0.2 * torch.randn(p.shape, generator=generator)
    policy.apply(model, policy.select(model, "attn"))
    rope = getattr(model, "rope", None)
    for p in () if rope is None else rope.parameters():
        p.requires_grad_(True)
    policy.train_mode(model)
    return model.double()


def gradients(model, size, mode=None):
    if mode is not None:
        plan = apply_memory_mode(model, mode)
        assert plan.note is None and plan.changed == plan.blocks == 2, plan
    torch.manual_seed(3)
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    loss = F.cross_entropy(model(images), torch.arange(3))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst(found, expected):
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(g.norm()) for g in expected.values())
    return max(float((found[n] - g).norm()) / max(float(g.norm()), floor) for n, g in expected.items())


def cosine(found, expected):
    flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in (found, expected)]
    return float(F.cosine_similarity(*flat, dim=0))


def check(model, size):
    loss, expected = gradients(copy.deepcopy(model), size)
    for mode in MODES:
        own, found = gradients(copy.deepcopy(model), size, mode)
        assert float((own - loss).abs()) < 1e-12, mode
        if mode == "act8":
            assert cosine(found, expected) >= 0.999, mode
        else:
            assert worst(found, expected) <= 1e-12, mode


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_every_mode(case):
    name, kwargs = CASES[case]
    size = kwargs.get("img_size", 48)
    check(build(name, kwargs), size if isinstance(size, tuple) else (size, size))


@pytest.mark.parametrize("placement", ["front", "end"])
def test_context_broadcasting_of_a_gated_ffn_packed_with_its_value_first(placement):
    model = build(*CASES["gate last"])
    add_context_broadcast(model, scale=True, placement=placement, layers="all")
    check(model.double(), (48, 48))


@pytest.mark.parametrize("kind", ["EvaAttention", "AttentionRope"])
@pytest.mark.parametrize("unfused", [False, True])
def test_gated_attention_with_all_options(kind, unfused):
    """Of the attention modules' options, those that no registered model has."""
    model = build("vit_small_patch16_dinov3", EVA).double()
    for block in model.blocks:
        made = {"EvaAttention": EvaAttention, "AttentionRope": AttentionRope}[kind]
        options = {"qkv_fused": False, "num_kv_heads": 1} if kind == "AttentionRope" else {"qkv_bias_separate": True}
        torch.manual_seed(4)
        block.attn = made(
            48, num_heads=3, qk_norm=True, scale_norm=True, norm_layer=LayerNorm, gated=True, num_prefix_tokens=5,
            rotate_half=True, **options,
        ).double()  # fmt: skip
        block.attn.fused_attn = not unfused
        for p in block.attn.parameters():
            if p.ndim == 1:
                p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype)
    check(model, (48, 32))


COMPILED = {
    "EVA-02, sub-norm": "recompute", "EVA-02 CLIP, two sub-norms": "act8", "Sapiens2": "minimal", "BEiT": "minimal",
    "RoPE-mixed": "minimal", "gate last": "recompute", "DINOv3 plus, SwiGLU": "plain",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_models_give_the_same_gradients(case):
    mode, (name, kwargs) = COMPILED[case], CASES[case]
    model = build(name, {**kwargs, "depth": 1} if "num_kv_heads" not in kwargs else kwargs)
    apply_memory_mode(model, mode)
    size = kwargs.get("img_size", 48)
    size = size if isinstance(size, tuple) else (size, size)
    _, expected = gradients(copy.deepcopy(model), size)
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    assert worst(gradients(model, size)[1], expected) <= 1e-12


@pytest.mark.parametrize(
    ("case", "mode"),
    [("DINOv3 plus, SwiGLU", "act8"), ("EVA-02, sub-norm", "recompute"), ("Sapiens2", "minimal"), ("BEiT", "minimal")],
)
def test_a_static_step_looks_at_no_number(case, mode):
    """As a CUDA graph must not: a number that is looked at would be that of the step it was made of."""
    name, kwargs = CASES[case]
    model = build(name, {**kwargs, "drop_path_rate": 0.2}).float()
    apply_memory_mode(model, mode)
    size = kwargs["img_size"]
    size = size if isinstance(size, tuple) else (size, size)
    step = static_step(model, Bf16())
    batch = [Batch(torch.randn(4, 3, *size), torch.arange(4) % 3)]
    step.run(batch)
    with Watch() as watch:
        step.run(batch)
    # BEiT's table is read by whole numbers, which stay where they are; Watch thinks of masks
    assert set(watch.found) <= ({"aten::index.Tensor"} if case == "BEiT" else set()) and len(watch.names) > 30


@pytest.mark.slow
def test_autocast_and_bf16_are_as_exact_as_timms():
    """No farther from fp64 than timm is in the same number format, times two."""
    for case in ("DINOv3 plus, SwiGLU", "Sapiens2", "EVA-02 CLIP, two sub-norms"):
        model = build(*CASES[case])
        size = (48, 32)
        _, exact = gradients(copy.deepcopy(model), size)
        for precision in ("autocast", "bf16"):
            distance = {}
            for mode in (None, *MODES):
                twin = copy.deepcopy(model).float()
                if mode is not None:
                    apply_memory_mode(twin, mode)
                if precision == "bf16":
                    Bf16().prepare(twin, [n for n, p in twin.named_parameters() if p.requires_grad])
                images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                    logits = twin(images.float())
                F.cross_entropy(logits.float(), torch.arange(3)).backward()
                found = {n: p.grad.double() for n, p in twin.named_parameters() if p.grad is not None}
                distance[mode] = 1 - cosine(found, exact)
            assert all(d <= 2 * distance[None] + 1e-3 * (m == "act8") + 1e-5 for m, d in distance.items()), distance


@pytest.mark.slow
def test_bytes_for_swiglu_cost_about_as_much_as_bf16_rounding():
    """At a real width, with and without a sub-norm: what rounding the weights does to the gradients of the blocks."""
    for name in ("vit_small_plus_patch16_dinov3", "eva02_base_patch16_clip_224"):
        torch.manual_seed(0)
        model = timm.create_model(name, embed_dim=384, num_heads=6, depth=2, img_size=(48, 32), num_classes=3)
        for key, p in model.named_parameters():
            if p.ndim > 1 and "blocks" in key:
                torch.nn.init.normal_(p, std=0.05)
            elif "gamma" in key:
                torch.nn.init.ones_(p)
        policy.apply(model.double(), policy.select(model, "attn"))
        rounded = copy.deepcopy(model).bfloat16().double()
        sides = (
            gradients(copy.deepcopy(model), (48, 32)),
            gradients(rounded, (48, 32)),
            gradients(model, (48, 32), "act8"),
        )
        expected, by_rounding, found = ({n: g for n, g in side[1].items() if "blocks" in n} for side in sides)
        assert worst(found, expected) <= min(1.5e-2, 1.5 * worst(by_rounding, expected))
        assert cosine(found, expected) >= 0.9999


def test_blocks_in_a_list_hand_their_norm_on():
    """Eva's blocks stand in a ModuleList: the first norm alone is a pass of its own."""
    name, kwargs = CASES["DINOv3 plus, SwiGLU"]
    model = build(name, kwargs)
    apply_memory_mode(model, "minimal")
    with Count() as count:
        gradients(model, (48, 32))
    assert count.names["vtk_training::normalise"] == 1 and count.names["vtk_training::add_normalise"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["DINOv3", "EVA-02, sub-norm", "Sapiens2", "RoPE-mixed", "BEiT", "AIMv2"])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(case, mode):
    """Gradients of the kernels and of torch's, in bf16, against timm's in fp64."""
    name, kwargs = CASES[case]
    heads = {"num_heads": 4, "num_kv_heads": (2, 4)} if case == "Sapiens2" else {"num_heads": 2}
    model = build(name, {**kwargs, "embed_dim": 128, **heads})
    size = kwargs["img_size"]
    size = size if isinstance(size, tuple) else (size, size)
    _, exact = gradients(copy.deepcopy(model), size)
    model = model.float().cuda()
    apply_memory_mode(model, mode)
    Bf16().prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    policy.train_mode(model)
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    F.cross_entropy(model(images.float().cuda()).float(), torch.arange(3, device="cuda")).backward()
    found = {n: p.grad.double().cpu() for n, p in model.named_parameters() if p.grad is not None}
    assert cosine(found, exact) >= 0.995

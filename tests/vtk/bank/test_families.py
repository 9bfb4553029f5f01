"""Packs of every family of timm's models that a bank holds, of several sizes in one call, against their own models."""

from typing import Any

import pytest

WAYS: dict[str, dict[str, Any]] = {
    "loop": {"fused": False}, "operators": {"kernels": True, "fused": False}, "fused": {},
    "fused operators": {"kernels": True},
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3 with SwiGLU": ("vit_huge_plus_patch16_dinov3", {"mlp_ratio": 2.0}),
    "EVA-02, sub-norm in attention and FFN": ("eva02_base_patch14_224", {"scale_attn_inner": True, "mlp_ratio": 2.0}),
    "EVA-02, SwiGLU packed": ("eva02_tiny_patch14_224", {"mlp_ratio": 2.0, "num_heads": 1}),
    "EVA-02, dynamic size": ("eva02_tiny_patch14_224", {"mlp_ratio": 2.0, "dynamic_img_size": True}),
    "EVA": ("eva_giant_patch14_224", {"mlp_ratio": 2.0}),
    "Perception Encoder": ("vit_pe_core_tiny_patch16_384", {}),
    "RoPE-mixed": ("vit_small_patch16_rope_mixed_224", {}),
    "RoPE-mixed with absolute positions": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "Sapiens2": ("vit_base_patch16_sapiens2", {"num_kv_heads": (2, 1), "mlp_ratio": 2.0}),
    "BEiT": ("beit_base_patch16_224", {}),
    "BEiT, one table for all blocks": (
        "beit_base_patch16_224", {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    ),
    "BEiT, tables of each block and of the model": ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}),
    "BEiT-3": ("beit3_base_patch16_224", {}),
    "relative positions": ("vit_relpos_small_patch16_224", {}),
    "shared relative positions": ("vit_srelpos_small_patch16_224", {}),
    "DeiT with a distillation token": ("deit_tiny_distilled_patch16_224", {}),
    "NaFlexViT": ("naflexvit_base_patch16_gap", {}),
    "NaFlexViT with RoPE and gates": (
        "naflexvit_base_patch16_gap", {"rope_type": "axial", "attn_gated": True, "scale_attn_inner_norm": True},
    ),
    "AIMv2": ("aimv2_large_patch14_224", {}),
    "DINOv2 giant": ("vit_giant_patch14_dinov2", {"mlp_ratio": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_packs_of_several_sizes_are_their_own_models(make_lab: Any, tools: Any, family: str) -> None:
    model, kwargs = FAMILIES[family]
    lab = make_lab(model=model, **kwargs)
    packs = {
        "a": lab.pack("a", seed=1), "b": lab.pack("b", size=(32, 48), classes=1, seed=2),
        "c": lab.pack("c", classes=33, seed=3), "d": lab.pack("d", train="head", seed=4),
    }  # fmt: skip
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in WAYS.values():
        bank = lab.bank(packs, **way)
        assert tools.worst_error(bank, tools.random_batch(bank, {"b": 1, "a": 2, "d": 1, "c": 1}), models) <= 1e-12


TOKENS: dict[str, tuple[str, dict[str, Any]]] = {
    "dist_token": ("deit_tiny_distilled_patch16_224", {}), "reg_token": ("vit_small_patch16_dinov3", {}),
    "embeds.cls_token": ("naflexvit_base_patch16_gap", {"class_token": True}),
}  # fmt: skip


@pytest.mark.parametrize("key", TOKENS)
def test_tokens_that_are_no_patches_are_a_task_s_own(make_lab: Any, tools: Any, key: str) -> None:
    model, kwargs = TOKENS[key]
    lab = make_lab(model=model, **kwargs)
    packs = {"a": lab.pack("a", seed=1), "b": lab.pack("b", seed=2, change={key: lambda t: t + 1})}
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in ("loop", "fused"):
        bank = lab.bank(packs, **WAYS[way])
        assert tools.worst_error(bank, tools.random_batch(bank, {"a": 1, "b": 1}), models) <= 1e-12

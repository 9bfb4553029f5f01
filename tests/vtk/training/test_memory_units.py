"""What blocks keep for backward, as a formula in the hidden ratio ρ, against the count by autograd's own hook."""

import pytest
import timm
from timm.layers import LayerNormFp32, SwiGLU

from tests.vtk.training.test_memory_families import CASES
from vtk.models.meta_model import shapes_only
from vtk.training.finetune_config import MODES, FinetuneConfig
from vtk.training.frozen_ffn import apply_memory_mode, obstacles
from vtk.training.frozen_ffn.estimate import footprints
from vtk.training.frozen_ffn.formula import kept_units
from vtk.training.policies import policy

WIDE = {"embed_dim": 384, "num_heads": 6, "depth": 1}
FORMULAS = {
    "DINOv3": ("6 + ρ", "6 + 0.5ρ", "6", "3"),
    "DINOv3 plus, SwiGLU": ("6 + 3ρ", "6 + 1.06ρ", "6", "3"),
    "EVA-02, sub-norm": ("6 + 4ρ", "6 + 2.06ρ", "6", "3"),
    "EVA-02 CLIP, two sub-norms": ("7 + 4ρ", "7 + 2.06ρ", "7", "4"),
    "Sapiens2": ("5 + 3ρ", "5 + 1.06ρ", "5", "3"),
    "BEiT": ("6 + ρ", "6 + 0.5ρ", "6", "3"),
    "BEiT-3": ("7 + 2ρ", "7 + 1.5ρ", "7", "4"),
    "AIMv2": ("6 + 3ρ", "6 + 1.06ρ", "6", "3"),
    "relative positions": ("6 + ρ", "6 + 0.5ρ", "6", "3"),
}
TRAINED = {
    "DINOv3": "13 + 2ρ", "EVA-02, sub-norm": "9 + 5ρ", "DINOv2 giant": "10 + 4ρ", "BEiT-3": "9 + 3ρ",
    "SwiGLU without bias": "8 + 4ρ",
}  # fmt: skip


def build(case, train):
    name, kwargs = CASES[case]
    more = {"num_heads": 6, "num_kv_heads": 3} if case == "Sapiens2" else {}
    with shapes_only():
        model = timm.create_model(name, **{**kwargs, **WIDE, **more})
    policy.apply(model, policy.select(model, train))
    size = kwargs.get("img_size", 48)
    return model, (3, *(size if isinstance(size, tuple) else (size, size)))


FEW = ("DINOv3 plus, SwiGLU", "EVA-02 CLIP, two sub-norms", "Sapiens2")


@pytest.mark.parametrize("case", [c if c in FEW else pytest.param(c, marks=pytest.mark.slow) for c in FORMULAS])
def test_frozen_blocks_keep_what_is_derived(case):
    model, size = build(case, "attn")
    counted = footprints(model, size, "bf16")
    assert tuple(str(f.formula) for f in counted) == FORMULAS[case]
    counted += [] if case in FEW else footprints(model, size, "fp32")
    for found in counted:
        assert found.units == pytest.approx(found.formula.total, rel=0.01), (found.mode, str(found.formula))


@pytest.mark.parametrize("case", ["DINOv3", *(pytest.param(c, marks=pytest.mark.slow) for c in list(TRAINED)[1:])])
def test_trained_blocks_keep_what_is_derived(case):
    """A trained gated FFN keeps its product and its input besides gate, value and SiLU(gate)."""
    model, size = build(case, "full")
    (found,) = footprints(model, size, "bf16", modes=("plain",))
    assert str(found.formula) == TRAINED[case]
    assert found.units == pytest.approx(found.formula.total, rel=0.01)


def test_nothing_is_derived_for_what_is_not_known(tiny):
    from vtk.models.transforms.context_layers import add_context_broadcast

    for kwargs in ({"proj_drop_rate": 0.1}, {"act_layer": "relu"}, {"attn_drop_rate": 0.1}):
        model = tiny(**kwargs)
        policy.apply(model, policy.select(model, "attn"))
        apply_memory_mode(model, "plain")
        assert kept_units(model, model.pos_embed.dtype) is None, kwargs
    model = tiny()
    add_context_broadcast(model)
    assert kept_units(model, model.pos_embed.dtype) is None


def test_which_models_follow_every_mode():
    for name, kwargs, words in (
        ("vit_small_plus_patch16_dinov3", {}, None),
        ("beit_base_patch16_224", {}, None),
        ("vit_tiny_patch16_224", {"mlp_layer": SwiGLU}, "gates are GELU, and 8 bits are for SiLU's"),
        ("vit_tiny_patch16_224", {"act_layer": "relu"}, "activations are ReLU"),
        ("vit_tiny_patch16_224", {"norm_layer": LayerNormFp32}, "norms are LayerNormFp32"),
        ("eva02_tiny_patch14_224", {"use_post_norm": True}, "Eva has no block the engine knows"),
        ("vit_dwee_patch16_reg1_gap_256", {}, "attention is DiffAttention"),
    ):
        with shapes_only():
            model = timm.create_model(name, num_classes=3, depth=1, **kwargs)
        policy.apply(model, policy.select(model, "attn"))
        found = obstacles(model)
        assert (not found) if words is None else any(words in why for why in found), (name, found)


def test_the_8_bits_have_the_name_of_before_too(tiny):
    assert FinetuneConfig(data="x", memory="gelu8").memory == "act8" in MODES
    assert FinetuneConfig.upgrade({"memory": "gelu8"}) == {"memory": "act8"}
    model = tiny()
    policy.apply(model, policy.select(model, "attn"))
    assert apply_memory_mode(model, "gelu8").mode == "act8"

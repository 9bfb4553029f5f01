"""What transformers writes, opened by vtk: the tokens of its models with random weights."""

import numpy as np
import pytest
import torch

from vtk.models.create import build_model

pytestmark = pytest.mark.peers

SMALL = {"embed_dim": 32, "num_heads": 2, "depth": 2}
MAKE = """
import torch, transformers
torch.manual_seed(0)
shape = dict(hidden_size=32, num_attention_heads=2, num_hidden_layers=2)
model = {call}
for parameter in model.parameters():
    parameter.data = torch.randn(parameter.shape) * 0.2
model.eval().save_pretrained("theirs")
with torch.no_grad():
    logits = model.double()(torch.from_numpy(images).double()).last_hidden_state.numpy()
"""
V3 = "transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**shape, num_register_tokens=4, {}))"
V2 = "transformers.Dinov2{0}Model(transformers.Dinov2{0}Config(**shape, image_size=32, patch_size=16, {1}))"
CASES = {
    "DINOv3": (V3.format("intermediate_size=128"), "vit_small_patch16_dinov3_qkvb", {}),
    "gated DINOv3": (
        V3.format("intermediate_size=64, use_gated_mlp=True, hidden_act='silu'"), "vit_small_plus_patch16_dinov3_qkvb",
        {"mlp_ratio": 2.0},
    ),
    "DINOv3 without biases": (
        V3.format("intermediate_size=128, query_bias=False, value_bias=False"), "vit_base_patch16_dinov3", {},
    ),
    "DINOv2": (V2.format("", ""), "vit_small_patch14_dinov2", {"patch_size": 16}),
    "DINOv2 with SwiGLU": (
        V2.format("", "use_swiglu_ffn=True"), "vit_giant_patch14_dinov2", {"patch_size": 16, "mlp_ratio": 5.5},
    ),
    "DINOv2 with registers": (V2.format("WithRegisters", ""), "vit_small_patch14_reg4_dinov2", {"patch_size": 16}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_transformers_saved_computes_its_tokens(foreign, images, tmp_path, case):
    call, name, kwargs = CASES[case]
    wanted = foreign(MAKE.format(call=call))
    created = build_model(name, num_classes=0, img_size=32, weights=tmp_path / "theirs", kwargs={**SMALL, **kwargs})
    with torch.no_grad():
        found = created.model.double().eval().forward_features(torch.from_numpy(images).double()).numpy()
    # both keep the rotary table in fp32; the class token plus its position is rounded to fp32 here
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)

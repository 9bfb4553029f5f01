"""Real weights, whose norms and LayerScale span decades, on real photographs."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vtk.fused import fuse
from vtk.fused.stages import Plan
from vtk.models.create import build_model


def rms(value: Tensor) -> float:
    return float(value.double().pow(2).mean().sqrt())


@pytest.mark.assets
def test_folding_real_weights_costs_no_precision(assets: Path) -> None:
    created = build_model(
        "vit_small_patch14_dinov2", num_classes=10, img_size=56, weights=assets / "dinov2_vits14_fp16.safetensors"
    )
    model = created.model.eval()
    nn.init.normal_(model.head.weight, std=0.05)
    files = sorted((assets / "cifar10-mini" / "val").rglob("*.*"))[::125]
    pixels = [np.array(Image.open(f).convert("RGB").resize((56, 56), Image.Resampling.BICUBIC)) for f in files]
    x = (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).double() / 255 - 0.45) / 0.22
    with torch.no_grad():
        expected = model.double()(x)
        # of a CPU; of CUDA, with norms of their own and with folded ones, by the references of their operations
        plans = (None, Plan(kernels=True), Plan(kernels=True, ln_folded=True))
        fused = fuse(model)
        for plan in plans:
            assert (fused.compute(x, plan) - expected).abs().max() <= 1e-12 * expected.abs().max()
        model.float()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            fused = fuse(model, dtype)
            plain = copy.deepcopy(model).to(dtype)(x.to(dtype))
            for plan in plans:
                error = rms(fused.compute(x.to(dtype), plan) - expected)
                assert error <= 2 * rms(plain - expected), (dtype, plan)

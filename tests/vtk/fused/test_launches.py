"""Kernels per forward pass."""

import pytest
import timm
import torch

from vtk.fused import count_launches, fuse, launches
from vtk.fused.counting import Counting, count
from vtk.models.context_layers import add_context_broadcast


@pytest.mark.parametrize(
    ("name", "fused", "eager"), [("vit_small_patch16_18x2_224", 130, 473), ("vit_base_patch16_224", 88, 125)]
)
def test_launches_of_a_forward_pass(name: str, fused: int, eager: int) -> None:
    kwargs = {"embed_dim": 192, "num_heads": 3}  # the width does not change the count
    model = timm.create_model(name, **kwargs).eval()
    assert count_launches(model) == fused
    images = torch.zeros(1, 3, 224, 224)
    with torch.no_grad(), Counting() as counting:
        model(images)
    assert sum(counting.counts.values()) == eager


def test_what_is_launched() -> None:
    counts = launches(timm.create_model("vit_tiny_patch16_224"))
    assert counts == {
        "patchify": 1, "mm": 1, "addmm": 3 * 12 + 1, "packed_attention": 12, "add_norm": 1 + 24, "linear_gelu": 12,
    }  # fmt: skip


@pytest.mark.parametrize("scale", [False, True])
def test_a_layer_with_context_broadcasting_costs_one_launch_and_one_pass(scale: bool) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    plain = count(model)
    # in the last block the class token's row alone would do without it; with it, all rows are needed
    add_context_broadcast(model, scale=scale, layers=[0, 1, 2])
    found = count(model)
    assert found.counts.total() == plain.counts.total() + 3
    # in units of tokens · channels: x, m → y and y → x̂ in place of x, m → y, x̂
    units = (found.moved.total() - plain.moved.total()) / 3 / (197 * 192)
    assert 1 <= units <= 1.05


def test_an_ungraphed_model_on_the_cpu_needs_no_kernel() -> None:
    model = timm.create_model("test_vit").eval()
    fused = fuse(model)
    with torch.no_grad(), Counting() as counting:
        fused(torch.zeros(1, 3, *model.patch_embed.img_size))
    assert not any("vtk" in name for name in counting.counts)
    assert sum(counting.counts.values()) > 0

"""Kernels per forward pass, of both forms of the CUDA plan."""

from typing import Any

import pytest
import timm
import torch
from timm.layers import SwiGLU
from timm.models.vision_transformer import ParallelScalingBlock

from vtk.fused import count_launches, fuse, launches
from vtk.fused.kernel_count import Counting, count
from vtk.models.transforms.context_layers import add_context_broadcast


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


@pytest.mark.parametrize(
    ("name", "most", "blocks"),
    [
        pytest.param("vit_small_patch16_18x2_224", 95, 18, marks=pytest.mark.slow),
        pytest.param("vit_base_patch16_18x2_224", 95, 18, marks=pytest.mark.slow),
        ("vit_base_patch16_224", 65, 12),
    ],
)  # fmt: skip
def test_launches_of_the_folded_form(name: str, most: int, blocks: int) -> None:
    model = timm.create_model(name, embed_dim=192, num_heads=3).eval()
    assert 5 * blocks < count_launches(model, ln_folded=True) <= most
    assert count_launches(model, ln_folded=False) == count_launches(model) > most


def test_what_is_launched_in_the_folded_form() -> None:
    """Five a block; the first reads what the embedding normalised, and the last ends with the head's norm."""
    counts = launches(timm.create_model("vit_tiny_patch16_224"), ln_folded=True)
    assert counts == {
        "patchify": 1, "mm": 1, "add_norm": 1 + 1, "addmm": 1 + 1 + 1, "linear": 11, "packed_attention": 12,
        "linear_residual": 23, "linear_gelu_stats": 12,
    }  # fmt: skip


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("on", ["mlp", "both"])
def test_context_broadcasting_costs_one_launch_and_two_passes_in_the_folded_form(scale: bool, on: str) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    plain = count(model, ln_folded=True)
    add_context_broadcast(model, scale=scale, on=on, layers=[0, 1, 2])
    found = count(model, ln_folded=True)
    places = 6 if on == "both" else 3
    assert found.counts["context_broadcast_stats"] == places
    assert found.counts.total() == plain.counts.total() + places
    # in units of tokens · channels: the product's m is written, and read again beside x
    units = (found.moved.total() - plain.moved.total()) / places / (197 * 192)
    assert 2 <= units <= 2.05


def _choosing(monkeypatch: pytest.MonkeyPatch, answer: str) -> list[tuple[Any, ...]]:
    """Let a measurement choose ``answer`` for the form; return what will be asked."""
    asked: list[tuple[Any, ...]] = []

    def choose(op: str, *shape: Any) -> str:
        if op != "ln_folded":
            return {"linear_gelu": "triton", "splitk_linear": "aten", "residual": "separate"}[op]
        asked.append(shape)
        return answer

    for module in ("model", "stage_output", "mlp_stage"):
        monkeypatch.setattr(f"vtk.fused.{module}.choose", choose)
    return asked


@pytest.mark.parametrize(
    ("kwargs", "shape"),
    [
        ({}, (3 * 197, 192, 768)),
        ({"reg_tokens": 4, "mlp_ratio": 1.5}, (3 * 201, 192, 288)),
        ({"norm_layer": "rmsnorm", "mlp_layer": SwiGLU}, (3 * 197, 192, 768)),
        ({"block_fn": ParallelScalingBlock, "mlp_ratio": 1.5}, (3 * 197, 192, 288)),
        ({"parallel": True}, (3 * 197, 192, 1536)),
    ],
)
def test_the_quicker_form_is_taken_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    """Of these tokens, channels and hidden columns of all branches."""
    name = "vit_small_patch16_18x2_224" if kwargs.pop("parallel", None) else "vit_tiny_patch16_224"
    model = timm.create_model(name, **{"embed_dim": 192, "num_heads": 3, "depth": 2, **kwargs})
    forms = {folded: launches(model, batch=3, ln_folded=folded) for folded in (False, True)}
    for answer, folded in (("folded", True), ("separate", False)):
        asked = _choosing(monkeypatch, answer)
        assert launches(model, batch=3) == forms[folded]
        assert asked == [(*shape, torch.bfloat16, None)]
        assert launches(model, batch=3, ln_folded=not folded) == forms[not folded]  # what was said is not measured
        assert len(asked) == 1


@pytest.mark.parametrize("kind", ["front", "front of the first stage"])
def test_a_model_with_a_stage_that_needs_norms_has_no_choice(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    on = "mlp" if kind == "front" else "msa"
    add_context_broadcast(model, placement="front", on=on, layers=[0])
    asked = _choosing(monkeypatch, "folded")
    found = launches(model)
    if kind == "front of the first stage":  # what it reads comes normalised from the embedding
        assert len(asked) == 1 and found["linear_residual"]
    else:
        assert not asked and not found["linear_residual"]
    if kind == "front":  # by force: attention of block 0 hands on normalised tokens, and all others do not
        forced = launches(model, ln_folded=True)
        assert (forced["add_norm"], forced["linear_residual"], forced["linear_gelu"]) == (3, 2, 1)


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

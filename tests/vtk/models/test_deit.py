"""deit's parallel weights, against its forward pass written out from the formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from vtk.models.create import build_model
from vtk.models.weights.deit import is_deit

WIDTH, HEADS, SIDE, CLASSES = 32, 2, 32, 3
KWARGS: dict[str, Any] = {"embed_dim": WIDTH, "num_heads": HEADS}


def weights(scaled: bool) -> dict[str, Tensor]:
    """Random weights under deit's names: two blocks of two branches, a table without an entry for the class token."""
    c, shapes = WIDTH, {}
    for i in range(2):
        for norm in ("norm1", "norm11", "norm2", "norm21"):
            shapes |= {f"blocks.{i}.{norm}.weight": (c,), f"blocks.{i}.{norm}.bias": (c,)}
        for attn in ("attn", "attn1"):
            shapes |= {f"blocks.{i}.{attn}.qkv.weight": (3 * c, c), f"blocks.{i}.{attn}.qkv.bias": (3 * c,)}
            shapes |= {f"blocks.{i}.{attn}.proj.weight": (c, c), f"blocks.{i}.{attn}.proj.bias": (c,)}
        for mlp in ("mlp", "mlp1"):
            shapes |= {f"blocks.{i}.{mlp}.fc1.weight": (4 * c, c), f"blocks.{i}.{mlp}.fc1.bias": (4 * c,)}
            shapes |= {f"blocks.{i}.{mlp}.fc2.weight": (c, 4 * c), f"blocks.{i}.{mlp}.fc2.bias": (c,)}
        if scaled:
            shapes |= {f"blocks.{i}.gamma_{g}": (c,) for g in ("1", "1_1", "2", "2_1")}
    shapes |= {"cls_token": (1, 1, c), "pos_embed": (1, (SIDE // 16) ** 2, c), "norm.weight": (c,), "norm.bias": (c,)}
    shapes |= {"patch_embed.proj.weight": (c, 3, 16, 16), "patch_embed.proj.bias": (c,)}
    shapes |= {"head.weight": (CLASSES, c), "head.bias": (CLASSES,)}
    generator = torch.Generator().manual_seed(1)
    return {k: torch.randn(shape, generator=generator) * 0.3 for k, shape in shapes.items()}


def deit_forward(w: dict[str, Tensor], images: Tensor) -> Tensor:
    """deit's model of parallel blocks: x + γ₁·attn(norm1 x) + γ₁₁·attn1(norm11 x), then the FFNs alike."""
    w = {k: v.double() for k, v in w.items()}
    patches = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    x = patches @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"] + w["pos_embed"]
    x = torch.cat((w["cls_token"].expand(len(x), -1, -1), x), 1)

    def norm(x: Tensor, key: str) -> Tensor:
        return layer_norm(x, (WIDTH,), w[f"{key}.weight"], w[f"{key}.bias"], eps=1e-6)

    def attend(x: Tensor, key: str) -> Tensor:
        b, n, c = x.shape
        q, k, v = (x @ w[f"{key}.qkv.weight"].T + w[f"{key}.qkv.bias"]).view(b, n, 3, HEADS, c // HEADS).unbind(2)
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * (c // HEADS) ** -0.5
        y = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).reshape(b, n, c)
        return y @ w[f"{key}.proj.weight"].T + w[f"{key}.proj.bias"]

    def feed(x: Tensor, key: str) -> Tensor:
        hidden = gelu(x @ w[f"{key}.fc1.weight"].T + w[f"{key}.fc1.bias"])
        return hidden @ w[f"{key}.fc2.weight"].T + w[f"{key}.fc2.bias"]

    for i in range(2):
        p = f"blocks.{i}."
        g = {name: w.get(f"{p}gamma_{name}", torch.ones(())) for name in ("1", "1_1", "2", "2_1")}
        first, second = attend(norm(x, f"{p}norm1"), f"{p}attn"), attend(norm(x, f"{p}norm11"), f"{p}attn1")
        x = x + g["1"] * first + g["1_1"] * second
        x = x + g["2"] * feed(norm(x, f"{p}norm2"), f"{p}mlp") + g["2_1"] * feed(norm(x, f"{p}norm21"), f"{p}mlp1")
    return norm(x, "norm")[:, 0] @ w["head.weight"].T + w["head.bias"]


@pytest.mark.parametrize("scaled", [True, False], ids=["LayerScale", "plain"])
@pytest.mark.parametrize("extra", [{}, {"no_embed_class": True}], ids=["timm's table", "deit's table"])
def test_a_parallel_checkpoint_of_deit_computes_what_it_did(tmp_path: Path, scaled: bool, extra: dict) -> None:
    w = weights(scaled)
    torch.save({"model": w}, tmp_path / "deit.pth")
    kwargs = {**KWARGS, **extra, **({} if scaled else {"init_values": 0})}
    created = build_model(
        "vit_small_patch16_2x2_224", num_classes=CLASSES, img_size=SIDE, weights=tmp_path / "deit.pth", kwargs=kwargs
    )
    images = torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64)
    with torch.no_grad():
        logits = created.model.double().eval()(images)
    torch.testing.assert_close(logits, deit_forward(w, images), rtol=1e-10, atol=1e-12)
    told = "the position table of deit.pth has no entry for the class token, as in deit: 0 is used"
    assert created.notes == ([] if extra else [told])


def test_the_table_of_a_sequential_deit_model_is_padded_too(tmp_path: Path) -> None:
    w = {
        k: v
        for k, v in weights(True).items()
        if not any(s in k for s in ("norm11", "attn1", "norm21", "mlp1", "_1_1", "_2_1"))
    }
    assert is_deit(w)
    save_file(w, tmp_path / "deit.safetensors")
    created = build_model(
        "vit_small_patch16_2x1_224", num_classes=CLASSES, img_size=SIDE, weights=tmp_path / "deit.safetensors",
        kwargs=KWARGS,
    )  # fmt: skip
    state = created.model.state_dict()
    assert torch.equal(state["pos_embed"], torch.cat((torch.zeros(1, 1, WIDTH), w["pos_embed"]), 1))
    assert torch.equal(state["blocks.1.ls2.gamma"], w["blocks.1.gamma_2"])


def test_timms_own_names_are_not_taken_for_deits() -> None:
    created = build_model("vit_small_patch16_2x2_224", num_classes=2, pretrained=False, img_size=32, kwargs=KWARGS)
    assert not is_deit(created.model.state_dict())

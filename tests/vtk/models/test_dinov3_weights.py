"""Files of Meta's DINOv3 code, against its forward pass written out from the formulas in fp64."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

from vtk.errors import DataError
from vtk.models.create import build_model
from vtk.models.meta_model import shapes_only
from vtk.models.weights.dinov3 import convert

WIDTH, HEADS, DEPTH, REGISTERS, HIDDEN = 32, 2, 2, 4, 64
QUARTER = WIDTH // HEADS // 4
PERIODS = 100.0 ** (torch.arange(QUARTER, dtype=torch.float64) / QUARTER)
KWARGS: dict[str, Any] = {"embed_dim": WIDTH, "num_heads": HEADS, "depth": DEPTH}


def shapes(depth: int, c: int, hidden: int, heads: int, *, gated: bool, bias: bool, local_norm: bool = False) -> dict:
    """Names and shapes of a state dict of Meta's code, patches of 16 px."""
    found = {"cls_token": (1, 1, c), "storage_tokens": (1, REGISTERS, c), "mask_token": (1, c)}
    found |= {"patch_embed.proj.weight": (c, 3, 16, 16), "patch_embed.proj.bias": (c,)}
    found |= {"rope_embed.periods": (c // heads // 4,), "norm.weight": (c,), "norm.bias": (c,)}
    if local_norm:
        found |= {"local_cls_norm.weight": (c,), "local_cls_norm.bias": (c,)}
    ffn = (
        {"w1": (hidden, c), "w2": (hidden, c), "w3": (c, hidden)} if gated else {"fc1": (hidden, c), "fc2": (c, hidden)}
    )
    for i in range(depth):
        p = f"blocks.{i}."
        for name, shape in {"attn.proj": (c, c), **{f"mlp.{k}": v for k, v in ffn.items()}}.items():
            found |= {f"{p}{name}.weight": shape, f"{p}{name}.bias": shape[:1]}
        for norm in ("norm1", "norm2"):
            found |= {f"{p}{norm}.weight": (c,), f"{p}{norm}.bias": (c,)}
        found |= {f"{p}ls1.gamma": (c,), f"{p}ls2.gamma": (c,), f"{p}attn.qkv.weight": (3 * c, c)}
        if bias:
            found |= {f"{p}attn.qkv.bias": (3 * c,), f"{p}attn.qkv.bias_mask": (3 * c,)}
    return found


def weights(*, gated: bool = False, bias: bool = True) -> dict[str, Tensor]:
    """Random weights; the biases of the keys are not zero, but masked."""
    generator = torch.Generator().manual_seed(1)
    found = {k: torch.randn(s, generator=generator) * 0.3
             for k, s in shapes(DEPTH, WIDTH, HIDDEN, HEADS, gated=gated, bias=bias).items()}  # fmt: skip
    found["rope_embed.periods"] = PERIODS.float()
    for key in found:
        if key.endswith("bias_mask"):
            found[key] = torch.ones(3, WIDTH).index_fill(0, torch.tensor(1), 0).flatten()
    return found


def forward(w: dict[str, Tensor], images: Tensor) -> Tensor:
    """DINOv3's normalised tokens (B, 1 + registers + patches, C) of images (B, 3, H, W)."""
    w = {k: v.double() for k, v in w.items()}
    b, size = len(images), (images.shape[2] // 16, images.shape[3] // 16)
    patches = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    patches = patches @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    x = torch.cat((w["cls_token"].expand(b, -1, -1), w["storage_tokens"].expand(b, -1, -1), patches), 1)
    rows, columns = (2 * (torch.arange(n, dtype=torch.float64) + 0.5) / n - 1 for n in size)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)
    angles = (2 * torch.pi * places[:, :, None] / PERIODS).flatten(1).tile(2)

    def norm(x: Tensor, key: str) -> Tensor:
        return layer_norm(x, (WIDTH,), w[f"{key}.weight"], w[f"{key}.bias"], eps=1e-5)

    def turn(t: Tensor) -> Tensor:
        kept, t = t[:, :, : 1 + REGISTERS], t[:, :, 1 + REGISTERS :]
        one, two = t.chunk(2, -1)
        return torch.cat((kept, t * angles.cos() + torch.cat((-two, one), -1) * angles.sin()), 2)

    def linear(x: Tensor, key: str) -> Tensor:
        return x @ w[f"{key}.weight"].T + w.get(f"{key}.bias", 0.0) * w.get(f"{key}.bias_mask", 1.0)

    for i in range(DEPTH):
        p = f"blocks.{i}."
        q, k, v = linear(norm(x, f"{p}norm1"), f"{p}attn.qkv").unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = turn(q) @ turn(k).mT * (WIDTH // HEADS) ** -0.5
        x = x + w[f"{p}ls1.gamma"] * linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{p}attn.proj")
        h = norm(x, f"{p}norm2")
        if f"{p}mlp.w1.weight" in w:
            h = linear(silu(linear(h, f"{p}mlp.w1")) * linear(h, f"{p}mlp.w2"), f"{p}mlp.w3")
        else:
            h = linear(gelu(linear(h, f"{p}mlp.fc1")), f"{p}mlp.fc2")
        x = x + w[f"{p}ls2.gamma"] * h
    return norm(x, "norm")


def create(folder: Path, w: dict[str, Tensor], model: str, size: tuple[int, int] = (32, 32), **kwargs: Any):
    torch.save(w, folder / "meta.pth")
    ratio = HIDDEN / WIDTH
    return build_model(
        model,
        num_classes=3,
        img_size=size,
        weights=folder / "meta.pth",
        kwargs={**KWARGS, "mlp_ratio": ratio, **kwargs},
    )


@pytest.mark.parametrize(
    ("model", "gated", "bias"),
    [
        ("vit_small_patch16_dinov3_qkvb", False, True),
        ("vit_small_plus_patch16_dinov3_qkvb", True, True),
        ("vit_7b_patch16_dinov3", True, False),
        ("vit_base_patch16_dinov3_qkvb", False, False),
    ],
    ids=["S", "S+", "7B", "biases of zero"],
)
@pytest.mark.parametrize("size", [(32, 80), pytest.param((32, 32), marks=pytest.mark.slow)], ids=["wide", "square"])
def test_a_file_of_meta_computes_what_it_did(tmp_path: Path, model: str, gated: bool, bias: bool, size: Any) -> None:
    w = weights(gated=gated, bias=bias)
    created = create(tmp_path, w, model, size)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        tokens = created.model.double().eval().forward_features(images)
    # timm's rotary table is fp32
    torch.testing.assert_close(tokens, forward(w, images), rtol=1e-5, atol=1e-5)
    ignored = "ignored 1 tensor of meta.pth that `" + model + "` does not have: mask_token"
    assert created.notes == [ignored, "new classifier `head` for 3 classes (the weights have no classifier)"]


def test_a_checkpoint_of_dinov3s_training_is_read_and_its_heads_are_named(tmp_path: Path) -> None:
    plain = create(tmp_path, weights(), "vit_small_patch16_dinov3_qkvb")
    w = {f"backbone.{k}": v for k, v in weights().items()} | {"dino_head.mlp.0.weight": torch.zeros(2, 2)}
    created = create(tmp_path, {"teacher": w}, "vit_small_patch16_dinov3_qkvb")
    assert created.base.ref.id == plain.base.ref.id
    assert "ignored 2 tensors" in created.notes[0] and "dino_head.mlp.0.weight" in created.notes[0]


def test_biases_of_zero_fit_the_model_without_them(tmp_path: Path) -> None:
    w = {k: torch.zeros_like(v) if k.endswith("qkv.bias") else v for k, v in weights().items()}
    created = create(tmp_path, w, "vit_base_patch16_dinov3")
    assert torch.equal(created.model.state_dict()["blocks.1.attn.qkv.weight"], w["blocks.1.attn.qkv.weight"])


def test_rounded_periods_are_told(tmp_path: Path) -> None:
    w = weights() | {"rope_embed.periods": PERIODS.bfloat16()}
    assert (
        "`rope_embed.periods` of meta.pth is rounded (by up to 0."
        in create(tmp_path, w, "vit_small_patch16_dinov3_qkvb").notes[0]
    )


BIAS, MASK = "blocks.1.attn.qkv.bias", "blocks.1.attn.qkv.bias_mask"


QKVB = "vit_small_patch16_dinov3_qkvb"


@pytest.mark.parametrize(
    ("change", "model", "kwargs", "message"),
    [
        ({}, QKVB.removesuffix("_qkvb"), {}, rf"is not zero, and `\w+` has no biases of q and v; use --model {QKVB}$"),
        ({MASK: None}, QKVB, {}, "biases of the keys that are not masked"),
        ({MASK: torch.full((96,), float("nan"))}, QKVB, {}, "other values than 0 and 1"),
        ({BIAS: torch.ones(95), MASK: None}, QKVB, {}, "not one vector for q, k and v"),
        ({"rope_embed.periods": PERIODS**1.1}, QKVB, {}, "--model-kwargs rope_temperature=NUMBER"),
        ({"blocks.1.gamma_1": torch.ones(32)}, QKVB, {}, r"has `blocks\.1\.gamma_1` twice, under two names"),
        ({}, QKVB, {"num_heads": 4}, "its num_heads"),
        ({}, QKVB, {"depth": 3}, "is --model right"),
        ({}, QKVB, {"depth": 1}, r"does not have, such as `blocks\.1"),
        ({}, "vit_small_patch16_224", {"depth": 2}, "is --model right"),
    ],
    ids=["biases", "no mask", "mask of NaN", "bias", "rotary base", "two names", "heads", "deeper", "less deep",
         "other model"],
)  # fmt: skip
def test_what_would_compute_something_else_is_refused(
    tmp_path: Path, change: dict, model: str, kwargs: dict, message: str
) -> None:
    w = {k: v for k, v in {**weights(), **change}.items() if v is not None}
    with pytest.raises(DataError, match=message) as caught:
        create(tmp_path, w, model, **kwargs)
    assert "\n" not in str(caught.value) and "meta.pth" in str(caught.value)


# depth, width, heads, hidden width of Meta's published models; a SwiGLU's is ⅔ of its ratio times the width
SIZES = {
    "vit_small_patch16_dinov3_qkvb": (12, 384, 6, 1536, False),
    "vit_base_patch16_dinov3_qkvb": (12, 768, 12, 3072, False),
    "vit_small_plus_patch16_dinov3_qkvb": (12, 384, 6, 1536, True),
    "vit_large_patch16_dinov3_qkvb": (24, 1024, 16, 4096, False),
    "vit_huge_plus_patch16_dinov3_qkvb": (32, 1280, 20, 5120, True),
    "vit_7b_patch16_dinov3": (40, 4096, 32, 8192, True),
}


@pytest.mark.parametrize(
    "model", [name if "7b" in name else pytest.param(name, marks=pytest.mark.slow) for name in SIZES]
)
def test_every_size_of_dinov3_has_a_place_for_every_tensor(model: str) -> None:
    depth, width, heads, hidden, gated = SIZES[model]
    wanted = shapes(
        depth, width, hidden, heads, gated=gated, bias=model.endswith("qkvb"), local_norm=not model.endswith("qkvb")
    )
    w = {k: torch.zeros(()).expand(s) for k, s in wanted.items()}  # no memory
    quarter = width // heads // 4
    w["rope_embed.periods"] = 100.0 ** (torch.arange(quarter) / quarter)
    with shapes_only():
        reference = timm.create_model(model, num_classes=0)
    found, notes = convert(w, reference, model, Path("meta.pth"))
    own = {k: tuple(v.shape) for k, v in reference.state_dict().items()}
    assert {k: tuple(v.shape) for k, v in found.items() if k in own} == own and not notes
    assert found.keys() - own.keys() == {"mask_token"} | {k for k in w if k.startswith("local_cls_norm")}

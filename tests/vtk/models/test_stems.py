"""Stems against formulas written out patch by patch, timm's own modules, and the papers' counts."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image
from timm.models.volo import PatchEmbed as VoloEmbed
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vtk.errors import UsageError
from vtk.models.meta_model import shapes_only
from vtk.models.stems import PATCHWISE, STEMS, ScaledReLU, Stem, make_stem, read_scaled_relu, replace_stem
from vtk.models.stems.hmlp import hmlp_strides
from vtk.models.stems.shape import StemShape

DOUBLE = torch.float64
ABLATIONS = (
    "3conv+3bn+3relu+1proj", "3conv+3bn+1proj", "3conv+3relu+1proj", "3conv+1proj", "3conv+1proj+1relu",
    "1proj+1bn+1relu", "1proj+1relu", "1proj",
)  # fmt: skip


def vit(name: str = "vit_tiny_patch16_224", **kwargs: Any) -> Any:
    small = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 32, "num_classes": 3}
    return timm.create_model(name, **{**small, **kwargs})


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def lively(module: Any) -> Any:
    """Move norms and running statistics away from their initial ones and zeros; fp64, eval mode."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("running_var"):
            tensor.data = torch.rand_like(tensor) + 0.5
        elif tensor.ndim == 1 and tensor.is_floating_point():
            tensor.data = tensor.data + 0.3 * torch.randn_like(tensor)
    return module.double().eval()


def photograph(side: int) -> Tensor:
    """A part of a real photograph, (1, 3, side, side) in about ±2."""
    pixels = torch.tensor(load_sample_image("china.jpg")[100 : 100 + side, 200 : 200 + side].copy())
    return (pixels.permute(2, 0, 1)[None].double() / 255 - 0.45) / 0.23


def hmlp_of_one_patch(patch: Tensor, layers: nn.Sequential, strides: list[tuple[int, int]]) -> Tensor:
    """Return the token (C) of a patch (chans, h, w): products, norms and GELU over its pieces, written out."""
    grid = patch
    parts = list(layers)
    for i, (h, w) in enumerate(strides):
        conv, norm = parts[3 * i], parts[3 * i + 1]
        rows, cols = grid.shape[1] // h, grid.shape[2] // w
        out = torch.empty(len(conv.weight), rows, cols, dtype=DOUBLE)
        for r in range(rows):
            for c in range(cols):
                piece = grid[:, r * h : r * h + h, c * w : c * w + w].reshape(-1)
                value = conv.weight.reshape(len(conv.weight), -1) @ piece + conv.bias
                if isinstance(norm, nn.BatchNorm2d):
                    value = (value - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
                else:
                    value = (value - value.mean()) / (value.var(unbiased=False) + norm.eps).sqrt()
                value = value * norm.weight + norm.bias
                out[:, r, c] = value if i == 2 else value * 0.5 * (1 + torch.erf(value / 2**0.5))
        grid = out
    return grid[:, 0, 0]


@pytest.mark.parametrize("name", ["hmlp", "hmlp-ln"])
@pytest.mark.parametrize(("patch", "chans"), [((16, 16), 3), ((14, 8), 1), ((32, 6), 2)], ids=str)
def test_hmlp_is_the_formula_patch_by_patch(name: Any, patch: tuple[int, int], chans: int) -> None:
    layers = lively(make_stem(name, StemShape(chans, 8, patch)))
    images = torch.randn(1, chans, patch[0], 2 * patch[1], dtype=DOUBLE)
    strides = list(zip(*map(hmlp_strides, patch), strict=True))
    with torch.no_grad():
        found = layers(images)
        assert found.shape == (1, 8, 1, 2)
        for i in range(2):
            expected = hmlp_of_one_patch(images[0, :, :, i * patch[1] : (i + 1) * patch[1]], layers, strides)
            assert float((found[0, :, 0, i] - expected).abs().max()) <= 1e-12


def test_hmlp_has_the_tensors_of_deit() -> None:
    with shapes_only():
        model = timm.create_model("vit_base_patch16_224", depth=1)
        assert count(model.patch_embed) == 590_592
        replace_stem(model, stem="hmlp")
    assert count(model.patch_embed) == 749_952
    shapes = {k.removeprefix("patch_embed."): tuple(v.shape) for k, v in model.state_dict().items() if "embed.p" in k}
    assert {k: s for k, s in shapes.items() if k.endswith(("weight", "bias"))} == {
        "proj.0.weight": (192, 3, 4, 4), "proj.0.bias": (192,), "proj.1.weight": (192,), "proj.1.bias": (192,),
        "proj.3.weight": (192, 192, 2, 2), "proj.3.bias": (192,), "proj.4.weight": (192,), "proj.4.bias": (192,),
        "proj.6.weight": (768, 192, 2, 2), "proj.6.bias": (768,), "proj.7.weight": (768,), "proj.7.bias": (768,),
    }  # fmt: skip


def test_the_conv_stem_of_deit_small_has_the_papers_counts() -> None:
    with shapes_only():
        model = timm.create_model("deit_small_patch16_224")
        assert count(model.patch_embed) == 295_296
        replace_stem(model, stem="conv")
    assert (count(model.patch_embed.proj.conv), count(model.patch_embed.proj.proj)) == (83_520, 1_573_248)
    assert count(model) == 23_412_136


@pytest.mark.parametrize("patch", [8, 16])
def test_the_conv_stem_is_volos(patch: int) -> None:
    volo = lively(VoloEmbed(32, stem_conv=True, stem_stride=2, patch_size=patch, hidden_dim=64, embed_dim=8))
    layers = make_stem("conv", StemShape(3, 8, (patch, patch))).double().eval()
    layers.load_state_dict(volo.state_dict(), strict=True)  # conv.0 … conv.8 and proj, as VOLO calls them
    images = torch.randn(2, 3, 32, 48, dtype=DOUBLE)
    with torch.no_grad():
        assert torch.equal(layers(images), volo(images))


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_have_the_parts_of_their_name_in_order(name: Any) -> None:
    layers = make_stem(name, StemShape(3, 8, (16, 16)))
    flat = [m for m in layers.modules() if not isinstance(m, nn.Sequential)]
    kinds = {nn.Conv2d: "c", nn.BatchNorm2d: "b", nn.ReLU: "r"}
    expected = {
        "3conv+3bn+3relu+1proj": "cbrcbrcbrc", "3conv+3bn+1proj": "cbcbcbc", "3conv+3relu+1proj": "crcrcrc",
        "3conv+1proj": "cccc", "3conv+1proj+1relu": "ccccr", "1proj+1bn+1relu": "cbr", "1proj+1relu": "cr",
        "1proj": "c",
    }  # fmt: skip
    assert "".join(kinds[type(m)] for m in flat) == expected[name]
    convs = [m for m in flat if isinstance(m, nn.Conv2d)]
    followed = [isinstance(after, nn.BatchNorm2d) for m, after in zip(flat, [*flat[1:], None], strict=True)
                if isinstance(m, nn.Conv2d)]  # fmt: skip
    if len(convs) == 4:
        assert [c.kernel_size[0] for c in convs] == [7, 3, 3, 8] and [c.stride[0] for c in convs] == [2, 1, 1, 8]
        assert [c.bias is None for c in convs] == followed


def test_average_strides_keep_the_kernels_and_the_grid() -> None:
    shape = StemShape(3, 8, (16, 16))
    plain, even = make_stem("conv", shape), make_stem("conv", shape, strides=(2, 2, 2, 2))
    assert {k: v.shape for k, v in plain.state_dict().items()} == {k: v.shape for k, v in even.state_dict().items()}
    images = torch.randn(1, 3, 64, 32)
    sizes = [images.shape[2]]
    for part in [*even.conv, even.proj]:
        images = part(images)
        sizes.append(images.shape[2])
    assert list(dict.fromkeys(sizes)) == [64, 32, 16, 8, 4] and images.shape == (1, 8, 4, 2)


def test_activations_can_be_others() -> None:
    shape = StemShape(3, 8, (8, 8))
    for act, kind in (("gelu", nn.GELU), ("hardswish", nn.Hardswish), ("scaled-relu", ScaledReLU)):
        for name, n in (("conv", 3), ("hmlp", 2), ("levit", 2), ("1proj+1bn+1relu", 1)):
            layers = make_stem(name, shape, act=act)  # type: ignore[arg-type]
            assert sum(type(m) is kind for m in layers.modules()) == n
            assert layers(torch.randn(2, 3, 16, 16)).shape == (2, 8, 2, 2)


@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("patch", [8, 16])
def test_every_stem_shrinks_by_the_patch(name: Any, patch: int) -> None:
    layers = make_stem(name, StemShape(2, 16, (patch, patch)))
    assert layers(torch.randn(2, 2, 2 * patch, 3 * patch)).shape == (2, 16, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "shape", "message"),
    [
        ({"stem": "hmlp"}, (3, 8, (7, 7)), "halves a patch, and this model's is 7 pixels"),
        ({"stem": "hmlp"}, (3, 10, (16, 16)), "divisible by 4, and the model has 10"),
        ({"stem": "conv"}, (3, 8, (7, 7)), "this model's patch is 7 pixels"),
        ({"stem": "levit"}, (3, 8, (14, 14)), "needs patches of 16 or 8 pixels; this model's are 14 × 14"),
        ({"stem": "levit"}, (3, 12, (16, 16)), "divisible by 8, and the model has 12"),
        ({"stem": "resnet"}, (3, 8, (16, 16)), "`--stem` is resnet; allowed is hmlp, hmlp-ln, conv"),
        ({"stem": "hmlp", "act": "silu"}, (3, 8, (16, 16)), "`--stem-act` is silu; allowed is relu, gelu"),
        ({"stem": "3conv+1proj", "act": "gelu"}, (3, 8, (16, 16)), "has no activation; leave it out"),
        ({"stem": "hmlp", "strides": [2, 2, 2, 2]}, (3, 8, (16, 16)), "`--stem-strides` needs a conv stem"),
        ({"stem": "1proj+1relu", "strides": [2]}, (3, 8, (16, 16)), "`--stem-strides` needs a stem with convolutions"),
        ({"stem": "conv", "strides": [2, 2, 2]}, (3, 8, (16, 16)), "2 2 2: allowed are four numbers of at least 1"),
        (
            {"stem": "conv", "strides": [2, 2, 2, 0]},
            (3, 8, (16, 16)),
            "2 2 2 0: allowed are four numbers of at least 1",
        ),
        ({"stem": "conv", "strides": [2, 2, 2, 2]}, (3, 8, (8, 8)), "multiply to 16; this model's patch is 8"),
        ({"stem": "conv", "strides": [1, 1, 4, 4]}, (3, 8, (16, 16)), "would skip pixels"),
        ({"stem": "conv", "strides": [4, 2, 2, 1]}, (3, 8, (16, 16)), "would need asymmetric padding"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: Any, shape: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        make_stem(shape=StemShape(*shape), **arguments)
    assert "\n" not in str(error.value)


def test_scaled_relu_is_batch_norm_and_relu() -> None:
    norm = lively(nn.BatchNorm2d(6))
    norm.weight.data[0], norm.weight.data[1] = -0.5, 0.0
    x = torch.randn(3, 6, 4, 5, dtype=DOUBLE)
    alpha, beta = read_scaled_relu(norm)
    assert alpha[:2].isnan().all() and beta[:2].isnan().all()
    scaled = ScaledReLU(6, dtype=DOUBLE)
    assert torch.equal(scaled(x), x.clamp_min(0))  # a plain ReLU at first
    with torch.no_grad():
        scaled.alpha.copy_(alpha)
        scaled.beta.copy_(beta)
        normalised = (x - norm.running_mean.view(-1, 1, 1)) / (norm.running_var + norm.eps).sqrt().view(-1, 1, 1)
        difference = scaled(normalised) - F.relu(norm(x))
    assert float(difference[:, 2:].abs().max()) <= 1e-12
    assert torch.equal(alpha[2:], (norm.bias / norm.weight).detach()[2:])
    for wrong in (nn.ReLU(), nn.BatchNorm2d(3, affine=False), nn.LayerNorm(3)):
        with pytest.raises(UsageError, match="is not a BatchNorm with weight and bias"):
            read_scaled_relu(wrong)


def leak(stem: nn.Module) -> float:
    """Return how much the tokens of other patches change where the pixels of six patches of a photograph are masked."""
    images = photograph(64)
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    hidden[[0, 1, 1, 2, 3, 3], [2, 0, 1, 3, 1, 2]] = True
    masked = images.masked_fill(hidden.repeat_interleave(16, 0).repeat_interleave(16, 1), 0.0)
    with torch.no_grad():
        before, after = stem(images), stem(masked)
    assert float((before - after)[..., hidden].abs().max()) > 0.01  # the masked ones do change
    return float((before - after)[..., ~hidden].abs().max())


@pytest.mark.parametrize("name", STEMS)
def test_patchwise_stems_commute_with_masking(name: Any) -> None:
    stem = lively(make_stem(name, StemShape(3, 16, (16, 16))))
    found = leak(stem)
    assert (found == 0) if name in PATCHWISE else (found > 1e-3)


def test_batch_norm_leaks_in_train_mode_and_layer_norm_over_channels_never() -> None:
    assert leak(lively(make_stem("hmlp-ln", StemShape(3, 16, (16, 16)))).train()) == 0
    assert leak(lively(make_stem("hmlp", StemShape(3, 16, (16, 16)))).train()) > 0.05
    grouped = lively(make_stem("hmlp-ln", StemShape(3, 16, (16, 16))))
    for i in (1, 4, 7):  # what LayerNorm2d must not be: over the positions, too
        grouped[i] = nn.GroupNorm(1, grouped[i].weight.numel()).double()
    assert leak(grouped) > 0.05


def test_masked_tokens_are_the_same_whether_pixels_were_masked_or_not() -> None:
    model = lively(vit(img_size=64))
    replace_stem(model, stem="hmlp")
    assert isinstance(model.patch_embed, Stem) and model.patch_embed.patchwise
    lively(model.patch_embed)
    images, token = photograph(64), torch.randn(16, dtype=DOUBLE)
    hidden = (torch.arange(16) % 3 == 0).view(1, 16, 1)
    pixels = hidden.view(1, 1, 4, 4).repeat_interleave(16, 2).repeat_interleave(16, 3)
    with torch.no_grad():
        late = torch.where(hidden, token, model.patch_embed(images))
        early = torch.where(hidden, token, model.patch_embed(images.masked_fill(pixels, 0.7)))
    assert torch.equal(late, early)


def work(module: nn.Module) -> int:
    """Return multiply-adds of an image of 224 px, as torch counts them (a product and a sum are two operations)."""
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 3, 224, 224, device="meta"))
    return counter.get_total_flops() // 2


def test_hmlp_adds_less_than_a_percent_of_work() -> None:
    with shapes_only():
        model, deeper = (timm.create_model("vit_base_patch16_224", depth=d).eval() for d in (1, 2))
    whole = work(model) + 11 * (work(deeper) - work(model))
    assert whole == 17_563_828_224  # Touvron et al. 2022, Table 7: 17.58 GFLOPS, and 17.73 with hMLP
    linear, found = work(model.patch_embed), {}
    for name in ("hmlp", "hmlp-ln", "levit", "conv"):
        found[name] = (work(make_stem(name, StemShape(3, 768, (16, 16), torch.device("meta")))) - linear) / whole
    assert 0.008 < found["hmlp"] == found["hmlp-ln"] <= 0.01
    assert 0.08 < found["levit"] < 0.09 and 0.08 < found["conv"] < 0.09

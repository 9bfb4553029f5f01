"""Maps of where models look against timm's own unfused attention and its windows, and what is drawn of them."""

import json

import pytest
import torch
from timm.models.swin_transformer import window_reverse

from tests.vtk.analysis._attention import GivenViT, context, fused, random_attention, unfused_attention
from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.map_figures import decode_picture, encode_picture
from vtk.analysis.diagnostics.overlays import DIAGNOSTIC
from vtk.analysis.measures.overlays import attention_maps, half_share
from vtk.analysis.result_files import finite
from vtk.errors import DataError, UsageError

SMALL = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 3}
MODELS = {
    "vit": ("vit_tiny_patch16_224", SMALL, 1, 2, "class token"),
    "distilled": ("deit_tiny_distilled_patch16_224", SMALL, 2, 2, "class token"),
    "registers": ("vit_small_patch14_reg4_dinov2", {**SMALL, "img_size": 42}, 5, 3, "class token"),
    "parallel": ("vit_small_patch16_18x2_224", SMALL, 1, 2, "class token"),
    "pit": (
        "pit_ti_224",
        {"img_size": 48, "base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (1, 2, 2)},
        1,
        2,
        "class token",
    ),
    "no class token": (
        "vit_tiny_patch16_224", {**SMALL, "class_token": False, "global_pool": "avg"}, 0, 2, "mean of all queries",
    ),
    "pooled by a query": (
        "vit_base_patch16_siglip_224", SMALL, 0, 2, "single query",
    ),
}  # fmt: skip


def shaken(name, **kwargs):
    model = timm_model(name, **kwargs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_maps_are_rows_of_timms_unfused_attention(name):
    kind, kwargs, prefix, side, query = MODELS[name]
    model = shaken(kind, **kwargs)
    x = torch.randn(3, 3, kwargs["img_size"], kwargs["img_size"])
    batches = [(x[:2], torch.zeros(2)), (x[2:], torch.zeros(1))]
    found = attention_maps(model, batches)
    with fused(model, False):
        unfused = attention_maps(model, batches)
    assert found.query == query and len(found.maps) == 3
    if query == "single query":  # timm's pooling has no dropout module to look at
        assert found.layer == "attn_pool"
        assert all(image.patches == pytest.approx(1, abs=1e-5) for image in found.maps)
        return
    attention = unfused_attention(model, x)
    assert found.layer == list(attention)[-1]
    last = attention[found.layer]
    rows = last[:, :, 0] if query == "class token" else last.mean(dim=2)
    for image, other, one in zip(found.maps, unfused.maps, rows[..., prefix:], strict=True):
        heads = one.reshape(-1, side, side)
        assert torch.allclose(image.heads.double(), heads, atol=1e-6)
        assert torch.allclose(image.mean.double(), heads.mean(dim=0), atol=1e-6)
        assert image.patches == pytest.approx(float(one.sum(dim=-1).mean()), abs=1e-6)
        assert torch.allclose(image.heads, other.heads, atol=1e-6)


@pytest.mark.parametrize("side", [32, 40], ids=["whole windows", "padded"])
def test_shifted_windows_are_put_together_as_timm_does(side):
    model = shaken(
        "swin_tiny_patch4_window7_224", img_size=side, window_size=4, embed_dim=12, depths=(2,), num_heads=(2,)
    )
    x = torch.randn(2, 3, side, side)
    attention = unfused_attention(model, x)["layers.0.blocks.1.attn"]
    height, padded = side // 4, -(-side // 16) * 4
    assert model.layers[0].blocks[1].shift_size == (2, 2)
    assert attention.shape == (2 * (padded // 4) ** 2, 2, 16, 16)
    received = attention.mean(dim=2).transpose(1, 2).reshape(-1, 4, 4, 2)  # heads where timm has channels
    whole = window_reverse(received, (4, 4), padded, padded)[:, :height, :height]
    expected = torch.roll(whole, shifts=(2, 2), dims=(1, 2)).permute(0, 3, 1, 2)
    found = attention_maps(model, [(x, torch.zeros(2))])
    assert found.query == "mean of all queries"
    for image, heads in zip(found.maps, expected, strict=True):
        assert torch.allclose(image.heads.double(), heads, atol=1e-6)


def test_half_of_a_map_lies_on_a_share_of_the_patches():
    assert half_share(torch.full((3, 4), 0.01)) == pytest.approx(0.5)
    one = torch.zeros(2, 5)
    one[1, 3] = 0.2
    assert half_share(one) == pytest.approx(0.05)
    assert half_share(torch.tensor([[3.0, 1.0]])) == pytest.approx(0.5 / 0.75 / 2)
    assert half_share(torch.tensor([[1.0, 4.0, 2.0, 3.0]])) == pytest.approx((1 + 1 / 3) / 4)


def test_models_without_attention_and_unknown_places_are_refused():
    x = [(torch.randn(1, 3, 32, 32), torch.zeros(1))]
    with pytest.raises(UsageError, match="ResNet: it has no attention; overlays show that of a ViT"):
        attention_maps(timm_model("test_resnet"), x)
    model = GivenViT((2, 2), [random_attention(1, 5), random_attention(1, 5)])
    model.patch_embed.grid_size = (3, 3)
    with pytest.raises(UsageError, match=r"positions of the tokens of its last attention \(blocks\.1\) are not known"):
        attention_maps(model, x)
    with pytest.raises(DataError, match="no images"):
        attention_maps(tiny_vit(), [])


def test_the_model_is_left_as_it_was():
    model = tiny_vit(depth=2).train()
    state = torch.get_rng_state()
    one, two = (attention_maps(model, images(2)).to_dict() for _ in range(2))
    assert one == two and model.training and torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_kept_picture_is_the_image(channels):
    ramp = torch.linspace(0, 1, 300)[None, None].expand(channels, 150, 300)
    shown = decode_picture(encode_picture(ramp))
    assert shown.shape == (112, 224, 3)
    expected = torch.linspace(0, 255, 224)
    assert (torch.tensor(shown.copy()).float().mean(dim=(0, 2)) - expected).abs().max() < 3
    small = torch.rand(channels, 8, 8, generator=torch.Generator().manual_seed(0))
    assert decode_picture(encode_picture(small)).shape == (8, 8, 3)


def test_a_result_is_drawn_from_json_alone():
    matrix = torch.full((7, 5, 5), 0.05)  # seven heads are two rows
    matrix[:, :, 1] = 0.8
    model = GivenViT((2, 2), [matrix])
    x = torch.rand(12, 3, 16, 16) * 2 - 1
    batches = [(part, torch.zeros(len(part))) for part in x.split(5)]
    measured = DIAGNOSTIC.measure(context(model, batches, side=16, overlay_images=9))
    result = json.loads(json.dumps(finite(measured)))
    assert len(result["images"]) == 9 and len(result["images"][0]["heads"]) == 7
    assert result["images"][0]["map"] == [[0.8, 0.05], [0.05, 0.05]]
    numbers = DIAGNOSTIC.numbers(result)
    assert numbers["attention on patches, share"] == pytest.approx(0.95)
    assert numbers["patches that hold half of it, share"] == pytest.approx(0.475 / 0.8 / 4)
    assert "gives 95 % of its attention to patches" in DIAGNOSTIC.read(result)[0]
    shown = torch.tensor(decode_picture(result["images"][7]["picture"]).copy()).float() / 255
    assert (shown.mean() - (x[7] * 0.5 + 0.5).mean()).abs() < 0.02  # the normalisation is taken back
    one = DIAGNOSTIC.draw([Run("one", result)])
    assert [picture.name for picture in one] == ["overlays-1", "overlays-2", "overlays-heads"]
    few = {**result, "images": result["images"][:1]}
    two = DIAGNOSTIC.draw([Run("one", few), Run("two", few)])
    assert [picture.name for picture in two] == ["overlays", "overlays-heads-1", "overlays-heads-2"]


def test_a_model_without_class_token_says_so():
    model = GivenViT((2, 2), [torch.full((1, 4, 4), 0.25)], class_token=False)
    result = finite(DIAGNOSTIC.measure(context(model, [(torch.rand(1, 3, 8, 8), torch.zeros(1))], side=8)))
    told = " ".join(DIAGNOSTIC.read(result))
    assert "the mean of all queries (the model has no class token)" in told and "near uniform" in told
    (picture,) = DIAGNOSTIC.draw([Run("one", result)])  # a single head is the mean
    assert "no class token" in picture.caption

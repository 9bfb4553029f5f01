"""Transforms on Eva, BEiT and SwiGLU models: they compute what their formula says, or are refused by what works."""

import pytest
import timm
import torch
from torch import nn

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models.transforms.registry import apply_transforms

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
OTHERS = [("vit_small_patch16_dinov3", 32), ("eva02_base_patch14_224", 28), ("beit_base_patch16_224", 32)]


def make(name: str, side: int) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, img_size=side, **SMALL).double().eval()


def change(model: nn.Module, op: str, **args: object) -> None:
    apply_transforms(model, [Transform(op, args)], {key: key for key in model.state_dict()})


@pytest.mark.parametrize(("name", "side"), OTHERS)
@pytest.mark.parametrize(
    ("op", "args", "what"),
    [
        ("parallelize", {"branches": 2}, "cannot be parallelized: .* such as vit_small_patch16_224"),
        ("add_context_broadcast", {}, r"supported are .* \(such as vit_small_patch16_224, .*PiT and MLP-Mixer$"),
        ("uniform_heads", {"variant": "a"}, "cannot have uniform heads; supported are"),
        ("change_mlp", {"design": "relu"}, "`--mlp` changes timm's VisionTransformer .*, not (Eva|Beit)$"),
    ],
    ids=["parallelize", "cb", "uniform heads", "mlp"],
)
def test_other_classes_are_refused_in_one_line_and_left_as_they_were(name, side, op, args, what):
    model = make(name, side)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=what) as caught:
        change(model, op, **args)
    assert "\n" not in str(caught.value) and type(model).__name__ in str(caught.value)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)


def test_blocks_with_swiglu_become_parallel_branches():
    model = make("vit_giant_patch14_dinov2", 28)
    x, blocks = torch.randn(2, 5, 32, dtype=torch.float64), list(model.blocks)
    with torch.no_grad():
        y = x + sum(b.ls1(b.attn(b.norm1(x))) for b in blocks)
        wanted = y + sum(b.ls2(b.mlp(b.norm2(y))) for b in blocks)
        change(model, "parallelize", branches=2)
        torch.testing.assert_close(model.blocks(x), wanted, rtol=1e-12, atol=1e-12)


def test_context_broadcasting_follows_or_precedes_a_swiglu():
    for placement in ("end", "front"):
        model = make("vit_giant_patch14_dinov2", 28)
        x, mlp = torch.randn(2, 5, 32, dtype=torch.float64), model.blocks[0].mlp
        with torch.no_grad():
            plain = {"end": lambda t, m=mlp: mix(m(t)), "front": lambda t, m=mlp: m(mix(t))}[placement](x)
            change(model, "add_context_broadcast", placement=placement)
            torch.testing.assert_close(model.blocks[0].mlp(x), plain, rtol=1e-12, atol=1e-12)
    with pytest.raises(UsageError, match=r"is a GluMlp, and mid needs timm's Mlp; use end or front"):
        change(make("vit_giant_patch14_dinov2", 28), "add_context_broadcast", placement="mid")


def mix(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (x + x.mean(1, keepdim=True))


@pytest.mark.parametrize(("name", "side"), [("vit_small_patch16_dinov3", 32), ("beit_base_patch16_224", 32)])
@pytest.mark.parametrize("stem", ["hmlp", "1proj+1bn+1relu"])
def test_another_stem_gives_the_tokens_that_the_rest_reads(name, side, stem):
    model = make(name, side)
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    change(model, "replace_stem", stem=stem)
    model.eval()
    with torch.no_grad():
        tokens = model.patch_embed.proj(images)
        conv = nn.Conv2d(32, 32, 1, bias=False, dtype=torch.float64)
        conv.weight.copy_(torch.eye(32, dtype=torch.float64)[:, :, None, None])
        wanted = model(images)
        model.patch_embed.proj = conv  # the model on tokens that are made outside of it
        model.patch_embed.img_size, model.patch_embed.strict_img_size = None, False
        torch.testing.assert_close(model(tokens), wanted, rtol=1e-12, atol=1e-12)

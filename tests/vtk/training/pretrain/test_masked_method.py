"""What masked methods compute, against formulas and against timm's own forward pass."""

from functools import partial

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock

from vtk.card import InputSpec, Transform
from vtk.errors import UsageError
from vtk.models.inputs import blank_model
from vtk.models.transforms.registry import apply_transforms
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.beit import SHOWN, WordObjective
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.mae import Mae, MaeModel
from vtk.training.pretrain.masked_method import PixelObjective, TokenModel
from vtk.training.pretrain.masks import make_masks
from vtk.training.pretrain.patches import independent, normalized, patchify, positions_of, unpatchify
from vtk.training.pretrain.simmim import SimMim
from vtk.training.pretrain.tokenizer import Tokenizer, TokenizerSpec

GRID = (4, 6)
MASKS = make_masks(GRID, 0.5)


def vit(**kwargs):
    """A ViT over 4×6 patches of 4 px, in fp64."""
    torch.manual_seed(0)
    small = {"patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": (16, 24), "num_classes": 0}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **kwargs}).double().eval()


@pytest.fixture
def images():
    return torch.randn(3, 3, 16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def mask():
    return MASKS.draw(torch.arange(3))


def test_patches_are_the_pixels_of_their_place(images):
    patches = patchify(images, GRID)
    for n in (0, 5, 6, 23):
        row, column = divmod(n, 6)
        part = images[1, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert torch.equal(patches[1, n], part.permute(1, 2, 0).flatten())
    assert torch.equal(unpatchify(patches, GRID, images.shape[1:]), images)


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"no_embed_class": True, "reg_tokens": 2}, {"class_token": False, "global_pool": "avg"},
     {"dynamic_img_size": True}, {"block_fn": partial(ParallelThingsBlock, num_parallel=2)}],
    ids=["plain", "registers", "no-class", "dynamic", "parallel"],
)  # fmt: skip
def test_the_encoder_of_mae_is_timms_own_on_the_visible_tokens(images, mask, kwargs):
    backbone = vit(**kwargs)
    model = MaeModel(backbone, 48, "tokens", 32, 1).double().eval()
    with torch.no_grad():
        found = model.encode(images, mask, MASKS.count)
        for i in range(3):  # timm drops tokens behind the positions, too: PatchDropout; here these very ones
            kept = torch.nonzero(~mask[i]).flatten()
            prefix = backbone.num_prefix_tokens
            backbone.patch_drop = torch.nn.Module()
            backbone.patch_drop.forward = lambda x, kept=kept, p=prefix: torch.cat([x[:, :p], x[:, p:][:, kept]], 1)
            expected = backbone.forward_features(images[i : i + 1])
            torch.testing.assert_close(found[i : i + 1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["token", "mae"])
def test_nothing_hidden_is_seen(images, mask, kind):
    """Pixels of hidden patches change no prediction; those of visible ones do."""
    backbone = vit()
    model = (
        TokenModel(backbone, 48, "tokens") if kind == "token" else MaeModel(backbone, 48, "tokens", 32, 1)
    ).double()
    noise = torch.randn(3, 24, 48, dtype=torch.float64)
    with torch.no_grad():
        before = model(images, mask, count=MASKS.count)
        for where, same in ((mask, True), (~mask, False)):
            other = patchify(images, GRID) + noise * where.unsqueeze(-1)
            after = model(unpatchify(other, GRID, images.shape[1:]), mask, count=MASKS.count)
            assert torch.equal(before, after) == same


def test_without_hidden_patches_tokens_are_those_of_timm(images):
    backbone = vit(reg_tokens=1)
    model = TokenModel(backbone, 48, "tokens").double()
    with torch.no_grad():
        found = model.tokens(images, torch.zeros(3, 24, dtype=torch.bool))
        assert torch.equal(found, backbone.forward_features(images)[:, 2:])
    assert not backbone.patch_embed._forward_hooks  # nothing is left behind in what is kept


@pytest.mark.parametrize("distance", ["l1", "l2"])
@pytest.mark.parametrize("norm", [False, True], ids=["raw", "norm"])
def test_the_loss_of_pixels_is_its_formula(images, mask, distance, norm):
    model = TokenModel(vit(), 48, "tokens").double()
    objective = PixelObjective(MASKS, distance, *([normalized] if norm else []))
    loss, _ = objective.loss(model, Batch(images, mask))
    # by hand, patch by patch
    total, hidden = 0.0, 0
    with torch.no_grad():
        predictions = model(images, mask, count=MASKS.count)
        for b in range(3):
            for m, n in enumerate(torch.nonzero(mask[b]).flatten().tolist()):
                row, column = divmod(n, 6)
                pixels = images[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].permute(1, 2, 0).flatten()
                if norm:
                    pixels = (pixels - pixels.sum() / 48) / (((pixels - pixels.mean()) ** 2).sum() / 47 + 1e-6).sqrt()
                gap = (predictions[b, m] - pixels).abs()
                total += float((gap if distance == "l1" else gap**2).sum()) / 48
                hidden += 1
    assert hidden == 36 and loss.item() == pytest.approx(total / hidden, rel=1e-12)


def test_the_loss_of_words_is_their_mean_log_probability(images, mask):
    torch.manual_seed(0)
    spec = TokenizerSpec(4, 4, 3, 10, 4, (0.5,) * 3, (0.5,) * 3, hidden=8)
    tokenizer = Tokenizer(spec).double()
    objective = WordObjective(MASKS, tokenizer)
    batch = objective.prepare(Batch(images, torch.arange(3)))
    assert torch.equal(batch.labels != SHOWN, mask)
    assert torch.equal(batch.labels[mask], tokenizer.ids(images)[mask])
    model = TokenModel(vit(), 10, "tokens").double()
    loss, numbers = objective.loss(model, batch)
    with torch.no_grad():
        logits = model.predict(model.tokens(images, mask))
    chosen = [
        float(logits[b, n, batch.labels[b, n]] - logits[b, n].exp().sum().log())
        for b, n in torch.nonzero(mask).tolist()
    ]
    assert loss.item() == pytest.approx(-sum(chosen) / 36, rel=1e-12)
    right = (logits.argmax(-1) == batch.labels)[mask].double().mean()
    assert float(numbers["words_top1"]) == pytest.approx(float(right))


def test_gradients_come_from_hidden_patches_only(images, mask):
    """Of SimMIM's layer: what the loss asks of it does not depend on the pixels of patches that are shown."""
    model = TokenModel(vit(), 48, "tokens").double()
    tokens = []
    model.predict.register_forward_hook(lambda module, args, out: tokens.append(args[0]))
    PixelObjective(MASKS, "l2").loss(model, Batch(images, mask))[0].backward()
    assert tokens[0].shape == (3, MASKS.count, 16)  # the layer never meets the others
    bias = model.predict.bias.grad
    target = torch.stack([patchify(images, GRID)[b][mask[b]] for b in range(3)])
    expected = 2 * (model(images, mask, count=MASKS.count) - target).mean((0, 1)) / 48
    torch.testing.assert_close(bias, expected, rtol=1e-10, atol=0)
    assert model.mask_token.grad.abs().sum() > 0


def test_masking_in_front_of_and_behind_an_independent_stem_is_the_same(images, mask):
    backbone = vit()
    assert independent(backbone, (3, 16, 24))
    with torch.no_grad():
        tokens, pixels = (TokenModel(backbone, 48, at).double() for at in ("tokens", "pixels"))
        pixels.load_state_dict(tokens.state_dict())
        assert torch.equal(tokens(images, mask, count=12), pixels(images, mask, count=12))
        backbone.patch_embed.proj = torch.nn.Conv2d(3, 16, 8, stride=4, padding=2).double()  # patches overlap
        assert not independent(backbone, (3, 16, 24))
        assert not torch.allclose(tokens(images, mask, count=12), pixels(images, mask, count=12))
        other = images + patchify_noise(mask)
        assert not torch.allclose(tokens(images, mask, count=12), tokens(other, mask, count=12))  # it leaks
        assert torch.equal(pixels(images, mask, count=12), pixels(other, mask, count=12))  # it does not


@pytest.mark.parametrize(
    ("stem", "training", "same"),
    [("hmlp", False, True), ("hmlp", True, False), ("hmlp-ln", True, True), ("conv", False, False)],
    ids=["hmlp-eval", "hmlp-train", "hmlp-ln", "conv"],
)
def test_masking_commutes_with_stems_of_independent_patches(stem, training, same):
    """Touvron et al. 2022, sec. 5: masks before or after an hMLP stem are the same, except by BatchNorm."""
    backbone = vit(patch_size=16, img_size=(32, 48))
    apply_transforms(backbone, [Transform("replace_stem", {"stem": stem})], {k: k for k in backbone.state_dict()})
    assert independent(backbone.double().eval(), (3, 32, 48)) == (stem != "conv")
    images = torch.randn(4, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    masks = make_masks((2, 3), 0.5)
    tokens, pixels = (TokenModel(backbone, 3, at).double().train(training) for at in ("tokens", "pixels"))
    pixels.load_state_dict(tokens.state_dict())
    with torch.no_grad():
        found = [model(images, masks.draw(torch.arange(4)), count=masks.count) for model in (tokens, pixels)]
    assert torch.allclose(*found, rtol=0, atol=1e-12) == same


def patchify_noise(mask):
    noise = torch.randn(3, 24, 48, dtype=torch.float64) * mask.unsqueeze(-1)
    return unpatchify(noise, GRID, (3, 16, 24))


def test_positions_are_those_of_the_mask_in_order(mask):
    assert torch.equal(positions_of(mask, 12), torch.stack([torch.nonzero(row).flatten() for row in mask]))


@pytest.mark.parametrize(
    ("method", "model", "text"),
    [
        (SimMim, "resnet18", "no `patch_embed`"),
        (SimMim, "swin_tiny_patch4_window7_224", "merges its patches"),
        (Mae, "beit_base_patch16_224", "--method simmim"),
        (Mae, "vit_relpos_base_patch16_224", "--method simmim"),
    ],
)
def test_models_that_cannot_be_masked_are_refused(method, model, text):
    name = "mae" if method is Mae else "simmim"
    config = PretrainConfig(method=name, model=model).resolved()
    with pytest.raises(UsageError, match=text) as error:
        method().check(blank_model(model), config, InputSpec(224, 224))
    assert "\n" not in str(error.value)

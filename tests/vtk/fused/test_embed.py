"""The embedding as a product of patches, and the plain stem, against timm's; and what must follow its weights."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused import FusedViT, fuse
from vtk.fused.patches import takes_patches
from vtk.fused.stages import Plan

Build = Callable[..., Any]
KERNELS = Plan(kernels=True)


def difference(model: Any, fused: FusedViT, batch: int = 2) -> float:
    """Largest error relative to the largest logit, of the CPU's plan and of the kernels' (its operations in torch)."""
    chans, size = fused.in_chans, fused.image_size
    x = torch.randn(batch, chans, *size, dtype=torch.float64)
    with torch.no_grad():
        expected = model(x)
        return max(
            float((got - expected).abs().max() / expected.abs().max()) for got in (fused(x), fused.compute(x, KERNELS))
        )


def count_patchify(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return a list to which every call of `patchify` adds its arguments after the images."""
    import vtk.fused.embed as embed

    calls: list[tuple[Any, ...]] = []
    original = embed.patchify

    def counted(images: Tensor, *args: Any) -> Tensor:
        calls.append(args)
        return original(images, *args)

    monkeypatch.setattr(embed, "patchify", counted)
    return calls


@pytest.mark.parametrize(
    ("kwargs", "prefix"),
    [
        ({}, 1),
        ({"no_embed_class": True, "reg_tokens": 4}, 5),
        ({"reg_tokens": 2}, 3),
        ({"class_token": False, "global_pool": "avg"}, 0),
        ({"pos_embed": "none"}, 1),
        ({"pos_embed": "none", "class_token": False, "global_pool": "avg", "pre_norm": True}, 0),  # no bias either
        ({"pre_norm": True}, 1),
        ({"norm_layer": "rmsnorm"}, 1),
        ({"depth": 1, "branches": 2}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize(("patch", "chans", "size"), [(14, 3, (28, 56)), (16, 4, (32, 16)), (8, 1, (24, 16))])
def test_a_product_of_patches_equals_timms_embedding(
    vit: Build, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any], prefix: int,
    patch: int, chans: int, size: tuple[int, int],
) -> None:  # fmt: skip
    calls = count_patchify(monkeypatch)
    model = vit(patch_size=patch, in_chans=chans, img_size=size, **kwargs)
    fused = fuse(model)
    assert difference(model, fused) <= 1e-12
    width = -(-chans * patch * patch // 16) * 16
    assert calls == [((patch, patch), prefix, width)]  # by the kernels' plan, and never by the CPU's
    assert (fused.embed.padded is None) == (width == chans * patch * patch)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_norms_on_both_sides_of_the_pooling(vit: Build, pool: str) -> None:
    model = vit(global_pool=pool, fc_norm=False)
    model.fc_norm = torch.nn.LayerNorm(64, dtype=torch.float64)  # timm builds one of the two only
    for norm in (model.norm, model.fc_norm):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    assert difference(model, fuse(model)) <= 1e-12


def test_patches_that_are_not_square(vit: Build) -> None:
    model = vit()
    stem = PatchEmbed(img_size=(16, 30), patch_size=(8, 6), in_chans=2, embed_dim=64)  # type: ignore[arg-type]
    model.patch_embed = stem.double().eval()
    model.pos_embed = nn.Parameter(torch.randn(1, 11, 64, dtype=torch.float64))
    fused = fuse(model)
    assert fused.embed.table is not None
    assert difference(model, fused) <= 1e-12


class _Stem(PatchEmbed):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _change(**kwargs: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        conv = model.patch_embed.proj
        arguments = {"kernel_size": 4, "stride": 4, **kwargs}
        model.patch_embed.proj = nn.Conv2d(conv.in_channels, conv.out_channels, **arguments).double()

    return change


def _stem_of_its_own(model: Any) -> None:
    model.patch_embed.__class__ = _Stem


def _norm(model: Any) -> None:
    model.patch_embed.norm = nn.LayerNorm(64).double()


def _sequence(model: Any) -> None:
    model.patch_embed.proj = nn.Sequential(model.patch_embed.proj, nn.ReLU())


@pytest.mark.parametrize(
    ("kwargs", "change"),
    [
        ({}, _stem_of_its_own),
        ({}, _norm),
        ({}, _sequence),
        ({}, _change(kernel_size=3, padding=1)),
        ({}, _change(kernel_size=5, padding=2)),
        ({}, _change(kernel_size=2, dilation=3)),
        ({}, _change(padding=0, kernel_size=3)),
        ({"in_chans": 2}, _change(groups=2)),
        ({"img_size": 18}, None),  # timm leaves out the last two rows and columns
        ({"img_size": 18, "dynamic_img_pad": True, "pos_embed": "none"}, None),
        ({"img_size": 16, "dynamic_img_size": True, "dynamic_img_pad": True}, None),
    ],
    ids=[
        "own stem", "norm", "sequence", "overlap 3", "overlap 5", "dilated", "gaps", "groups", "odd size", "padded",
        "dynamic, padded",
    ],
)  # fmt: skip
def test_other_stems_stay_as_they_are(
    vit: Build, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any], change: Callable[[Any], None] | None
) -> None:
    calls = count_patchify(monkeypatch)
    model = vit(**kwargs)
    if change is not None:
        change(model)
    fused = fuse(model.eval())
    assert fused.embed.table is None and fused.embed.padded is None
    assert difference(model, fused) <= 1e-12
    assert not calls


def test_the_table_is_summed_before_it_is_rounded(vit: Build) -> None:
    model = vit().float()
    nn.init.normal_(model.patch_embed.proj.bias)
    fused = fuse(model, torch.bfloat16)
    expected = model.pos_embed.detach().clone()
    expected[:, :1] += model.cls_token
    expected[:, 1:] += model.patch_embed.proj.bias
    assert torch.equal(fused.embed.table, expected.bfloat16())


@pytest.mark.parametrize("patch", [4, 7])  # a view of the stem's weight, and a copy with zero columns
def test_what_is_derived_follows_the_weights(vit: Build, patch: int) -> None:
    model, other = (vit(patch_size=patch, img_size=4 * patch, in_chans=3) for _ in range(2))
    for p in other.parameters():
        nn.init.normal_(p, std=0.2)
    fused, wanted = fuse(model), fuse(other)
    x = torch.randn(2, 3, 4 * patch, 4 * patch, dtype=torch.float64)
    assert not any("table" in key or "padded" in key for key in fused.state_dict())
    with torch.no_grad():
        before, expected = fused.compute(x, KERNELS), wanted.compute(x, KERNELS)
        for assign in (False, True):
            loaded = fuse(model)
            loaded.load_state_dict(wanted.state_dict(), assign=assign)
            for form in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
                assert torch.equal(form.compute(x, KERNELS), expected)
        later = copy.deepcopy(fused)
        later.embed.load_state_dict(wanted.embed.state_dict())
        assert not torch.equal(later.compute(x, KERNELS), before)
        assert torch.equal(fused.compute(x, KERNELS), before)
        single = fused.float()
        assert single.embed.table.dtype == torch.float32
        assert single.compute(x, KERNELS).dtype == torch.float32
        torch.testing.assert_close(single.compute(x, KERNELS).double(), before, rtol=0, atol=1e-4)
        moved = fused.to("meta").embed
        assert moved.table.is_meta and (moved.padded is None or moved.padded.is_meta)


def test_gradients_of_images(vit: Build) -> None:
    model = vit(branches=2)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (got,) = torch.autograd.grad(fuse(model).compute(x, KERNELS).sum(), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_no_image(vit: Build) -> None:
    assert fuse(vit()).compute(torch.zeros(0, 3, 16, 16, dtype=torch.float64), KERNELS).shape == (0, 7)


@pytest.mark.parametrize("plan", [None, KERNELS])
@pytest.mark.parametrize("shape", [(2, 3, 16, 20), (2, 3, 20, 16), (2, 1, 16, 16), (3, 16, 16)])
def test_images_of_another_size_are_refused(vit: Build, plan: Plan | None, shape: tuple[int, ...]) -> None:
    said = f"`images` are {shape}; this model takes (B, 3, 16, 16): resize them, or fuse a model of their size"
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        fuse(vit()).compute(torch.zeros(shape, dtype=torch.float64), plan)


@pytest.mark.parametrize("plan", [None, KERNELS])
def test_images_that_are_no_whole_patches_are_refused(vit: Build, plan: Plan | None) -> None:
    fused = fuse(vit(dynamic_img_size=True))
    with pytest.raises(UsageError, match=r"^`images` are \(2, 3, 16, 18\); .* multiples of the patch, 4 × 4: resize"):
        fused.compute(torch.zeros(2, 3, 16, 18, dtype=torch.float64), plan)


def test_a_stem_without_a_size_takes_no_patches(vit: Build) -> None:
    stem = vit().patch_embed
    assert takes_patches(stem)
    stem.strict_img_size = False
    assert not takes_patches(stem)
    stem.strict_img_size, stem.img_size = True, None
    assert not takes_patches(stem)


def test_an_exporter_s_symbolic_size_is_resampled_in_the_graph() -> None:
    model = timm.create_model("test_vit", dynamic_img_size=True, img_size=64, num_classes=3).eval().double()
    fused = fuse(model)
    patch = model.patch_embed.patch_size[0]
    height, width = (patch * torch.export.Dim(name, min=2, max=9) for name in ("rows", "columns"))
    program = torch.export.export(
        fused, (torch.randn(1, 3, 3 * patch, 5 * patch).double(),), dynamic_shapes=({2: height, 3: width},)
    )
    for size in ((4, 4), (7, 2)):
        images = torch.randn(1, 3, *(n * patch for n in size), dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(images), model(images), rtol=1e-10, atol=1e-12)

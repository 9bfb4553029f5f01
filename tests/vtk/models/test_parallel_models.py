"""Parallel models by name, against timm's own classes and the paper's sizes."""

from functools import partial

import pytest
import timm
import torch
from timm.models.vision_transformer import Block, ParallelThingsBlock

from vtk.card import ModelSpec
from vtk.errors import DataError, UsageError
from vtk.models import parallel_models as parallel
from vtk.models.create import build_model
from vtk.models.inputs import blank_model, check_size
from vtk.models.weights.hub import hub_base
from vtk.runtime.opening import open_source


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("vit_small_patch16_18x2_224", 64_665_448),  # timm's own
        ("vit_small_patch16_12x3_224", 64_665_448),  # the same 36 pairs of residual layers
        ("vit_base_patch16_9x4_224", 256_731_880),
    ],
)
def test_the_papers_models_of_36_pairs_have_their_known_sizes(name: str, count: int) -> None:
    assert sum(p.numel() for p in blank_model(name).parameters()) == count


@pytest.mark.parametrize(
    ("size", "width", "heads"), [("tiny", 192, 3), ("small", 384, 6), ("base", 768, 12), ("large", 1024, 16)]
)
def test_any_shape_is_what_timm_builds_by_hand(size: str, width: int, heads: int) -> None:
    with torch.device("meta"):
        by_hand = timm.create_model(
            f"vit_{size}_patch16_224", depth=2, init_values=1e-5, block_fn=partial(ParallelThingsBlock, num_parallel=5)
        )
    model = blank_model(f"vit_{size}_patch16_2x5_224")
    state, expected = model.state_dict(), by_hand.state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in expected.items()}
    assert model.embed_dim == width
    assert model.blocks[0].attns[4].attn.num_heads == heads
    for key in ("mean", "std", "input_size", "crop_pct", "classifier", "first_conv"):
        assert model.pretrained_cfg[key] == blank_model("vit_small_patch16_18x2_224").pretrained_cfg[key]
    assert model.pretrained_cfg["architecture"] == f"vit_{size}_patch16_2x5_224"


def test_layer_scale_starts_as_in_the_papers_code_and_one_branch_is_a_plain_block() -> None:
    wide = build_model("vit_tiny_patch16_1x2_224", num_classes=2, pretrained=False, img_size=32).model
    assert torch.equal(wide.blocks[0].ffns[1].ls.gamma, torch.full((192,), 1e-4))
    one = blank_model("vit_tiny_patch16_3x1_224")
    assert [type(b) for b in one.blocks] == [Block] * 3
    assert "blocks.2.ls2.gamma" in one.state_dict()


def test_timm_lists_the_papers_shapes_and_learns_others_when_asked() -> None:
    listed = set(timm.list_models("vit_*"))
    assert {f"vit_{s}_patch16_{x}_224" for s in parallel.SIZES for x in ("6x2", "12x2", "12x3", "9x4")} <= listed
    assert "vit_tiny_patch16_4x7_224" not in listed
    check_size("vit_tiny_patch16_4x7_224.untrained", None)
    assert "vit_tiny_patch16_4x7_224" in timm.list_models("vit_*")
    features = timm.create_model("vit_tiny_patch16_4x7_224", features_only=True, depth=2, out_indices=[1])
    assert features.feature_info.channels() == [192]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_small_patch16_0x2_224", "0 blocks of 2 branches; give at least 1 of each"),
        ("vit_small_patch16_2x0_224", "2 blocks of 0 branches"),
        ("vit_small_patch16_10000x2_224", "at most 256"),
        ("vit_small_patch16_129x2_224", "at most 256"),
        ("vit_small_patch16_012x2_224", "without leading zeros"),
        ("vit_small_patch16_12x2_384", r"parallel models are called vit_\{tiny,.*another image size is --img-size"),
        ("vit_small_patch14_12x2_224", "patch_size=14"),
        ("vit_huge_patch16_12x2_224", r"parallel models are called vit_\{tiny,small,base,large\}"),
        (f"vit_small_patch16_{'9' * 30}x2_224", "parallel models are called"),
    ],
)
def test_impossible_names_are_one_line(name: str, message: str) -> None:
    for resolve in (open_source, lambda n: build_model(n, num_classes=2)):
        with pytest.raises(UsageError, match=message) as caught:
            resolve(name)
        assert "\n" not in str(caught.value)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(UsageError, match="vit_small_patch16_12x3_224"):
        blank_model("vit_smal_patch16_12_3_224")


def test_every_way_to_a_model_knows_the_name() -> None:
    name = "vit_tiny_patch16_2x3_224"
    assert open_source(name, pretrained=False, num_classes=2, img_size=32).model().blocks[1].num_parallel == 3
    with pytest.raises(DataError, match="the hub has no weights for `vit_tiny_patch16_2x3_224`; give --weights"):
        hub_base(name, {})


@pytest.mark.parametrize(
    ("spec", "depth", "branches", "expected"),
    [
        (ModelSpec("vit_small_patch16_224.augreg_in1k"), 12, 2, ("vit_small_patch16_6x2_224", {"init_values": 0.0})),
        (ModelSpec("vit_base_patch16_384"), 12, 3, ("vit_base_patch16_4x3_224", {"init_values": 0.0})),
        (ModelSpec("vit_small_patch16_36x1_224"), 36, 2, ("vit_small_patch16_18x2_224", {})),
        (
            ModelSpec("vit_tiny_patch16_224", {"depth": 4, "embed_dim": 64, "init_values": 0.1}), 4, 2,
            ("vit_tiny_patch16_2x2_224", {"init_values": 0.1, "embed_dim": 64}),
        ),
        (ModelSpec("vit_small_patch14_dinov2"), 12, 2, None),
        (ModelSpec("vit_small_patch16_18x2_224"), 18, 2, None),
    ],
)  # fmt: skip
def test_which_name_a_parallelized_model_has(spec: ModelSpec, depth: int, branches: int, expected: object) -> None:
    found = parallel.parallel_spec(spec, depth, branches)
    assert (found and (found.name, found.kwargs)) == expected

"""Coverage of timm's plain ViTs: what is taken computes what timm does, what is not is refused by name."""

import functools
import re
from typing import Any

import pytest
import timm
import torch
from torch import nn

from tests.vtk.families import _census as census
from tests.vtk.fused.conftest import randomize
from vtk.fused import fuse
from vtk.fused.stages import Plan

ONE_OF_EACH = {
    "vit_tiny_patch16_224": "",
    "vit_base_patch16_224_miil": "",  # no bias of qkv
    "vit_medium_patch16_gap_240": "",  # LayerScale, no bias of qkv
    "vit_base_patch32_clip_quickgelu_224": "",
    "vit_base_patch32_plus_256": "",  # LayerScale
    "vit_base_patch16_rpn_224": "fuse bank memory",  # norms behind attention and FFN
    "vit_small_patch16_18x2_224": "",
    "vit_base_patch16_xp_224": "bank memory",  # attention and FFN in one matrix
    "vit_giant_patch14_dinov2": "",
    "vit_base_patch32_siglip_256": "",
    "vit_dwee_patch16_reg1_gap_256": "fuse bank memory",  # differential attention
    "vit_pwee_patch16_reg1_gap_256": "bank memory",
    "vit_dpwee_patch16_reg1_gap_256": "fuse bank memory",
    "aimv2_large_patch14_224": "",
    "test_vit4": "",
    "beit3_base_patch16_224": "",
    "deit_tiny_distilled_patch16_224": "",
    "eva_giant_patch14_224": "",
    "eva02_tiny_patch14_224": "",
    "eva02_base_patch14_224": "",
    "eva02_base_patch16_clip_224": "",
    "eva02_enormous_patch14_clip_224": "fuse bank memory",  # norms behind attention and FFN
    "vit_medium_patch16_rope_reg1_gap_256": "",
    "vit_mediumd_patch16_rope_reg1_gap_256": "",
    "vit_pe_core_tiny_patch16_384": "",
    "vit_pe_lang_large_patch14_448": "",
    "vit_tiny_patch16_dinov3_qkvb": "",
    "vit_small_patch16_dinov3": "",
    "vit_small_plus_patch16_dinov3": "",
    "vit_small_plus_patch16_dinov3_qkvb": "",
    "vit_base_patch16_sapiens2": "",
    "vit_large_patch16_sapiens2": "",
    "beit_base_patch16_224": "",
    "vit_relpos_base_patch32_plus_rpn_256": "fuse bank memory",
    "vit_relpos_base_patch16_plus_240": "",
    "vit_relpos_small_patch16_224": "",
    "vit_srelpos_small_patch16_224": "",
    "vit_relpos_small_patch16_rpn_224": "fuse bank memory",
    "naflexvit_base_patch16_gap": "",
    "naflexvit_so150m2_patch16_reg1_gap": "",
    "naflexvit_base_patch16_siglip": "",
    "naflexvit_huge_patch16_radio_v3": "",
    "samvit_base_patch16": "fuse bank memory",
    "levit_128s": "fuse bank memory",
    "levit_512": "fuse bank memory",
}
"""An architecture of each signature, and which engines refuse all of that signature."""

FUSED = [name for name, refusing in ONE_OF_EACH.items() if "fuse" not in refusing]


def is_one_line_with_a_part(why: str) -> bool:
    """Whether a refusal is one line that names a part or a class and says what to do."""
    return "\n" not in why and bool(re.search(r"`[\w.]+`|[A-Z]\w+", why)) and len(why.split(";")) > 1


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_of_each_signature_is_taken_or_refused_by_the_name_of_a_part(name: str) -> None:
    refusals = census.support(census.blank(name, depth=1)).refusals
    assert set(refusals) == set(ONE_OF_EACH[name].split()), refusals
    assert all(is_one_line_with_a_part(why) for why in refusals.values())


def small(name: str) -> tuple[nn.Module, tuple[int, int]]:
    """Return an architecture of two blocks of 64 channels in fp64, and a size of images that is not square."""
    shape: Any = census.blank(name, depth=1)
    kwargs: dict[str, Any] = {"depth": 2, "num_classes": 5, "embed_dim": 64, "num_heads": 2}
    if name.endswith("sapiens2"):
        kwargs["num_kv_heads"] = (1, 2)
    if "giant_patch14" in name and "dinov2" in name:
        kwargs["mlp_ratio"] = 4  # an odd number of hidden channels cannot be halved
    if name == "vit_base_mci_224":  # its stem is the width of the model
        del kwargs["embed_dim"], kwargs["num_heads"]
    size = (32, 48)
    if hasattr(shape, "patch_embed"):
        patch = shape.patch_embed.feat_ratio()
        size = kwargs["img_size"] = (2 * patch, 3 * patch)
    return randomize(timm.create_model(name, **kwargs)), size


def difference(name: str) -> float:
    """Largest error relative to the largest logit, of torch's plan and of the kernels' (its operations in torch)."""
    model, size = small(name)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    fused = fuse(model, keep_source=False)
    with torch.no_grad():
        expected = model(x)
        found = fused(x), fused.compute(x, Plan(kernels=True)), fused.compute(x, Plan(kernels=True, ln_folded=True))
    return max(float((y - expected).abs().max() / expected.abs().max()) for y in found)


@pytest.mark.parametrize("name", FUSED)
def test_one_of_each_signature_fused_is_timms_model(name: str) -> None:
    assert difference(name) <= 1e-12


@functools.cache
def distinct() -> dict[Any, list[str]]:
    """Group all architectures, each built as it is, by blocks and ends."""
    groups: dict[Any, list[str]] = {}
    for name in census.architectures():
        model = census.blank(name)
        groups.setdefault((census.signature(model), census.ends(model)), []).append(name)
    return groups


@pytest.mark.slow
def test_every_signature_is_among_those_looked_at_by_default() -> None:
    groups = distinct()
    looked_at = {census.signature(census.blank(name)) for name in ONE_OF_EACH}
    assert not [names[0] for (blocks, _), names in groups.items() if blocks not in looked_at]
    assert len(looked_at) == len(ONE_OF_EACH)


@pytest.mark.slow
def test_every_kind_of_stem_pooling_and_head_fused_is_timms_model() -> None:
    taken = {census.signature(census.blank(name)) for name in FUSED}
    others = [names[0] for (blocks, _), names in distinct().items() if blocks in taken]
    assert len(others) > 70
    wrong = {name: error for name in others if name not in FUSED and not (error := difference(name)) <= 1e-12}
    assert not wrong


@pytest.mark.slow
def test_fuse_takes_445_of_476_sets_of_weights_and_bank_and_memory_modes_420() -> None:
    if timm.__version__ != "1.0.31":
        pytest.skip("the bounds were set for timm 1.0.31")
    sets = census.architectures()
    every = sum(sets.values())
    assert every == 476
    taken = dict.fromkeys(census.Support._fields, every)
    for names in distinct().values():
        for engine, why in census.support(census.shorten(census.blank(names[0]))).refusals.items():
            taken[engine] -= sum(sets[name] for name in names)
            assert is_one_line_with_a_part(why)
    assert taken["fuse"] >= 445 and taken["bank"] >= 420 and taken["memory"] >= 420, taken

"""Tables that follow from parameters: one that changes in place is seen at the next call, also by a copy."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.eva import Eva
from torch import Tensor

from tests.vtk.fused.conftest import randomize
from vtk.fused import FusedViT, fuse
from vtk.fused.sizes import Derived
from vtk.fused.stages import Plan

SMALL: dict[str, Any] = {"img_size": 20, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": 5}


def named(name: str, **kwargs: Any) -> Callable[[int], Any]:
    return lambda seed: randomize(timm.create_model(name, **SMALL | kwargs), seed)


def mixed(seed: int) -> Any:
    model = Eva(**SMALL, patch_size=5, use_rot_pos_emb=True, attn_type="rope", rope_type="mixed")
    freqs = model.rope.freqs.detach().double() * (1 + seed)
    randomize(model, seed)
    model.rope.freqs.data = freqs
    return model


def naflex(seed: int) -> Any:
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=24, num_heads=2, num_classes=5)
    return randomize(model, seed)


MODELS = {
    "positions, stem and prefix": named("vit_small_patch16_224", patch_size=5),
    "positions of any size": named("vit_small_patch16_224", patch_size=5, dynamic_img_size=True),
    "rotary frequencies": mixed,
    "relative positions": named("beit_base_patch16_224", patch_size=5),
    "NaFlex": naflex,
}


def overwrite(fused: FusedViT, model: Any) -> None:
    """Give a fused model another one's values, in place and without its `load_state_dict`."""
    values = fuse(model).state_dict()
    with torch.no_grad():
        for name, value in fused.state_dict(keep_vars=True).items():
            value.copy_(values[name])


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_tables_follow_parameters_that_change_in_place_and_so_do_those_of_a_copy(
    build: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = build(0), build(1)
    fused = fuse(model)
    x = torch.randn(1, 3, *fused.image_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    copied = copy.deepcopy(fused)

    def calls(fused: FusedViT) -> list[Tensor]:
        return [fused.compute(x, plan) for plan in (Plan(False), Plan(True))]

    with torch.no_grad():
        before, expected = model(x), other(x)
        assert float((before - expected).abs().max()) > 1e-3
        for y in (*calls(fused), *calls(copied)):
            torch.testing.assert_close(y, before, rtol=1e-10, atol=1e-10)
        overwrite(fused, other)
        for y in calls(fused):
            torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        overwrite(copied, other)
        copied.prepare(x)  # all that happens before a CUDA graph is replayed
        monkeypatch.setattr(Derived, "follow", lambda part: None)
        for y in calls(copied):
            torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_a_moved_model_keeps_its_tables_until_a_parameter_changes() -> None:
    fused, x = fuse(MODELS["positions, stem and prefix"](0)).float(), torch.zeros(1, 3, 20, 20)
    embed: Any = fused.embed
    table, kept = embed.table, embed.table.clone()
    fused(x)
    assert embed.table is table and torch.equal(table, kept)
    other: Any = copy.deepcopy(fused)  # made anew in fp32 the sums would be others
    other(x)
    assert torch.equal(other.embed.table, kept)
    with torch.no_grad():
        embed.prefix.add_(1)
    fused(x)
    assert embed.table is table and torch.equal(table[:, :1], kept[:, :1] + 1)

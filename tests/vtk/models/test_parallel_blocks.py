"""Blocks joined in parallel, against the paper's equations and against the model that timm builds."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock
from torch import nn

from vtk.card import Card, Transform
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model, check_transforms
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.models.transforms.parallel_blocks import parallel_key, parallelize
from vtk.packs.load import card_metadata, load_checkpoint

SMALL: dict[str, Any] = {"embed_dim": 32, "num_heads": 2, "num_classes": 5, "img_size": 32}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled and normed": {"init_values": 0.3, "qk_norm": True, "qkv_bias": False},
    "registers, mean": {"reg_tokens": 2, "global_pool": "avg", "no_embed_class": True},
}
JOIN = Transform("parallelize", {"branches": 2})


def sequential(depth: int = 6, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=depth, **SMALL, **kwargs)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model.double().eval()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("branches", [2, 3, 6])
def test_it_is_equation_2_of_the_paper(options: dict[str, Any], branches: int) -> None:
    model = sequential(**options)
    joined, images = copy.deepcopy(model), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    parallelize(joined, branches=branches)
    with torch.no_grad():
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for start in range(0, 6, branches):
            group = model.blocks[start : start + branches]
            x = x + sum(b.ls1(b.attn(b.norm1(x))) for b in group)
            x = x + sum(b.ls2(b.mlp(b.norm2(x))) for b in group)
        expected = model.forward_head(model.norm(x))
        torch.testing.assert_close(joined(images), expected, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(joined(images), model(images))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_timm_loads_the_result_strictly_and_computes_the_same(options: dict[str, Any]) -> None:
    model = sequential(**options, drop_path_rate=0.1)
    key_map = parallelize(model, branches=3)
    block = partial(ParallelThingsBlock, num_parallel=3)
    plain = timm.create_model("vit_tiny_patch16_224", depth=2, block_fn=block, **SMALL, **options).double().eval()
    plain.load_state_dict(model.state_dict(), strict=True)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-12, atol=1e-13)
    assert key_map["blocks.1.ffns.2.mlp.fc1.weight"] == "blocks.5.mlp.fc1.weight"
    assert key_map["blocks.0.attns.1.norm.bias"] == "blocks.1.norm1.bias"
    assert [i["module"] for i in model.feature_info] == ["blocks.0", "blocks.1"]
    assert not model.training and all(not m.training for m in model.modules())


def test_every_tensor_keeps_its_values() -> None:
    model = sequential()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    key_map = parallelize(model, branches=2)
    state = model.state_dict()
    assert sorted(key_map.values()) == sorted(before)
    assert all(torch.equal(state[new], before[str(old)]) for new, old in key_map.items())
    assert all(parallel_key(str(old), 2) == new for new, old in key_map.items())


@pytest.mark.parametrize(
    ("build", "branches", "message"),
    [
        (sequential, 4, "`branches` is 4; a depth of 6 can be divided by 2, 3, 6"),
        (sequential, 1, "`branches` is 1"),
        (sequential, "2", "`branches` is '2'"),
        (partial(sequential, depth=1), 2, "none: there is only one block"),
        (partial(sequential, block_fn=ParallelThingsBlock), 2, r"blocks\.0 of VisionTransformer is already parallel"),
        (partial(sequential, block_fn=ParallelScalingBlock), 2, r"blocks\.0 .* is a ParallelScalingBlock; only"),
        (partial(timm.create_model, "resnet18"), 2, "ResNet cannot be parallelized"),
    ],
)
def test_what_cannot_be_joined_is_refused_by_name(build: Any, branches: Any, message: str) -> None:
    model = build()
    names = list(model.state_dict())
    with pytest.raises(UsageError, match=message):
        parallelize(model, branches=branches)
    assert list(model.state_dict()) == names


def test_broadcasting_comes_after_joining() -> None:
    model = sequential()
    add_context_broadcast(model, layers=[3])
    with pytest.raises(UsageError, match=r"blocks\.3 has Context Broadcasting; parallelize first"):
        parallelize(model, branches=2)
    broadcast = Transform("add_context_broadcast", {"scale": True, "layers": "upper"})
    check_transforms("test_vit", (JOIN, broadcast))
    with pytest.raises(UsageError, match="parallelize first"):
        check_transforms("test_vit", (broadcast, JOIN))


def checkpoint(path: Path, *transforms: Transform) -> Path:
    """A merged checkpoint of test_vit with its transforms, and factors that were trained."""
    created = build_model("test_vit", num_classes=5, pretrained=False, transforms=transforms)
    state = {k: torch.randn_like(v) if k.endswith(".scale") else v for k, v in created.model.state_dict().items()}
    card = Card(created.spec, created.input, tuple("abcde"), transforms=created.transforms)
    save_file(state, path, metadata=card_metadata(card))
    return path


def test_a_joined_file_is_the_same_base_as_the_one_it_was_made_of(tmp_path: Path) -> None:
    file, original = checkpoint(tmp_path / "joined.safetensors", JOIN), checkpoint(tmp_path / "original.safetensors")
    joined = build_model("test_vit", num_classes=5, weights=file, transforms=(JOIN,))
    assert joined.base.ref.id == build_model("test_vit", num_classes=5, weights=original).base.ref.id
    assert joined.notes == [] and set(joined.initial) == {"pos_embed", "head.weight", "head.bias"}
    want = load_checkpoint(file).model.state_dict()
    assert all(torch.equal(v, want[k]) for k, v in joined.model.state_dict().items())
    unasked = build_model("test_vit", num_classes=5, weights=file)
    assert unasked.transforms == (JOIN,)
    assert unasked.notes == [f"{file} was made with `parallelize` {{'branches': 2}}, and so is this model"]
    assert all(torch.equal(v, want[k]) for k, v in unasked.model.state_dict().items())


def test_trained_factors_of_a_file_are_where_training_starts(tmp_path: Path) -> None:
    broadcast = Transform("add_context_broadcast", {"scale": True, "layers": "all"})
    file = checkpoint(tmp_path / "cb.safetensors", JOIN, broadcast)
    again = build_model("test_vit", num_classes=5, weights=file, transforms=(JOIN, broadcast))
    want = load_checkpoint(file).model.state_dict()
    scales = [k for k in want if k.endswith(".scale")]
    assert scales == [f"blocks.{i}.cb.scale" for i in range(len(scales))] and len(scales) == 3
    assert all(torch.equal(again.model.state_dict()[k], want[k]) and float(want[k].abs().sum()) for k in scales)
    assert set(scales) <= again.initial.keys() and not set(scales) & again.base.hashes.keys()
    other = Transform("add_context_broadcast", {"scale": True, "layers": "upper"})
    with pytest.raises(DataError, match="was made with `add_context_broadcast`"):
        build_model("test_vit", num_classes=5, weights=file, transforms=(JOIN, other))
    with pytest.raises(DataError, match="does not fit --model"):
        build_model("vit_tiny_patch16_224", num_classes=5, weights=file, kwargs={"depth": 3}, transforms=(JOIN,))

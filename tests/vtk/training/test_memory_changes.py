"""A block that is changed behind the engine's back runs its own forward pass again: what is new in it must count."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vtk.training.finetune_config import MODES
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.frozen_ffn.rules import is_as_chosen

modes = pytest.mark.parametrize("mode", MODES)


class Adapter(nn.Module):
    """A linear layer with a low-rank addition, which shows the weight and bias of the layer it is around."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1, dtype=torch.float64))
        self.up = nn.Parameter(torch.full((base.out_features, 2), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return y


def make() -> Any:
    torch.manual_seed(0)
    model = VisionTransformer(img_size=32, patch_size=16, embed_dim=32, num_heads=2, depth=2, num_classes=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attn" in name or name.startswith("head") or name == "pos_embed")
    return model.double().train()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, dtype=torch.float64)


def _adapt(model: Any) -> None:
    block = model.blocks[0]
    block.mlp.fc1, block.attn.qkv = Adapter(block.mlp.fc1), Adapter(block.attn.qkv)


def _drop(model: Any) -> None:
    for block in model.blocks:
        block.attn.attn_drop.p = block.mlp.drop1.p = 0.5


def _rescale(model: Any) -> None:
    for block in model.blocks:
        block.attn.fused_attn, block.attn.scale = False, 1.0


def _gate(model: Any) -> None:
    torch.manual_seed(1)
    for block in model.blocks:
        block.attn.gate = nn.Sequential(nn.Linear(32, 32)).double()


@modes
@pytest.mark.parametrize("change", [_adapt, _drop, _rescale, _gate])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_a_changed_block_computes_what_timm_computes(
    mode: Any, change: Callable[[Any], None], before: bool, images: Tensor
) -> None:
    plain = make()
    change(plain)
    model = make()
    if before:
        change(model)
    apply_memory_mode(model, mode)
    if not before:
        change(model)
    found = []
    for each in (model, plain):
        torch.manual_seed(2)
        each(images).square().sum().backward()
        found.append({n: p.grad for n, p in each.named_parameters() if p.requires_grad})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        got = found[0][name]
        assert (grad is None) == (got is None), name
        if grad is not None and got is not None:
            allowed = 5e-2 if mode == "act8" else 1e-12  # a block that is as it was follows the mode
            assert float((got - grad).norm()) <= allowed * max(float(grad.norm()), 1e-6), name


@modes
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_hooks_are_called(mode: Any, before: bool, images: Tensor) -> None:
    model = make()
    called: list[str] = []
    names = ("attn", "attn.qkv", "norm1", "norm2", "mlp", "mlp.fc1")

    def watch() -> None:
        for name in names:
            model.blocks[0].get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))

    if before:
        watch()
    apply_memory_mode(model, mode)
    if not before:
        watch()
    model(images)
    assert sorted(called) == sorted(names)


@modes
def test_copies_and_pickles_keep_the_mode(mode: Any, images: Tensor) -> None:
    model = make()
    assert apply_memory_mode(model, mode).changed == 2
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(is_as_chosen(block, block.memory_parts) for block in each.blocks)
        assert all(part[0] is not other[0] for part, other in zip(
            each.blocks[0].memory_parts, model.blocks[0].memory_parts, strict=True
        ))  # fmt: skip
        assert torch.equal(each(images), model(images))


@modes
def test_tangents_are_not_lost(mode: Any, images: Tensor) -> None:
    model = make()
    _rescale(model)  # torch's fused attention has no forward mode on the CPU
    expected = torch.func.jvp(model, (images,), (images,))[1]
    apply_memory_mode(model, mode)
    assert torch.equal(torch.func.jvp(model, (images,), (images,))[1], expected)


@modes
def test_autocast_leaves_fp64_alone(mode: Any, images: Tensor) -> None:
    model = make()
    apply_memory_mode(model, mode)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images).dtype == torch.float64


def test_a_head_alone_is_said_in_one_piece() -> None:
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    note = apply_memory_mode(model, "minimal").note
    assert note == (
        "--memory minimal changes nothing: no weight at or before the blocks is trained, so nothing is kept for them"
    )

"""Fusions of the memory modes: norms folded into frozen layers, additions into the norms behind them."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from timm.layers import set_reentrant_ckpt
from torch.utils._python_dispatch import TorchDispatchMode

from tests.vtk.training.test_memory_gradients import build, gradients, worst
from vtk.training.engine.precision import Bf16
from vtk.training.finetune_config import MODES
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.frozen_ffn.estimate import footprints
from vtk.training.frozen_ffn.fold import folded
from vtk.training.frozen_ffn.norm import add_normalise
from vtk.training.frozen_ffn.parts import NormForm


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_addition_and_norm_and_their_gradient(tiny):
    generator = torch.Generator().manual_seed(0)
    for dtype, limit in ((torch.float64, 1e-13), (torch.bfloat16, 2e-2)):
        x, r, gy, gh = (torch.randn(3, 5, 32, generator=generator, dtype=torch.float64) for _ in range(4))
        theirs = x.clone().requires_grad_(), r.clone().requires_grad_()
        y = theirs[0] + theirs[1]
        h = F.layer_norm(y, (32,), eps=1e-6)
        expected = torch.autograd.grad([y, h], theirs, [gy, gh])
        ours = x.to(dtype).requires_grad_(), r.to(dtype).requires_grad_()
        found = add_normalise(*ours, NormForm(1e-6, False))
        back = torch.autograd.grad(found, ours, [gy.to(dtype), gh.to(dtype)])
        for a, b in zip((*found, *back), (y, h, *expected), strict=True):
            assert a.dtype == dtype and float((a.detach().double() - b.detach()).norm() / b.detach().norm()) <= limit
        only = torch.autograd.grad(add_normalise(*ours, NormForm(1e-6, False))[1], ours[0], gh.to(dtype))[0]
        alone = torch.autograd.grad(F.layer_norm(theirs[0] + theirs[1], (32,), eps=1e-6), theirs[0], gh)[0]
        assert float((only.double() - alone).norm() / alone.norm()) <= limit


@pytest.mark.parametrize("mode", MODES)
def test_a_step_has_no_addition_and_no_affine_part_that_could_be_fused(tiny, mode):
    """Two blocks: the first norm stands alone, and the last residual is added alone; qkv is trained and keeps its γ."""
    model = build(tiny)
    apply_memory_mode(model, mode)
    tokens = torch.randn(2, 10, 32, dtype=torch.float64)
    model.blocks(tokens)  # folds
    with Count() as count:
        y = model.blocks(tokens)
    names = count.names
    assert names["vtk_training::normalise"] == 1 and names["vtk_training::add_normalise"] == 3
    assert names["aten::add.Tensor"] == 1 and names["aten::addcmul"] == names["aten::mul.Tensor"] == 0
    with Count() as count:
        y.sum().backward()
    assert count.names["vtk_training::add_normalise_backward"] == 3
    affine = {n: p for n, p in model.named_parameters() if "norm2" in n}
    assert len(affine) == 4 and all(p.grad is None for p in affine.values())


@pytest.mark.parametrize("mode", ["plain", "recompute"])
def test_what_is_folded_follows_the_weights(tiny, mode):
    model = build(tiny)
    apply_memory_mode(model, mode)
    gradients(model)
    changes = [
        lambda m: torch.nn.init.normal_(m.blocks[0].norm2.weight, 1.0, 0.3),
        lambda m: m.load_state_dict({"blocks.1.mlp.fc1.bias": torch.ones(128)}, strict=False),
        lambda m: setattr(m.blocks[1].norm2.bias, "data", torch.full((32,), 0.5, dtype=torch.float64)),
        lambda m: m.blocks[0].norm2.weight.requires_grad_(True),
        lambda m: m.blocks[1].mlp.fc1.weight.requires_grad_(True),
    ]
    for change in changes:
        torch.manual_seed(0)
        change(model)
        model.zero_grad()
        fresh = copy.deepcopy(model)
        apply_memory_mode(fresh, "plain")
        for block in fresh.blocks:  # timm's own forward pass
            block.memory_parts = ()
        assert worst(gradients(model)[1], gradients(fresh)[1]) <= 1e-13


@pytest.mark.parametrize("again", [True, False])
def test_a_block_that_is_computed_again_leaves_nothing_beside_its_output(tiny, again):
    """What lay there would be kept until backward, which gradient checkpointing is there to avoid."""
    model = build(tiny)
    apply_memory_mode(model, "plain")
    inputs = []
    model.blocks[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    set_reentrant_ckpt(False)
    model.set_grad_checkpointing(again)
    gradients(model)
    assert [hasattr(x, "vtk_normed") for x in inputs] == [False, False] if again else [True]


def test_what_is_folded_is_rounded_once_and_is_no_tensor_of_the_model(tiny):
    model = build(tiny).float()
    before = copy.deepcopy(model.state_dict())
    precision = Bf16()
    precision.prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    apply_memory_mode(model, "recompute")
    block = model.blocks[0]
    model(torch.randn(2, 3, 48, 48)).float().sum().backward()
    (weight,), bias = folded(block.norm2, (block.mlp.fc1,), torch.bfloat16)
    again = folded(block.norm2, (block.mlp.fc1,), torch.bfloat16)
    assert weight is again[0][0] and bias is again[1]
    fc1, norm = block.mlp.fc1, block.norm2
    exact = fc1.weight.double() * norm.weight.double(), fc1.bias.double() + fc1.weight.double() @ norm.bias.double()
    for found, wanted in zip((weight, bias), exact, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=2**-8, atol=1e-4)
    saved = precision.master_state_dict(model)
    assert saved.keys() == before.keys() and all(torch.equal(saved[n], t) for n, t in before.items())


def test_what_is_folded_counts_as_memory_that_does_not_depend_on_the_batch(tiny):
    model = build(tiny).float()
    found = {f.mode: f for f in footprints(model, (3, 48, 48), "bf16", modes=("plain", "minimal"))}
    layers = 2 * 2 * 128 * 32  # of two blocks, in two bytes
    assert all(layers <= f.constant for f in found.values())


def test_a_hook_or_an_addition_between_blocks_is_seen(tiny):
    """The norm that a block leaves beside its output is of that output, as it was."""
    channels = torch.linspace(-1, 1, 32, dtype=torch.float64)
    for change in (lambda y: y + channels, lambda y: y.add_(channels)):
        models = build(tiny), build(tiny)
        apply_memory_mode(models[0], "minimal")
        for model in models:
            model.blocks[0].register_forward_hook(lambda module, args, y: change(y))  # noqa: B023
        (_, ours), (_, theirs) = map(gradients, models)
        assert worst(ours, theirs) <= 1e-13

"""Memory that each mode keeps for backward, in units of C elements per token and block, counted to the byte."""

from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ParallelThingsBlock

from vtk.models.meta_model import shapes_only
from vtk.training.engine.precision import Bf16
from vtk.training.finetune_config import MODES
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.frozen_ffn.estimate import kept_bytes, tensors_of
from vtk.training.policies import policy

BOUNDS = {"plain": 11.3, "act8": 8.3, "recompute": 6.3, "minimal": 3.3}


def kept(mode, depth, batch, *, size, regime="bf16", compiled=None, width=768, **kwargs):
    sizes = {"embed_dim": width, "num_heads": width // 64, "img_size": size, "depth": 1, "num_classes": 10}
    with shapes_only():  # no value matters here
        model = timm.create_model("vit_base_patch16_224", **{**sizes, **kwargs})
    model.to_empty(device="cpu")
    for tensor in tensors_of(model):
        tensor.detach().zero_()
    policy.apply(model, policy.select(model, "full" if mode == "full" else "attn"))
    model.train()
    if mode in MODES:
        apply_memory_mode(model, mode)
    model.blocks = model.blocks[:depth]
    if regime == "bf16":
        Bf16().prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    if compiled:
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(fullgraph=True, backend=compiled)
    images, labels = torch.randn(batch, 3, size, size), torch.arange(batch)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=regime == "autocast"):
            return F.cross_entropy(model(images).float(), labels)

    return kept_bytes(run, tensors_of(model))


def units(mode, *, size=64, bytes_each=2, width=768, **options):
    """Only what a block keeps per image is left of the four counts, of a model with one block and one with none."""
    count = partial(kept, mode, size=size, width=width, **options)
    tokens = (size // 16) ** 2 + 1
    return (count(1, 2) - count(1, 1) - count(0, 2) + count(0, 1)) / (tokens * width * bytes_each)


@pytest.mark.parametrize("mode", MODES)
def test_bf16_regime(mode):
    assert units(mode) <= BOUNDS[mode]


def test_full_fine_tuning_keeps_sixteen():
    assert units("full", width=128) == pytest.approx(16.0, abs=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_keeps_no_more(mode):
    assert units(mode, regime="autocast", width=128) <= BOUNDS[mode] < 13.2


def test_fp32():
    """A byte is a quarter of an element then."""
    found = [round(units(mode, regime="fp32", bytes_each=4, width=128), 1) for mode in MODES]
    assert found == [10.0, 7.0, 6.0, 3.0]


@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_keep_no_more(mode):
    """The compiler's partitioner must not keep what a mode means to compute again."""
    assert units(mode, compiled="aot_eager_decomp_partition", width=128) <= BOUNDS[mode]


def test_parallel_branches_share_their_norm():
    block = partial(ParallelThingsBlock, num_parallel=2)
    assert [round(units(m, block_fn=block, width=128), 1) for m in MODES] == [18.1, 14.1, 10.1, 4.1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiled", [None, "inductor"])
def test_at_384_pixels(mode, compiled):
    assert units(mode, size=384, compiled=compiled) <= BOUNDS[mode]


def test_frozen_attention_keeps_no_input_of_its_projections():
    """Policy head with a trained Λ: gradients pass through, no weight of a block is trained."""
    from vtk.models.transforms.context_layers import add_context_broadcast

    found = {}
    for mode in ("by torch", *MODES):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
        add_context_broadcast(model, scale=True, layers=[0])
        policy.apply(model, policy.select(model, "head"))
        model.train()
        if mode in MODES:
            apply_memory_mode(model, mode)
        one, two = (
            kept_bytes(lambda m=model, n=n: m(torch.randn(n, 3, 32, 32)).sum(), tensors_of(model)) for n in (1, 2)
        )
        found[mode] = two - one  # layers with the norm before them folded in are there once, for all images
    assert found["minimal"] < found["recompute"] < found["act8"] < found["plain"] <= found["by torch"]

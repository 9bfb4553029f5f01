"""Packed rows against timm's blocks image by image: loop and operators, padding, gradients, refusals."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models import add_context_broadcast
from vtk.models.packed.forward import Layer, Segments, attention_modules, own_parameters, packed_forward

DIM = 32
IMAGES = ((0, 2, 5), (1, 1, 5), (1, 2, 17), (3, 1, 10))
"""(task, images, tokens); task 2 has none."""
Build = Callable[..., list[Any]]


@pytest.fixture
def build() -> Build:
    """Return a factory of the blocks of four tasks, which differ in attention only."""

    def make(scale: bool | None = None, **kwargs: Any) -> list[Any]:
        models = []
        for seed in range(4):
            arguments = {"img_size": 32, "patch_size": 8, "embed_dim": DIM, "num_heads": 2, "depth": 2, **kwargs}
            torch.manual_seed(0)  # norms, FFNs and LayerScale are shared
            model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **arguments).double().eval()
            if scale is not None:
                add_context_broadcast(model, scale=scale, on="both")
            generator = torch.Generator().manual_seed(0)
            for name, p in model.named_parameters():
                own = ".attn." in name and not name.endswith("cb.scale")
                noise = torch.Generator().manual_seed(seed) if own else generator
                p.data = p.data + 0.2 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
            models.append(model.blocks)
        return models

    return make


def stacks(models: Sequence[Any]) -> list[Layer]:
    modules = [[attn for _, attn in attention_modules(blocks)] for blocks in models]
    found: list[Layer] = []
    for same in zip(*modules, strict=True):
        names = own_parameters(same[0])
        found.append({name: torch.stack([dict(a.named_parameters())[name] for a in same]) for name in names})
    return found


def image_by_image(models: Sequence[Any], x: Tensor) -> Tensor:
    row, parts = 0, []
    for task, count, tokens in IMAGES:
        rows = x[row : row + count * tokens]
        parts.append(models[task](rows.unflatten(0, (count, tokens))).flatten(0, 1))
        row += count * tokens
    return torch.cat(parts)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer scale, qk-norm": {"init_values": 0.5, "qk_norm": True},
    "CB": {"scale": False},
    "CB_S, layer scale": {"scale": True, "init_values": 0.5},
    "parallel, CB_S": {"scale": True, "block_fn": partial(ParallelThingsBlock, num_parallel=3), "init_values": 0.5},
}


@pytest.mark.parametrize("kernels", [False, True], ids=["loop", "operators"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_blocks_image_by_image(build: Build, kind: str, kernels: bool) -> None:
    models = build(**KINDS[kind])
    segments = Segments.of(IMAGES)
    x = torch.randn(segments.rows, DIM, dtype=torch.float64)
    kept = x.clone()
    with torch.no_grad():
        wanted = image_by_image(models, x)
        found = packed_forward(models[0], stacks(models), segments, x, kernels=kernels)
        assert torch.equal(x, kept)
        assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
        # padding: whatever stands there reaches no row of an image
        padded = torch.cat((x, torch.full((70, DIM), float("nan"), dtype=x.dtype)))
        more = packed_forward(models[0], stacks(models), segments, padded, kernels=kernels)
    assert len(more) == len(padded)
    assert (more[: len(x)] - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@pytest.mark.parametrize("kernels", [False, True], ids=["loop", "operators"])
def test_projections_and_attention_of_padding_are_zero(build: Build, kernels: bool) -> None:
    models = build()
    segments = Segments.of(IMAGES)
    x = torch.randn(segments.rows + 9, DIM, dtype=torch.float64)
    block = models[0][:1]
    nn.init.zeros_(block[0].mlp.fc2.weight)
    nn.init.zeros_(block[0].mlp.fc2.bias)
    with torch.no_grad():
        found = packed_forward(block, stacks([m[:1] for m in models]), segments, x, kernels=kernels)
    assert torch.equal(found[-9:], x[-9:])


@pytest.mark.parametrize("kernels", [False, True], ids=["loop", "operators"])
def test_gradients_reach_each_task_s_weights(build: Build, kernels: bool) -> None:
    models = build(scale=True, qk_norm=True)
    segments = Segments.of(IMAGES)
    x = torch.randn(segments.rows, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(segments.rows, DIM, dtype=torch.float64)
    own = [p for m in models for _, attn in attention_modules(m) for p in own_parameters(attn).values()] + [x]
    wanted = torch.autograd.grad((image_by_image(models, x) * weight).sum(), own, allow_unused=True)
    result = packed_forward(models[0], stacks(models), segments, x, kernels=kernels)
    found = torch.autograd.grad((result * weight).sum(), own, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        a, b = (torch.zeros(1, dtype=torch.float64) if t is None else t for t in (a, b))
        assert (a - b).abs().max() <= 1e-11 * max(1.0, float(b.abs().max()))


def test_segments() -> None:
    segments = Segments.of(IMAGES)
    assert segments.cu_seqlens.tolist() == [0, 5, 10, 15, 32, 49, 59]
    assert segments.cu_seqlens.dtype == torch.int32
    assert segments.rows == 59
    assert list(segments.runs()) == [(0, 0, 10), (1, 10, 49), (3, 49, 59)]
    assert list(segments.equal_runs()) == [(0, 3, 5), (15, 2, 17), (49, 1, 10)]
    nothing = Segments.of(())
    assert (nothing.rows, list(nothing.runs()), nothing.cu_seqlens.tolist()) == (0, [], [0])


def test_unknown_blocks_are_refused_by_name(build: Build) -> None:
    blocks = build()[0]
    blocks[1] = ParallelScalingBlock(DIM, 2)
    with pytest.raises(UsageError, match=r"`blocks\.1` is a ParallelScalingBlock: .*separately"):
        attention_modules(blocks)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms behind attention and FFN": (
        "eva_giant_patch14_224",
        {"use_post_norm": True},
        "`blocks\\.0` is a EvaBlockPostNorm: its norms",
    ),
    "residual post-norm": (
        "vit_relpos_small_patch16_rpn_224",
        {},
        "`blocks\\.0` is a ResPostRelPosBlock: its norms come after",
    ),
    "differential attention": (
        "vit_tiny_patch16_224",
        {"attn_layer": "diff"},
        "`blocks\\.0\\.attn` is a DiffAttention: differential attention; only timm's",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_blocks_and_attentions_are_refused_in_one_line(case: str) -> None:
    name, kwargs, message = REFUSED[case]
    with torch.device("meta"):
        model = timm.create_model(name, depth=1, **kwargs)
    with pytest.raises(UsageError, match=f"{message}.*; serve this model separately") as caught:
        attention_modules(model.blocks)
    assert "\n" not in str(caught.value)

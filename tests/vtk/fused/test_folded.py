"""The plan whose products apply the norms, by the references of its operations: against timm in fp64, fp32 and bf16."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused import FusedViT, fuse, separate_qkv
from vtk.fused.stages import Plan
from vtk.models.transforms.context_layers import add_context_broadcast

Build = Callable[..., nn.Module]
FOLDED = Plan(kernels=True, ln_folded=True)


def images(model: nn.Module, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *model.patch_embed.img_size, dtype=torch.float64)


def rms(value: Tensor) -> float:
    return float(value.double().pow(2).mean().sqrt())


def check(model: nn.Module, batch: int = 2, fused: FusedViT | None = None, times: float = 2) -> None:
    """Compare in fp64, where only a wrong formula differs; and in fp32: its error is at most so many times timm's.

    The logits of one image share most of their rounding, so the errors in fp32 are those of many images.
    """
    x, many = images(model, batch), images(model, 12)
    fused = fused or fuse(model)
    with torch.no_grad():
        expected = model(x)
        got = fused.compute(x, FOLDED)
        assert got.shape == expected.shape
        assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-12
        expected = model(many)
        single = fuse(copy.deepcopy(model).float()).compute(many.float(), FOLDED)
        plain = copy.deepcopy(model).float()(many.float())
    assert rms(single - expected) <= times * rms(plain - expected) + 1e-7 * rms(expected)


@pytest.mark.parametrize(
    ("branches", "layer_scale", "kwargs"),
    [
        (None, 0.1, {}),
        (None, None, {"qkv_bias": False, "reg_tokens": 3}),
        (1, None, {"proj_bias": False}),
        (2, None, {"qkv_bias": False}),
        (2, 0.1, {"reg_tokens": 2, "no_embed_class": True}),
        (3, 0.1, {"qkv_bias": False, "global_pool": "avg"}),
        (4, 0.1, {"depth": 3, "qk_norm": True}),
    ],
)
def test_merged_branches_equal_timm(
    vit: Build, branches: int | None, layer_scale: float | None, kwargs: dict[str, Any]
) -> None:
    model = vit(branches=branches, init_values=layer_scale, **kwargs)
    fused = fuse(model)
    fused.cache_bytes = 0  # of the CPU's plan: the first stage is split into branches, those of raw tokens never are
    check(model)
    check(model, fused=fused)


@pytest.mark.parametrize(
    ("branches", "scale", "placement", "on"),
    [
        (None, False, "end", "mlp"), (2, True, "end", "mlp"), (2, False, "end", "both"), (3, True, "mid", "mlp"),
        (None, True, "front", "mlp"), (2, False, "front", "both"), (None, False, "mid", "mlp"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layers", ["all", [1]])
def test_context_broadcasting_equals_the_unfused_model(
    vit: Build, branches: int | None, scale: bool, placement: str, on: str, layers: Any
) -> None:
    model = vit(branches=branches, init_values=0.1, depth=3).float()
    add_context_broadcast(model, scale=scale, placement=placement, on=on, layers=layers)
    for name, p in model.named_parameters():
        if ".cb" in name:
            nn.init.normal_(p, std=0.5)
    check(model.double().eval())


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("another activation", {"act_layer": "quick_gelu", "mlp_ratio": 1.5}),
        ("qk norm of branches", {"qk_norm": True, "branches": 3}),
        ("rms", {"norm_layer": "rmsnorm", "branches": 2}),
        ("norm before the blocks", {"pre_norm": True}),
        ("no last norm", {"final_norm": False}),
        ("maximum", {"global_pool": "max"}),
        ("map", {"global_pool": "map", "class_token": False}),
        ("tokens", {"global_pool": "", "num_classes": 0}),
        ("any size", {"dynamic_img_size": True}),
        ("one block", {"depth": 1}),
        ("scaling", {"block_fn": ParallelScalingBlock, "depth": 3}),
        ("scaling, qk norm, one output", {"block_fn": partial(ParallelScalingBlock, fuse_out_proj=True),
                                          "qk_norm": True, "qkv_bias": False, "init_values": 0.1}),
    ],
)  # fmt: skip
def test_variants_of_timms_vision_transformer(vit: Build, name: str, kwargs: dict[str, Any]) -> None:
    check(vit(**kwargs))


@pytest.mark.parametrize(
    ("grid", "dim", "heads", "batch"),
    [(1, 64, 2, 3), (4, 72, 3, 2), (14, 192, 3, 1), (3, 200, 4, 1), (2, 32, 1, 0), (5, 384, 6, 1)],
)
def test_tokens_and_widths(vit: Build, grid: int, dim: int, heads: int, batch: int) -> None:
    """Odd numbers of tokens; channels that are less than a piece of the statistics, and no multiple of it."""
    model = vit(branches=2, grid=grid, dim=dim, heads=heads, depth=1 if dim > 200 else 2)
    if batch:
        check(model, batch)
    else:
        assert fuse(model).compute(images(model, 0), FOLDED).shape == (0, 7)


def test_every_norm_has_its_own_eps(vit: Build) -> None:
    model = vit(depth=3)
    for i, module in enumerate(m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        module.eps = 0.1 * (i + 1)
    check(model)


@pytest.mark.parametrize("branches", [None, 2])
def test_a_residual_stream_far_from_zero(vit: Build, branches: int | None) -> None:
    """Statistics are united without cancellation. The rows' means of 0 are rounded ones, as the mean itself is."""
    model = vit(branches=branches, dim=192, heads=3)
    model.pos_embed.data += 100
    check(model, times=4)
    x = images(model, 8)
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(model).to(dtype)
        with torch.no_grad():
            expected = model(x)
            got = fuse(model, dtype).compute(x.to(dtype), FOLDED)
            assert rms(got - expected) <= 2 * rms(half(x.to(dtype)) - expected)


@pytest.mark.parametrize(
    ("kwargs", "cb"),
    [
        ({"init_values": 0.1}, None),
        ({"branches": 2}, None),
        ({"branches": 2}, {"scale": False}),
        ({"init_values": 0.1}, {"scale": True, "on": "both"}),
        ({"branches": 3, "qk_norm": True}, None),
        ({"block_fn": ParallelScalingBlock}, None),
    ],
)
def test_low_precision_error_is_that_of_plain_torch(
    vit: Build, kwargs: dict[str, Any], cb: dict[str, Any] | None
) -> None:
    model = vit(dim=128, depth=4, **kwargs).float()
    if cb is not None:
        add_context_broadcast(model, layers="all", **cb)
    model = model.double().eval()
    x = images(model, 8)
    with torch.no_grad():
        expected = model(x)
        got = fuse(model.float(), torch.bfloat16).compute(x.bfloat16(), FOLDED)
        plain = model.bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert rms(got - expected) <= 2 * rms(plain - expected)


@pytest.mark.parametrize("kwargs", [{"branches": 2}, {"block_fn": ParallelScalingBlock}])
def test_matrices_behind_a_layer_norm_have_rows_of_mean_0(vit: Build, kwargs: dict[str, Any]) -> None:
    fused = fuse(vit(**kwargs).float(), torch.float16)
    matrices = [p for n, p in fused.named_parameters() if n.endswith(("w_qkv", "w_in"))]
    assert len(matrices) == 4
    for matrix in matrices:  # the mean is taken before the type is cast, so that one rounding a value remains
        assert matrix.double().mean(-1).abs().max() <= 2 * 2.0**-11 * float(matrix.abs().max()) / 64**0.5


def test_what_a_mean_is_read_of_keeps_it(vit: Build) -> None:
    assert fuse(vit(norm_layer="rmsnorm")).stages[1].w_in.mean(-1).abs().max() > 1e-3
    model = vit().float()
    add_context_broadcast(model, scale=True, placement="front", layers=[0])
    nn.init.normal_(model.blocks[0].mlp.cb.scale)
    stages = fuse(model.double().eval()).stages
    assert stages[1].w_in.mean(-1).abs().max() > 1e-3  # Λ ⊙ mean x̂ has a mean over the channels
    assert stages[3].w_in.mean(-1).abs().max() <= 1e-15


def test_compiled_it_is_one_program(vit: Build) -> None:
    model = vit(branches=2, depth=1, global_pool="avg", fc_norm=False)
    fused, x = fuse(model), images(model)
    compiled = torch.compile(partial(fused.compute, plan=FOLDED), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-11)


def test_copies_pickles_and_gradients(vit: Build) -> None:
    model = vit(branches=2)
    fused = fuse(model, ln_folded=True)
    x = images(model).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (got,) = torch.autograd.grad(fused.compute(x, FOLDED).sum(), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    found = fused.source_state_dict()
    with torch.no_grad():
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert other.ln_folded is True
            assert torch.equal(other.compute(x, FOLDED), fused.compute(x, FOLDED))
        other = fuse(vit(branches=2).double(), ln_folded=False)
        other.load_state_dict(fused.state_dict())
        assert torch.equal(other.compute(x, FOLDED), fused.compute(x, FOLDED))
        assert copy.deepcopy(fused).half().compute(x.half(), FOLDED).dtype == torch.float16
    assert all(found[key] is value or torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_the_plan_of_the_cpu_and_of_exporters_is_the_same(vit: Build) -> None:
    model = vit(branches=2)
    x = images(model)
    with torch.no_grad():
        expected = fuse(model)(x)
        fused = fuse(model, ln_folded=True)
        assert torch.equal(fused(x), expected)
        assert torch.equal(fused.compute(x, Plan(kernels=False, ln_folded=True)), expected)
        separate_qkv(fused)  # three matrices read normalised tokens
        torch.testing.assert_close(fused.compute(x, FOLDED), expected, rtol=0, atol=1e-11)


def test_nothing_to_fold_is_refused_and_what_can_be_is_folded(vit: Build) -> None:
    kwargs = {"block_fn": ParallelScalingBlock, "depth": 1}
    with pytest.raises(UsageError, match="`ln_folded` is True and nothing of this model"):
        fuse(vit(**kwargs), ln_folded=True)
    assert fuse(vit(**kwargs)).ln_folded is None
    model = vit().float()
    add_context_broadcast(model, placement="front", on="both", layers="all")
    with pytest.raises(UsageError, match="`ln_folded` is True"):
        fuse(model, ln_folded=True)
    model = vit().float()
    add_context_broadcast(model, placement="front", layers="all")
    assert fuse(model, ln_folded=True).ln_folded

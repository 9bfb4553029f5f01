"""The fused model against timm's own forward pass, in fp64, where only a wrong formula can differ."""

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused import FusedViT, fuse
from vtk.fused.stages import Plan
from vtk.models.transforms.context_layers import add_context_broadcast

Build = Callable[..., nn.Module]


def images(model: nn.Module, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *model.patch_embed.img_size, dtype=next(model.parameters()).dtype)


def difference(model: nn.Module, fused: FusedViT, batch: int = 2) -> float:
    """Largest error relative to the largest logit, of the CPU's plan and of the kernels' (its operations in torch)."""
    x = images(model, batch)
    with torch.no_grad():
        expected = model(x)
        found = fused(x), fused.compute(x, Plan(kernels=True))
    assert all(got.shape == expected.shape for got in found)
    return max(float((got - expected).abs().max() / expected.abs().max()) for got in found)


@pytest.mark.parametrize("branches", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("layer_scale", [None, 0.1])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_merged_branches_equal_timm(
    vit: Build, branches: int | None, layer_scale: float | None, qkv_bias: bool
) -> None:
    model = vit(branches=branches, init_values=layer_scale, qkv_bias=qkv_bias)
    fused = fuse(model)
    assert difference(model, fused) <= 1e-12
    fused.cache_bytes = 0  # the other CPU plan: branch by branch
    assert difference(model, fused) <= 1e-12


@pytest.mark.parametrize("branches", [None, 2, 3])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("layer_scale", [None, 0.1])
@pytest.mark.parametrize(
    ("placement", "on"), [("end", "mlp"), ("mid", "mlp"), ("front", "mlp"), ("end", "both"), ("front", "both")]
)
def test_context_broadcasting_equals_the_unfused_model(
    vit: Build, branches: int | None, scale: bool, layer_scale: float | None, placement: str, on: str
) -> None:
    model = vit(branches=branches, init_values=layer_scale).float()
    add_context_broadcast(model, scale=scale, placement=placement, on=on, layers="all")
    for name, p in model.named_parameters():
        if ".cb" in name:
            nn.init.normal_(p, std=0.5)
    model = model.double().eval()
    if branches is not None and branches > 1 and scale and placement == "front":
        with pytest.raises(UsageError, match="parallel branches"):
            fuse(model)
        return
    fused = fuse(model)
    assert difference(model, fused) <= 1e-12
    fused.cache_bytes = 0
    assert difference(model, fused) <= 1e-12


@pytest.mark.parametrize("layers", ["upper", [0]])
def test_context_broadcasting_of_some_layers(vit: Build, layers: Any) -> None:
    model = vit(branches=2).float()
    add_context_broadcast(model, layers=layers)
    model = model.double().eval()
    assert difference(model, fuse(model)) <= 1e-12


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("registers", {"reg_tokens": 4}),
        ("registers outside the table", {"reg_tokens": 2, "no_embed_class": True}),
        ("deit3's table", {"no_embed_class": True, "init_values": 0.1}),
        ("average", {"global_pool": "avg"}),
        ("average after the norm", {"global_pool": "avg", "fc_norm": False}),
        ("average with prefix", {"global_pool": "avg", "pool_include_prefix": True}),
        ("maximum", {"global_pool": "max"}),
        ("both", {"global_pool": "avgmax", "fc_norm": False}),
        ("map", {"global_pool": "map", "class_token": False}),
        ("map with prefix", {"global_pool": "map"}),
        ("prr", {"global_pool": "prr"}),
        ("no class token", {"global_pool": "avg", "class_token": False}),
        ("norm before the blocks", {"pre_norm": True}),
        ("norm after the pooling", {"fc_norm": True}),
        ("no last norm", {"final_norm": False}),
        ("no table", {"pos_embed": "none"}),
        ("no output bias", {"proj_bias": False}),
        ("qk norm", {"qk_norm": True}),
        ("qk norm of branches", {"qk_norm": True, "branches": 3}),
        ("rms", {"norm_layer": "rmsnorm", "qk_norm": True, "branches": 2}),
        ("rms before the blocks", {"norm_layer": "rmsnorm", "pre_norm": True}),
        ("another activation", {"act_layer": "quick_gelu"}),
        ("tanh", {"act_layer": "gelu_tanh", "branches": 2}),
        ("narrow ffn", {"mlp_ratio": 1.5}),
        ("any size", {"dynamic_img_size": True}),
        ("scaling", {"block_fn": ParallelScalingBlock}),
        ("scaling without bias", {"block_fn": ParallelScalingBlock, "qkv_bias": False, "init_values": 0.1}),
        ("scaling as timm's", {"block_fn": ParallelScalingBlock, "qkv_bias": False, "qk_norm": True,
                               "norm_layer": "rmsnorm", "pre_norm": True, "no_embed_class": True}),
        ("scaling, one output", {"block_fn": partial(ParallelScalingBlock, fuse_out_proj=True)}),
        ("features", {"num_classes": 0}),
        ("tokens", {"global_pool": "", "num_classes": 0}),
    ],
)  # fmt: skip
def test_every_variant_of_timms_vision_transformer(vit: Build, name: str, kwargs: dict[str, Any]) -> None:
    model = vit(**kwargs)
    assert difference(model, fuse(model)) <= 1e-12


@pytest.mark.parametrize("grid", [1, 4, 14, 24])
def test_token_counts(vit: Build, grid: int) -> None:
    """2, 17, 197 and 577 tokens."""
    model = vit(branches=2, grid=grid, depth=1)
    assert difference(model, fuse(model), batch=1) <= 1e-12


def test_one_token(vit: Build) -> None:
    model = vit(branches=2, grid=1, class_token=False, global_pool="avg")
    assert difference(model, fuse(model), batch=3) <= 1e-12


@pytest.mark.parametrize(("dim", "heads"), [(192, 3), (384, 6), (768, 12), (1000, 10)])
def test_widths(vit: Build, dim: int, heads: int) -> None:
    model = vit(branches=2, dim=dim, heads=heads, grid=2, depth=1, init_values=0.1)
    assert difference(model, fuse(model), batch=1) <= 1e-12


def test_two_sizes_of_a_dynamic_model(vit: Build) -> None:
    model = vit(dynamic_img_size=True)
    fused = fuse(model)
    for height, width in ((16, 16), (24, 8), (8, 32)):
        x = torch.randn(1, 3, height, width, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "test_vit3", "test_vit4"])
def test_timms_test_models(name: str) -> None:
    model = timm.create_model(name, num_classes=5).double().eval()
    assert difference(model, fuse(model)) <= 1e-12


def test_the_stems_batch_norm_is_folded(vit: Build) -> None:
    model = vit()
    norm = nn.BatchNorm2d(64)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.running_mean, norm.running_var = torch.randn(64), torch.rand(64) + 0.5
    model.patch_embed.proj = nn.Sequential(model.patch_embed.proj, norm, nn.ReLU())
    model = model.double().eval()
    fused = fuse(model)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert difference(model, fused) <= 1e-12


def test_the_last_block_is_not_pruned_where_other_tokens_are_read(vit: Build) -> None:
    assert fuse(vit()).pruned == 2
    assert fuse(vit(global_pool="avg")).pruned == -1
    model = vit().float()
    add_context_broadcast(model, layers="all")
    assert fuse(model).pruned == -1


def test_the_source_is_untouched_and_found_again(vit: Build) -> None:
    model = vit(branches=2, init_values=0.1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fused = fuse(model, torch.bfloat16)
    fused(images(model))
    found = fused.source_state_dict()
    assert list(found) == list(before)
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value)
        assert found[key].data_ptr() == model.state_dict()[key].data_ptr()
    with pytest.raises(UsageError, match="keep_source"):
        fuse(model, keep_source=False).source_state_dict()


@pytest.mark.parametrize("branches", [None, 2, 3])
def test_low_precision_error_is_that_of_plain_torch(vit: Build, branches: int | None) -> None:
    model = vit(branches=branches, dim=128, init_values=0.1)
    x = images(model, 8)

    def rms(value: Tensor) -> float:
        return float(value.double().pow(2).mean().sqrt())

    with torch.no_grad():
        expected = model(x)
        got = fuse(model.float(), torch.bfloat16)(x.bfloat16())
        plain = model.bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert rms(got - expected) <= 2 * rms(plain - expected)


def test_it_stays_in_eval_mode_and_trains_nothing(vit: Build) -> None:
    fused = fuse(vit())
    assert not any(m.training for m in fused.modules())
    assert not any(p.requires_grad for p in fused.parameters())
    with pytest.raises(UsageError, match="inference"):
        fused.train()


def test_compiled_it_is_one_program(vit: Build) -> None:
    model = vit(branches=2)
    fused = fuse(model)
    x = images(model)
    compiled = torch.compile(fused.compute, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize("branches", [None, 2])
def test_choices_change_the_operations_and_not_the_result(
    vit: Build, monkeypatch: pytest.MonkeyPatch, branches: int | None
) -> None:
    asked = []

    def choose(op: str, rows: int, n: int, k: int, dtype: torch.dtype, device_name: str | None) -> str:
        asked.append((op, rows, n, k, device_name))
        return {"linear_gelu": "aten", "splitk_linear": "triton"}[op]

    for module in ("model", "stage_output", "mlp_stage"):
        monkeypatch.setattr(f"vtk.fused.{module}.choose", choose)
    p = branches or 1
    model = vit(branches=branches, dim=256, init_values=0.1, global_pool="avg", fc_norm=False)
    x = images(model)
    with torch.no_grad():
        got = fuse(model).compute(x, Plan(kernels=True, device_name="a card"))
        torch.testing.assert_close(got, model(x), rtol=0, atol=1e-11)
    block = [
        ("splitk_linear", 34, 256, p * 256),
        ("linear_gelu", 34, p * 1024, 256),
        ("splitk_linear", 34, 256, p * 1024),
    ]
    assert asked == [(*entry, "a card") for entry in 2 * block]


class _OwnBlock(timm.models.vision_transformer.Block):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"block_fn": _OwnBlock}, "blocks.0"),
        ({"block_fn": timm.models.vision_transformer.ResPostBlock}, "blocks.0"),
        ({"mlp_layer": timm.layers.GatedMlp}, "blocks.0.mlp"),
        ({"attn_layer": "diff"}, "blocks.0.attn"),
        ({"norm_layer": "simplenorm"}, "blocks.0.norm1"),
        ({"norm_layer": "simplenorm", "branches": 2}, "blocks.0.attns.0.norm"),
    ],
)
def test_unknown_parts_are_refused_by_name(vit: Build, change: dict[str, Any], part: str) -> None:
    model = vit(**change)
    with pytest.raises(UsageError, match=rf"`{re.escape(part)}`.*use the back-end eager"):
        fuse(model)


class _Adapted(nn.Linear):
    """Computes more than its weight says, as LoRA layers do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


@pytest.mark.parametrize("branches", [None, 2])
def test_adapters_are_refused_and_never_lost(vit: Build, branches: int | None) -> None:
    seen = 0
    for name, module in vit(branches=branches).named_modules():
        if type(module) is nn.Linear:
            model = vit(branches=branches)
            model.set_submodule(name, _Adapted(module.in_features, module.out_features).double())
            with pytest.raises(UsageError, match=rf"`{re.escape(name)}` \(_Adapted\).*merge adapters"):
                fuse(model)
            seen += 1
    assert seen == 2 * 4 * (branches or 1) + 1
    model = vit(block_fn=ParallelScalingBlock)
    model.blocks[1].mlp_out_proj = _Adapted(256, 64).double()
    with pytest.raises(UsageError, match=r"`blocks.1.mlp_out_proj`"):
        fuse(model)


def test_a_parametrized_or_replaced_forward_is_refused(vit: Build) -> None:
    model = vit()
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc1)
    with pytest.raises(UsageError, match=r"`blocks.0.mlp.fc1`"):
        fuse(model)
    model = vit()
    model.blocks[1].attn.forward = lambda x: x
    with pytest.raises(UsageError, match=r"`blocks.1.attn`.*`forward` was replaced"):
        fuse(model)


def test_copies_pickles_and_gradients(vit: Build) -> None:
    model = vit(branches=2)
    fused = fuse(model)
    x = images(model).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (got,) = torch.autograd.grad(fused(x).sum(), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    with torch.no_grad():
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert torch.equal(other(x), fused(x))
        assert fused(x[:0]).shape == (0, 7)


def test_unknown_models_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"ResNet.*eager"):
        fuse(timm.create_model("test_resnet"))
    model = timm.create_model("test_vit")
    model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"`blocks.0`.*hooks"):
        fuse(model)

"""Nothing that computes may be lost when a model is folded, and nothing that the model owns may be shared."""

import re
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm.models.vision_transformer as timm_vit
import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused import fuse
from vtk.fused.embed import fold_batch_norms
from vtk.models.transforms.context_broadcast import ContextBroadcast, attach

Build = Callable[..., Any]


class _Thrice(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def names_of_silent_parts(model: nn.Module) -> list[str]:
    return [
        name for name, m in model.named_modules() if isinstance(m, (nn.Identity, nn.Dropout)) and "embed" not in name
    ]


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({}, 5 + 2 * 12),  # norm_pre, fc_norm, pos_drop, patch_drop, head_drop; and of each block
        ({"branches": 2}, 5 + 2 * 2 * 12),
        ({"block_fn": timm_vit.ParallelScalingBlock}, 5 + 2 * 6),
    ],
)
def test_what_stands_in_a_silent_place_is_refused(vit: Build, kwargs: dict[str, Any], parts: int) -> None:
    """Every Identity and Dropout of timm's modules is replaced in turn by a module that computes."""
    names = names_of_silent_parts(vit(**kwargs))
    assert len(names) == parts
    for name in names:
        model = vit(**kwargs)
        model.set_submodule(name, _Thrice())
        with pytest.raises(UsageError, match=f"`{re.escape(name)}`"):
            fuse(model)


def test_more_parts_than_timms_are_refused(vit: Build) -> None:
    model = vit(branches=2)
    model.blocks[0].attns[1].add_module("adapter", _Thrice())
    with pytest.raises(UsageError, match=r"`blocks.0.attns.1`.*found norm, attn, ls, drop_path, adapter"):
        fuse(model)

    class Backwards(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in reversed(list(self)):
                x = block(x)
            return x

    model = vit()
    model.blocks = Backwards(*model.blocks)
    with pytest.raises(UsageError, match=r"`blocks` \(Backwards\)"):
        fuse(model)


def test_a_method_or_a_scale_of_its_own_is_refused(vit: Build) -> None:
    model = vit()
    model.forward_head = types.MethodType(lambda self, x: x, model)
    with pytest.raises(UsageError, match="`forward_head` is its own"):
        fuse(model)
    for kwargs in ({}, {"block_fn": timm_vit.ParallelScalingBlock}):
        model = vit(**kwargs)
        holder = model.blocks[1] if kwargs else model.blocks[1].attn
        holder.scale = 0.5
        assert fuse(model)  # timm does not read it either
        holder.fused_attn = False
        with pytest.raises(UsageError, match=r"`blocks.1.*its `scale` is 0.5"):
            fuse(model)


@pytest.mark.parametrize("act", [nn.GELU("tanh"), nn.PReLU(init=0.5), nn.LeakyReLU(0.3)])
def test_branches_with_other_activations_are_refused(vit: Build, act: nn.Module) -> None:
    model = vit(branches=2, act_layer=type(act))
    for module in model.modules():
        if isinstance(module, nn.PReLU):
            nn.init.constant_(module.weight, 0.1)
    assert fuse(model)
    model.blocks[1].ffns[1].mlp.act = act.double()
    with pytest.raises(UsageError, match=r"`blocks.1.ffns.1.mlp.act`.*different activations"):
        fuse(model)


def test_an_activation_of_more_than_one_element_cannot_be_merged(vit: Build) -> None:
    softmax = partial(nn.Softmax, dim=-1)
    with pytest.raises(UsageError, match=r"`blocks.0.ffns.0.mlp.act` \(Softmax\).*each element"):
        fuse(vit(branches=2, act_layer=softmax))
    model = vit(act_layer=softmax)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(fuse(model)(x), model(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize("placement", ["front", "mid", "end"])
def test_branches_with_cb_and_cb_s_are_refused(vit: Build, placement: Any) -> None:
    model = vit(branches=2)
    width = 256 if placement == "mid" else 64
    for branch, dim in zip(model.blocks[0].ffns, (None, width), strict=True):
        attach(branch.mlp, ContextBroadcast(dim), placement)
    with pytest.raises(UsageError, match=r"`blocks.0.ffns.0.mlp`.*some of its block's branches have CB, others CB_S"):
        fuse(model.double())


def test_the_model_keeps_what_is_its_own(vit: Build) -> None:
    """No storage, type or mode is shared: neither may change with the other."""
    for kwargs in ({"pre_norm": True}, {"dynamic_img_size": True}, {"global_pool": "map"}, {"final_norm": False}):
        model = vit(act_layer=nn.PReLU, **kwargs).train()
        owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
        fused = fuse(model)
        assert not [name for name, p in fused.named_parameters() if p.untyped_storage().data_ptr() in owned]
        fuse(model, torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert all(p.requires_grad for p in model.parameters())
        assert all(m.training for m in model.modules())


def test_a_low_precision_stem_is_folded_in_fp32(vit: Build) -> None:
    model = vit().float()
    norm = nn.BatchNorm2d(64)
    norm.running_mean, norm.running_var = torch.randn(64), torch.rand(64) + 0.5
    model.patch_embed.proj = nn.Sequential(model.patch_embed.proj, norm)
    conv = model.bfloat16().eval().patch_embed.proj[0]
    found = fuse(model).embed.stem.proj[0].weight.detach()
    factor = norm.weight.detach().double() / (norm.running_var.double() + norm.eps).sqrt()
    expected = conv.weight.detach().double() * factor[:, None, None, None]
    assert float((found.double() / expected - 1).abs().max()) <= 2**-8  # one rounding


def test_parts_whose_order_nobody_knows_stay() -> None:
    class Twisted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(self.bn(x))
            return y

    assert isinstance(fold_batch_norms(Twisted()).bn, nn.BatchNorm2d)


def test_images_of_whole_numbers_and_types_without_arithmetic_are_refused(vit: Build) -> None:
    with pytest.raises(UsageError, match=r"`images` are torch.uint8; give normalised images"):
        fuse(vit())(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(UsageError, match=r"`dtype` is torch.float8_e4m3fn; give torch.float16"):
        fuse(vit(), torch.float8_e4m3fn)


def test_autocast_does_not_round_the_residual_stream(vit: Build) -> None:
    fused = fuse(vit(branches=2).float())
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = fused(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(fused(x), expected)


def test_a_stage_put_in_place_of_another_counts(vit: Build) -> None:
    fused, other = fuse(vit()), fuse(vit(init_values=0.1))
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    before = fused(x)
    fused.stages[0] = other.stages[0]
    assert not torch.equal(fused(x), before)

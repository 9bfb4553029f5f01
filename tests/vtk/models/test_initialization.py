"""Initial weights: deviations against formulas written here, and those of version 0.1 drawn again by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models import parallel_models
from vtk.models.alternet import AlterNet, WindowAttention
from vtk.models.alternet.window_attention import AttentionBlock
from vtk.models.initialization import TABLE, initial_weights
from vtk.models.module import create_model
from vtk.models.stems import ScaledReLU, make_stem
from vtk.models.stems.shape import StemShape
from vtk.models.transforms.context_broadcast import ContextBroadcast
from vtk.models.transforms.extra_block import add_block
from vtk.models.transforms.squeeze_excite import SqueezeExcite
from vtk.models.transforms.uniform_heads import uniform_heads
from vtk.training.pretrain.dino.model import DinoHead
from vtk.training.pretrain.mae import MaeModel
from vtk.training.pretrain.masked_method import TokenModel
from vtk.training.pretrain.supcon import Projected

Named = dict[str, Tensor]
SMALL: Any = {"channels": (32, 64, 64, 64), "stem_chs": 32, "num_classes": 800}


def _vit(**kwargs: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1, "num_heads": 3, **kwargs}
    return timm.create_model("vit_tiny_patch16_224", **sizes)  # type: ignore[no-any-return]


def _of(module: nn.Module, *parts: str) -> Named:
    """Return the parameters with one of ``parts`` in their names."""
    return {n: p.detach() for n, p in module.named_parameters() if any(part in n for part in parts)}


def _alternet(*parts: str) -> Named:
    return _of(timm.create_model("alternet_18_cifar", **SMALL), *parts)


def _cifar_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch2_32", depth=1, num_classes=100)  # type: ignore[no-any-return]


def _uniform(*parts: str) -> Named:
    model = _vit()
    uniform_heads(model, variant="c")
    new = model.blocks[0].attn  # type: ignore[index,union-attr]
    # rows: 3 × 64 queries, as many keys, 4 × 64 values, of which the last 64 are new
    found = {
        "qkv.weight": new.qkv.weight[-64:],
        "qkv.bias": new.qkv.bias[-64:],
        "proj.weight": new.proj.weight[:, -64:],
    }
    return {name: value for name, value in found.items() if name.startswith(parts)}


def _stems() -> Named:
    shape = StemShape(3, 64, (16, 16))
    return {
        f"{stem}.{i}.{name}": parameter
        for stem in ("conv", "hmlp", "levit", "3conv+3relu+1proj", "hmlp-ln")
        for i, layer in enumerate(m for m in make_stem(stem, shape).modules() if isinstance(m, nn.Conv2d))  # type: ignore[arg-type]
        for name, parameter in layer.named_parameters()
    }


def _local_stem() -> nn.Module:
    return make_stem("local-transformer", StemShape(3, 64, (64, 64)), depth=2)


def _extra() -> nn.Module:
    model = _vit()
    add_block(model, kind="msa")
    return model.blocks[-1]  # type: ignore[index,return-value]


def _lvvit(width: int) -> nn.Module:
    return parallel_models.build("lvvit_small", img_size=32, embed_dim=width, depth=0, num_heads=2, num_classes=40)


def _mae() -> nn.Module:
    return MaeModel(_vit(), 192, "tokens", 96, 1)


def _decoder() -> Named:
    found = _of(_mae(), "embed.", "blocks.", "predict.")
    return {n: p for n, p in found.items() if not n.startswith("backbone.") and "norm" not in n}


LAYERS: dict[str, Callable[[], Named]] = {
    "alternet.conv": lambda: _alternet("stem.conv", ".conv1", ".conv2", ".downsample", ".attn.reduce"),
    "alternet.attention": lambda: _alternet(".attn.q", ".attn.kv", ".attn.proj"),
    "alternet.position": lambda: _of(WindowAttention(8, nn.Identity(), 8, 1, 8, 24), "relative_position"),
    "alternet.classifier": lambda: _alternet("head."),
    "cifar_vit.linear": lambda: _of(_cifar_vit(), "attn.", "mlp.", "head.", "proj."),
    "cifar_vit.position": lambda: _of(_cifar_vit(), "pos_embed", "cls_token"),
    "stem.conv": _stems,
    "scaled_relu.alpha": lambda: _of(ScaledReLU(64), "alpha"),
    "scaled_relu.beta": lambda: _of(ScaledReLU(64), "beta"),
    "stem.local_linear": lambda: _of(_local_stem(), "qkv", "proj", "fc"),
    "stem.local_position": lambda: _of(_local_stem(), "position"),
    "extra_block.linear": lambda: _of(_extra(), "qkv", "proj"),
    "lvvit.aux_head": lambda: _of(_lvvit(192), "aux_head"),
    "lvvit.cls_token": lambda: _of(_lvvit(3200), "cls_token"),
    "context_broadcast.scale": lambda: _of(ContextBroadcast(64), "scale"),
    "uniform_heads.qkv": lambda: _uniform("qkv"),
    "uniform_heads.proj": lambda: _uniform("proj"),
    "squeeze_excite.linear": lambda: _of(SqueezeExcite(192, 48), "fc"),
    "parallel.layer_scale": lambda: _of(parallel_models.build("vit_tiny_patch16_1x2_224"), "ls.gamma"),
    "mae.linear": _decoder,
    "mae.mask_token": lambda: _of(MaeModel(_vit(depth=0), 4, "tokens", 3200, 0), "mask_token"),
    "beit.linear": lambda: _of(TokenModel(_vit(), 64, "tokens"), "predict"),
    "simmim.linear": lambda: _of(TokenModel(_vit(), 800, "tokens", "simmim.linear"), "predict"),
    "masked.mask_token": lambda: _of(TokenModel(_vit(depth=0, embed_dim=3200), 4, "tokens"), "mask_token"),
    "dino.linear": lambda: _of(DinoHead(64, 256, 128, 8, unit=True), "mlp"),
    "dino.prototypes": lambda: _of(DinoHead(8, 8, 128, 512, unit=True), "prototypes.weight"),
    "supcon.projection": lambda: _of(Projected(_vit(num_classes=0), 128), "projection"),
}  # fmt: skip
"""New layers of each kind, as models build them."""


def _ins(weight: Tensor) -> int:
    return weight[0].numel()


def _default(weight: Tensor) -> float:
    """torch's default: uniform between ±1/√inputs; the variance of uniform numbers between ±b is b²/3."""
    return 1 / math.sqrt(_ins(weight)) / math.sqrt(3)


def _glorot(weight: Tensor) -> float:
    """Uniform between ±√(6/(inputs + outputs)), of linear layers."""
    return math.sqrt(6 / (weight.shape[0] + weight.shape[1])) / math.sqrt(3)


# within ±1 deviation, the variance of a normal distribution is 1 - 2φ(1)/(2Φ(1) - 1): 0.2911
_CUT = 0.02 * math.sqrt(1 - 2 * 0.24197072451914337 / 0.6826894921370859)
_DEFAULTS = ("alternet.conv", "alternet.attention", "alternet.classifier", "cifar_vit.linear", "stem.conv",
             "simmim.linear", "supcon.projection", "dino.prototypes")  # fmt: skip
DEVIATIONS: dict[str, Callable[[Tensor], float]] = {
    **dict.fromkeys(_DEFAULTS, _default),
    **dict.fromkeys(("alternet.position", "cifar_vit.position", "uniform_heads.qkv", "squeeze_excite.linear",
                     "mae.mask_token", "stem.local_linear", "stem.local_position", "extra_block.linear",
                     "lvvit.aux_head", "lvvit.cls_token", "dino.linear"), lambda weight: 0.02),
    **dict.fromkeys(("beit.linear", "masked.mask_token"), lambda weight: _CUT),
    "mae.linear": _glorot,
}  # fmt: skip
CONSTANTS = {
    "scaled_relu.alpha": 0.0, "scaled_relu.beta": 1.0, "context_broadcast.scale": 0.0, "uniform_heads.proj": 0.0,
    "parallel.layer_scale": 1e-4,
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_each_kind_of_layer_starts_with_the_deviation_of_its_formula(kind: str) -> None:
    torch.manual_seed(0)
    tensors = LAYERS[kind]()
    assert tensors
    if kind in CONSTANTS:
        assert all(torch.equal(value, torch.full_like(value, CONSTANTS[kind])) for value in tensors.values())
        return
    weights = {name: value for name, value in tensors.items() if not name.endswith("bias")}
    biases = {name: value for name, value in tensors.items() if name.endswith("bias")}
    # each divided by its own deviation: together they have deviation 1
    parts = [(value / DEVIATIONS[kind](value)).flatten() for value in weights.values()]
    assert torch.cat(parts).double().std().item() == pytest.approx(1, abs=0.05)
    assert all(part.double().std().item() == pytest.approx(1, abs=0.05) for part in parts if part.numel() >= 4000)
    if kind in _DEFAULTS and biases:
        found = torch.cat([b * math.sqrt(3 * _ins(weights[n[:-4] + "weight"])) for n, b in biases.items()])
        assert found.abs().max() <= math.sqrt(3) and found.double().std().item() == pytest.approx(1, abs=0.05)
    else:
        assert all(not value.any() for value in biases.values())


def _ratios(model: nn.Module) -> Tensor:
    """Return, for each attention block, the norm of its branch over that of its stream."""
    found: list[Tensor] = []

    def keep(block: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        found.append((out - args[0]).norm() / args[0].norm())

    for block in model.modules():
        if isinstance(block, AttentionBlock):
            block.register_forward_hook(keep)
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 32, 32))
    return torch.stack(found)


def test_alternets_attention_is_alive_at_the_start_as_with_torchs_default_everywhere() -> None:
    torch.manual_seed(0)
    papers = timm.create_model("alternet_18_cifar", **SMALL)
    with initial_weights("0.1"):
        old = timm.create_model("alternet_18_cifar", **SMALL)
    now, before = _ratios(papers), _ratios(old)
    for layer in old.modules():
        if isinstance(layer, nn.Conv2d):
            layer.reset_parameters()
    # the official code, run once at full size: 0.17, 0.17, 0.16
    assert ((now / _ratios(old)) - 1).abs().max() < 0.15 and now.min() > 0.1 > 3 * before.max()


def _old_window(window: int = 3) -> WindowAttention:
    """Draw the weights of an attention as version 0.1 did."""
    layer = WindowAttention(16, nn.Identity(), 8, 2, 4, window)
    torch.manual_seed(3)
    new = [nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 16, 1, bias=False),
           nn.Conv2d(8, 16, 1)]  # fmt: skip
    nn.init.kaiming_normal_(new[0].weight, mode="fan_out", nonlinearity="relu")
    for conv in new[1:]:
        nn.init.trunc_normal_(conv.weight, std=0.02)
    nn.init.zeros_(new[3].bias)  # type: ignore[arg-type]
    layer.reduce, layer.q, layer.kv, layer.proj = new
    nn.init.normal_(layer.relative_position_bias_table, std=0.02)
    return layer


def _old_excite() -> SqueezeExcite:
    layer = SqueezeExcite(32, 8)
    torch.manual_seed(3)
    layer.fc1, layer.fc2 = nn.Linear(32, 8), nn.Linear(8, 32)
    for linear in (layer.fc1, layer.fc2):
        nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.zeros_(linear.bias)
    return layer


def _old_tokens() -> nn.Module:
    model = TokenModel(_vit(num_classes=0), 24, "tokens")
    torch.manual_seed(3)
    model.backbone = _vit(num_classes=0)
    model.predict = nn.Linear(192, 24)
    timm.layers.trunc_normal_(model.mask_token, std=0.02)
    timm.layers.trunc_normal_(model.predict.weight, std=0.02)
    nn.init.zeros_(model.predict.bias)
    return model


def _old_mae() -> nn.Module:
    model = _mae()
    # the order of the constructor's lines
    torch.manual_seed(3)
    model.backbone = _vit()
    model.embed = nn.Linear(192, 96)
    model.blocks = nn.Sequential(timm.models.vision_transformer.Block(96, 3, qkv_bias=True))
    model.predict = nn.Linear(96, 192)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and not name.startswith("backbone."):
            timm.layers.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    timm.layers.trunc_normal_(model.mask_token, std=0.02)
    return model


def _old_parallel() -> nn.Module:
    parallel_models.register("vit_tiny_patch16_1x2_224")
    torch.manual_seed(3)
    return timm.create_model("vit_tiny_patch16_1x2_224", init_values=1e-5)  # type: ignore[no-any-return]


def _old_cifar_vit() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"img_size": 32, "patch_size": 2, "depth": 1, "qkv_bias": False, "num_classes": 100}
    return timm.create_model("vit_tiny_patch16_224", **sizes)  # type: ignore[no-any-return]


def _old_resnet() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"basic": True, "channels": (16, 16, 16, 16), "bottle_ratio": 1.0}
    return timm.models.resnetv2.ResNetV2(
        [2, 2, 2, 2], conv_layer=timm.layers.create_conv2d, norm_layer=timm.layers.BatchNormAct2d, **sizes
    )  # type: ignore[no-any-return]


OLD: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "attention of AlterNet": (lambda: WindowAttention(16, nn.Identity(), 8, 2, 4, 3), _old_window),
    "ResNet of AlterNet": (
        lambda: AlterNet([2, 2, 2, 2], basic=True, channels=(16, 16, 16, 16)), _old_resnet,
    ),
    "ViT for CIFAR": (_cifar_vit, _old_cifar_vit),
    "squeeze-and-excitation": (lambda: SqueezeExcite(32, 8), _old_excite),
    "predicted words": (lambda: TokenModel(_vit(num_classes=0), 24, "tokens"), _old_tokens),
    "predicted pixels": (lambda: TokenModel(_vit(num_classes=0), 24, "tokens", "simmim.linear"), _old_tokens),
    "decoder": (_mae, _old_mae),
    "parallel blocks": (lambda: parallel_models.build("vit_tiny_patch16_1x2_224"), _old_parallel),
}  # fmt: skip


@pytest.mark.parametrize("what", OLD)
def test_version_0_1_s_weights_are_drawn_again_bit_by_bit_from_the_same_seed(what: str) -> None:
    build, by_hand = OLD[what]
    with initial_weights("0.1"):
        expected = by_hand().state_dict()
        torch.manual_seed(3)
        old = build().state_dict()
    torch.manual_seed(3)
    new = build().state_dict()
    assert old.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in old.items())
    equal = all(torch.equal(value, new[name]) for name, value in old.items())
    assert equal == (what == "squeeze-and-excitation")  # which is the same today


def test_the_scheme_is_an_argument_of_create_model_and_holds_for_its_transforms() -> None:
    def drawn(**options: Any) -> Tensor:
        model: Any = create_model(
            "preact_resnet_18_cifar", num_classes=3, img_size=32, pretrained=False, kwargs={"channels": [16] * 4},
            transforms=[Transform("build_up", {"msa_blocks": 1, "window_size": 4})], **options,
        )  # fmt: skip
        assert model.created.init == options.get("init", "papers")
        value: Tensor = model.stages[3].blocks[1].attn.q.weight.detach()
        return value

    assert drawn(init="0.1").std().item() == pytest.approx(0.02, rel=0.05)
    assert drawn().std().item() == pytest.approx(1 / math.sqrt(3 * 16), rel=0.05)
    with pytest.raises(UsageError, match=r"`init` is 'timm'; allowed is papers, 0.1"):
        create_model("vit_tiny_patch16_224", num_classes=3, pretrained=False, init="timm")  # type: ignore[arg-type]


def test_a_layer_scale_that_is_given_stays() -> None:
    model = parallel_models.build("vit_tiny_patch16_1x2_224", init_values=0.5)
    assert {m.gamma[0].item() for m in model.modules() if isinstance(m, LayerScale)} == {0.5}

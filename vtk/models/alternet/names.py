"""Models of Park and Kim 2022 in timm's registry: AlterNets, the same ResNets without attention, ViTs for CIFAR.

``alternet_50`` is for images of ImageNet (stem of stride 4, windows of 7), ``alternet_50_cifar`` for those of CIFAR
(stem of stride 1, windows of 4). ``preact_resnet_50`` has the same blocks, all of convolutions: four of them in the
last stage, where timm's ``resnetv2_50``, the paper's baseline, has three.

The number of attention blocks for CIFAR is not in the reference code. (0, 1, 1, 2) for 50 layers follows from the
paper's figures 11 and 12a; 34, 101 and 152 layers have the same here, and 18 layers have that for ImageNet.
"""

from collections.abc import Callable
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from vtk.models.alternet.model import AlterNet
from vtk.models.initialization.draw import redraw

LAYERS = {"18": (2, 2, 2, 2), "34": (3, 4, 6, 4), "50": (3, 4, 6, 4), "101": (3, 4, 23, 4), "152": (3, 8, 36, 4)}
"""Blocks of each stage by name."""
IMAGENET = {"18": (0, 1, 1, 1), "34": (0, 1, 3, 2), "50": (0, 1, 3, 2), "101": (0, 1, 3, 2), "152": (0, 1, 3, 2)}
"""Attention blocks of each stage, of the models for ImageNet."""
CIFAR = {**dict.fromkeys(LAYERS, (0, 1, 1, 2)), "18": (0, 1, 1, 1)}
"""Attention blocks of each stage, of the models for CIFAR."""

VITS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch2_32": {"patch_size": 2, "qkv_bias": False},
    "vit_tiny_patch2_gap_32": {
        "patch_size": 2, "qkv_bias": False, "class_token": False, "global_pool": "avg", "fc_norm": False,
    },
}  # fmt: skip
"""Arguments of the paper's ViTs for CIFAR that differ from timm's `TIMM_VIT`, of the same width, depth and heads."""
TIMM_VIT = "vit_tiny_patch16_224"

_BASIC = ("18", "34")
_IMAGENET = {
    "input_size": (3, 224, 224), "crop_pct": 0.875, "interpolation": "bicubic", "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD, "pool_size": (7, 7), "first_conv": "stem.conv", "classifier": "head.fc",
}  # fmt: skip
# the reference code's statistics of CIFAR-100
_CIFAR = {
    "input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "bicubic", "mean": (0.5071, 0.4867, 0.4408),
    "std": (0.2675, 0.2565, 0.2761), "num_classes": 100,
}  # fmt: skip

# timm's `register_model` reads this table and `__all__` of the module of each entry point
default_cfgs: dict[str, Any] = {}
__all__ = ["CIFAR", "IMAGENET", "LAYERS", "TIMM_VIT", "VITS", "is_ours"]


def is_ours(name: str) -> bool:
    """Return whether timm has a name (without weights tag) only through this module."""
    return name.split(".")[0] in default_cfgs


def _register(name: str, cfg: dict[str, Any], build: Callable[..., nn.Module], text: str) -> None:
    def entry_point(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return build(name, pretrained, **kwargs)

    entry_point.__name__ = entry_point.__qualname__ = name
    entry_point.__doc__ = text
    default_cfgs.update(generate_default_cfgs({f"{name}.untrained": cfg}))
    globals()[name] = register_model(entry_point)


def _register_nets(size: str) -> None:
    layers, basic = LAYERS[size], size in _BASIC

    def add(name: str, cifar: bool, counts: tuple[int, ...], text: str) -> None:
        own: dict[str, Any] = {"layers": layers, "basic": basic, "msa_blocks": counts}
        own |= {"stem": "cifar", "window_size": 4} if cifar else {}

        def build(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
            return build_model_with_cfg(
                AlterNet, name, pretrained, feature_cfg={"flatten_sequential": True}, **{**own, **kwargs}
            )

        _register(name, {**_IMAGENET, **(_CIFAR if cifar else {})}, build, text)

    add(f"alternet_{size}", False, IMAGENET[size], f"AlterNet of {size} layers for ImageNet (Park and Kim 2022).")
    add(f"alternet_{size}_cifar", True, CIFAR[size], f"AlterNet of {size} layers for CIFAR (Park and Kim 2022).")
    none = (0, 0, 0, 0)
    add(f"preact_resnet_{size}", False, none, f"The pre-activation ResNet that alternet_{size} is built from.")
    add(f"preact_resnet_{size}_cifar", True, none, f"The ResNet that alternet_{size}_cifar is built from.")


def _register_vit(name: str) -> None:
    def build(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
        arguments = {
            "img_size": 32, "embed_dim": 192, "depth": 12, "num_heads": 3, **VITS[name], **kwargs,
        }  # fmt: skip
        features = {"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"}
        model: nn.Module = build_model_with_cfg(
            VisionTransformer, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features,
            **arguments,
        )  # fmt: skip
        if not pretrained and "weight_init" not in kwargs:
            _reset_vit(model)
        return model

    text = "without a class token, classified by the mean of all tokens (figure 6)" if "gap" in name else "as it is"
    cfg = {**_CIFAR, "first_conv": "patch_embed.proj", "classifier": "head", "fixed_input_size": True}
    _register(name, cfg, build, f"The ViT-Ti with patches of 2 on 32 px of Park and Kim 2022's reference code, {text}.")


def _reset_vit(model: nn.Module) -> None:
    """Draw a ViT's weights by the table, over timm's."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            redraw(module, "cifar_vit.linear")
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("cls_token", "pos_embed"):
            redraw(parameter, "cifar_vit.position")


for _size in LAYERS:
    _register_nets(_size)
for _name in VITS:
    _register_vit(_name)

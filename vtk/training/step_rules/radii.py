"""ρ of `--sam auto`: Table 11 of Chen et al. 2022, tuned on ImageNet at 224 px for plain SAM.

An architecture that is not in it takes the nearest entry of its family: first by size (S up to a width of 543, between
ViT-S's 384 and ViT-B's 768 on a scale of ratios; ResNets by their number of blocks and width), then by patch, again by
ratio. The table is only about classes of timm that the paper trained, so others need a number.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from timm.models.deit import VisionTransformerDistilled
from timm.models.mlp_mixer import MixerBlock, MlpMixer
from timm.models.resnet import BasicBlock, ResNet
from timm.models.resnetv2 import PreActBasic, ResNetV2
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vtk.errors import UsageError

Kind = Literal["supervised", "augmented", "adversarial", "contrastive"]
"""How a model is trained; augmented is with mixup and RandAugment (AUG in Chen et al. 2022), contrastive supervised."""

ADAPTIVE = 10.0
"""How much more adaptive SAM wants: ASAM's own search ended at 0.5 to 1 where SAM's did at 0.05 to 0.1."""

_VIT: Mapping[Kind, Mapping[tuple[str, int], float]] = {
    "supervised": {
        ("S", 32): 0.05, ("S", 16): 0.1, ("S", 14): 0.1, ("S", 8): 0.15, ("B", 32): 0.15, ("B", 16): 0.2,
    },
    "augmented": {("B", 16): 0.05},
    "adversarial": {("S", 16): 0.1, ("B", 32): 0.1, ("B", 16): 0.1},
    "contrastive": {("S", 16): 0.02, ("B", 16): 0.02},
}  # fmt: skip
_MIXER: Mapping[Kind, Mapping[tuple[str, int], float]] = {
    "supervised": {
        ("S", 32): 0.1, ("S", 16): 0.15, ("S", 8): 0.2, ("B", 32): 0.35, ("B", 16): 0.6, ("B", 8): 0.6,
    },
    "augmented": {("B", 16): 0.2},
    "adversarial": {("S", 16): 0.05, ("B", 32): 0.25, ("B", 16): 0.25},
}  # fmt: skip
_RESNET: Mapping[Kind, Mapping[tuple[int, int], float]] = {  # (layers, width)
    "supervised": {(50, 1): 0.02, (101, 1): 0.05, (152, 1): 0.02, (50, 2): 0.05, (101, 2): 0.05, (152, 2): 0.05},
    "adversarial": {(50, 1): 0.05, (101, 1): 0.05, (152, 1): 0.05},
}
_USUAL = "0.02 to 0.6 are usual"
_WIDTHS = {"ViT": {"S": 384, "B": 768}, "Mixer": {"S": 512, "B": 768}}


def find_radius(model: nn.Module, kind: Kind) -> tuple[float, str]:
    """Return ρ and the entry it is from.

    Args:
        model: of timm.
        kind: of training.

    Raises:
        UsageError: the table has nothing like this model.
    """
    body: Any = model
    if type(body) in (VisionTransformer, VisionTransformerDistilled):
        return _of_tokens("ViT", _VIT, body.embed_dim, _patch(body.patch_embed), kind)
    if type(body) is MlpMixer and all(isinstance(block, MixerBlock) for block in body.blocks):
        return _of_tokens("Mixer", _MIXER, body.embed_dim, _patch(body.stem), kind)
    if type(body) is ResNet:
        stages = [list(stage) for stage in (body.layer1, body.layer2, body.layer3, body.layer4)]
        return _of_resnet(stages, body.num_features, kind)
    if type(body) is ResNetV2:
        return _of_resnet([list(stage.blocks) for stage in body.stages], body.num_features, kind)
    name = type(model).__name__ + (f" of {type(body.blocks[0]).__name__}" if type(body) is MlpMixer else "")
    raise UsageError(
        f"`--sam` auto: Chen et al. 2022 have no ρ for {name} (they have ViT, MLP-Mixer and ResNet); give a number, "
        f"{_USUAL}"
    )


def _of_tokens(
    family: str, table: Mapping[Kind, Mapping[tuple[str, int], float]], width: int, patch: float, kind: Kind
) -> tuple[float, str]:
    entries = _of_kind(family, table, kind)
    size = min(_WIDTHS[family], key=lambda name: _apart(width, _WIDTHS[family][name]))
    own = {key: rho for key, rho in entries.items() if key[0] == size} or entries
    key = min(own, key=lambda entry: _apart(patch, entry[1]))
    return own[key], f"{family}-{key[0]}/{key[1]}, {kind}"


def _of_resnet(stages: list[list[nn.Module]], features: int, kind: Kind) -> tuple[float, str]:
    entries = _of_kind("ResNet", _RESNET, kind)
    blocks = [block for stage in stages for block in stage]
    basic = isinstance(blocks[0], (BasicBlock, PreActBasic))
    width = features / (512 if basic else 2048)
    layers = len(blocks) * (2 if basic else 3) + 2
    key = min(entries, key=lambda entry: (_apart(width, entry[1]), _apart(layers, entry[0])))
    return entries[key], f"ResNet-{key[0]}{'x2' if key[1] == 2 else ''}, {kind}"


def _of_kind(family: str, table: Mapping[Kind, Any], kind: Kind) -> Any:
    if kind not in table:
        raise UsageError(
            f"`--sam` auto: Chen et al. 2022 have no ρ for {kind} training of a {family}; give a number, {_USUAL}"
        )
    return table[kind]


def _patch(embed: Any) -> float:
    size = embed.patch_size
    return math.sqrt(size[0] * size[1]) if isinstance(size, tuple) else float(size)


def _apart(a: float, b: float) -> float:
    return abs(math.log(a / b))

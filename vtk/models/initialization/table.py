"""The table of initial weights: for each kind of layer the distribution, its standard deviation, and the source.

A kind is one or several layers of one module. A formula gives the standard deviation from the weight's ``fan_in``
(inputs of one output: channels × kernel) and ``fan_out`` (outputs × kernel). Layers of timm's own models are not here:
timm initialises them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Distribution = Literal["uniform", "normal", "truncated", "truncated (timm)", "cut normal", "constant"]
"""``truncated`` is normal within ±2, which for a deviation of 0.02 cuts nothing; torch and timm draw it differently.
``cut normal`` is normal within one deviation of the normal distribution."""

CUT = math.sqrt(1 - math.sqrt(2 / math.pi) * math.exp(-0.5) / math.erf(math.sqrt(0.5)))
"""Standard deviation of a standard normal distribution within ±1."""

FORMULAS: Mapping[str, Callable[[int, int], float]] = {
    "0": lambda fan_in, fan_out: 0.0,
    "0.01": lambda fan_in, fan_out: 0.01,
    "0.54·0.02": lambda fan_in, fan_out: CUT * 0.02,
    "0.02": lambda fan_in, fan_out: 0.02,
    "1/√(3·fan_in)": lambda fan_in, fan_out: 1 / math.sqrt(3 * fan_in),
    "√(2/(fan_in + fan_out))": lambda fan_in, fan_out: math.sqrt(2 / (fan_in + fan_out)),
    "√(2/fan_out)": lambda fan_in, fan_out: math.sqrt(2) / math.sqrt(fan_out),
}
"""Standard deviation from fan_in and fan_out, by its text."""


@dataclass(frozen=True)
class Draw:
    """Distribution of the values of a tensor.

    Attributes:
        distribution: of mean 0; ``constant`` is filled with ``mean``.
        formula: of the standard deviation, a key of `FORMULAS`.
        mean: of a constant.
    """

    distribution: Distribution
    formula: str = "0"
    mean: float = 0.0

    def deviation(self, fan_in: int, fan_out: int) -> float:
        """Return the standard deviation."""
        return FORMULAS[self.formula](fan_in, fan_out)

    def __str__(self) -> str:
        """Return the words of the documentation's table."""
        return f"{self.mean:g}" if self.distribution == "constant" else f"{self.distribution}, {self.formula}"


ZEROS, ONES = Draw("constant"), Draw("constant", mean=1.0)
_TORCH = Draw("uniform", "1/√(3·fan_in)")
_NORMAL, _TRUNCATED = Draw("normal", "0.02"), Draw("truncated", "0.02")
_TRUNCATED_TIMM = Draw("truncated (timm)", "0.02")


@dataclass(frozen=True)
class Row:
    """Initial values of one kind of layer.

    Attributes:
        layers: names of the layers or parameters.
        weight: values of the weight, or of the parameter.
        bias: values of the bias, if it has one.
        source: paper or code that states them.
        old_weight: values of version 0.1; None where they are the same.
        old_bias: the same, of the bias.
    """

    layers: str
    weight: Draw
    bias: Draw | None
    source: str
    old_weight: Draw | None = None
    old_bias: Draw | None = None

    @property
    def changed(self) -> bool:
        """Whether version 0.1 drew it otherwise."""
        pairs = (self.old_weight, self.weight), (self.old_bias, self.bias)
        return any(old is not None and old != new for old, new in pairs)


_CUT = Draw("cut normal", "0.54·0.02")
_DEIT = "DeiT's code, in which Hyeon-Woo et al. 2023 train; they state no other"
_TNT = "Han et al. 2021's code, of TNT"
_ALTERNET = "Park and Kim 2022's code leaves torch's default"
TABLE: Mapping[str, Row] = {
    "alternet.conv": Row(
        "AlterNet and preact_resnet: convolutions of stem and blocks, `attn.reduce`", _TORCH, _TORCH, _ALTERNET,
        Draw("normal", "√(2/fan_out)"), ZEROS,
    ),
    "alternet.attention": Row(
        "AlterNet: `attn.q`, `attn.kv`, `attn.proj`", _TORCH, _TORCH, _ALTERNET, _TRUNCATED, ZEROS,
    ),
    "alternet.position": Row(
        "AlterNet: `attn.relative_position_bias_table`", _NORMAL, None, "Park and Kim 2022's code",
    ),
    "alternet.classifier": Row(
        "AlterNet and preact_resnet: `head.fc`", _TORCH, _TORCH, _ALTERNET, Draw("normal", "0.01"), ZEROS,
    ),
    "cifar_vit.linear": Row(
        "vit_tiny_patch2_32, vit_tiny_patch2_gap_32: linear layers and `patch_embed.proj`", _TORCH, _TORCH, _ALTERNET,
        _TRUNCATED_TIMM, ZEROS,
    ),
    "cifar_vit.position": Row(
        "vit_tiny_patch2_32, vit_tiny_patch2_gap_32: `cls_token`, `pos_embed`", _NORMAL, None,
        "Park and Kim 2022's code", _TRUNCATED_TIMM,
    ),
    "dino.linear": Row(
        "vtk pretrain --method dino: linear layers of the projection", _TRUNCATED_TIMM, ZEROS,
        "code of Caron et al. 2021",
    ),
    "dino.prototypes": Row(
        "vtk pretrain --method dino: `prototypes` before they are normalised", _TORCH, None,
        "code of Caron et al. 2021 leaves torch's default",
    ),
    "stem.conv": Row(
        "stems conv, hmlp, levit: convolutions", _TORCH, _TORCH,
        "the codes of VOLO, DeiT and LeViT leave torch's default",
    ),
    "stem.local_linear": Row("stem local-transformer: linear layers", _TRUNCATED_TIMM, ZEROS, _TNT),
    "stem.local_position": Row("stem local-transformer: `position`", _TRUNCATED_TIMM, None, _TNT),
    "extra_block.linear": Row(
        "--extra-block: linear layers", _TRUNCATED_TIMM, ZEROS, "DeiT's code, in which Hyeon-Woo et al. 2023 train",
    ),
    "lvvit.aux_head": Row("lvvit_*: `aux_head`", _TRUNCATED_TIMM, ZEROS, "Jiang et al. 2021's code"),
    "lvvit.cls_token": Row("lvvit_*: `cls_token`", _TRUNCATED_TIMM, None, "Jiang et al. 2021's code"),
    "scaled_relu.alpha": Row(
        "stem activation scaled-relu: `alpha`", ZEROS, None, "Wang et al. 2022, eq. 1, of a new BatchNorm",
    ),
    "scaled_relu.beta": Row(
        "stem activation scaled-relu: `beta`", ONES, None, "Wang et al. 2022, eq. 1, of a new BatchNorm",
    ),
    "context_broadcast.scale": Row(
        "CB_S: Λ", ZEROS, None, "not stated by Hyeon-Woo et al. 2023; 0 leaves a pretrained model as it is",
    ),
    "uniform_heads.qkv": Row("uniform heads: new rows of `attn.qkv`", _TRUNCATED, ZEROS, _DEIT),
    "uniform_heads.proj": Row(
        "uniform heads, variant c: new columns of `attn.proj`", ZEROS, None,
        "not stated by Hyeon-Woo et al. 2023; 0 leaves a pretrained model as it is",
    ),
    "squeeze_excite.linear": Row("squeeze-and-excitation: `fc1`, `fc2`", _TRUNCATED, ZEROS, _DEIT),
    "parallel.layer_scale": Row(
        "vit_*_NxP: `ls.gamma`", Draw("constant", mean=1e-4), None, "Touvron et al. 2022's code (DeiT's)",
        Draw("constant", mean=1e-5),
    ),
    "mae.linear": Row(
        "--method mae: linear layers of the decoder", Draw("uniform", "√(2/(fan_in + fan_out))"), ZEROS,
        "He et al. 2021's code", _TRUNCATED_TIMM, ZEROS,
    ),
    "mae.mask_token": Row("--method mae: `mask_token`", _NORMAL, None, "He et al. 2021's code", _TRUNCATED_TIMM),
    "beit.linear": Row("--method beit: `predict`", _CUT, ZEROS, "Bao et al. 2021's code", _TRUNCATED_TIMM, ZEROS),
    "simmim.linear": Row(
        "--method simmim: `predict`", _TORCH, _TORCH, "Xie et al. 2021's code leaves torch's default", _TRUNCATED_TIMM,
        ZEROS,
    ),
    "masked.mask_token": Row(
        "--method beit, simmim: `mask_token`", _CUT, None, "the codes of Bao et al. 2021 and Xie et al. 2021",
        _TRUNCATED_TIMM,
    ),
    "supcon.projection": Row(
        "--method supcon: `projection`", _TORCH, _TORCH, "Khosla et al. 2020's code leaves torch's default",
    ),
}  # fmt: skip
"""Rows by kind of layer."""

"""LV-ViT (Jiang et al. 2021) in timm's registry, which has none: ``lvvit_tiny``, ``_small``, ``_medium``, ``_large``.

It is a ViT whose stem is the convolutional one of Wang et al. 2022, 3Conv+3BN+3ReLU+1Proj, of 128 channels in the large
model; whose residual branches are divided by 2 (tiny: 1, large: 3); whose FFNs have three times the width; and that has
a second classifier of the patch tokens, of which the highest logit of each class counts half beside the class token's.
So it is in the published code, which trains the second classifier on a label for each token. Here it is trained through
the sum, as timm does with VOLO's: token labels and their mixing (MixToken) are not there.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from vtk.models.initialization.draw import reset, reset_tensor
from vtk.models.stems.build import make_stem
from vtk.models.stems.own import shape_of
from vtk.models.stems.replace import Stem, name_first_conv

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 240, "depth": 12, "num_heads": 4, "skip": 1.0},
    "small": {"embed_dim": 384, "depth": 16, "num_heads": 6, "skip": 2.0},
    "medium": {"embed_dim": 512, "depth": 20, "num_heads": 8, "skip": 2.0},
    "large": {"embed_dim": 768, "depth": 24, "num_heads": 12, "skip": 3.0, "stem_hidden_dim": 128},
}
"""Arguments of `LvVit` by size, as in the published code."""

# timm's `register_model` reads this table and `__all__` of the module of each entry point
default_cfgs: dict[str, Any] = {}
__all__ = ["SIZES", "LvVit", "ScaledResidualBlock", "is_ours"]


class ScaledResidualBlock(Block):  # type: ignore[misc]
    """timm's block with both residual branches divided by a number.

    Args:
        skip: by which they are divided.
        kwargs: of timm's `Block`.
    """

    def __init__(self, *args: Any, skip: float = 2.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.skip = skip

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C)."""
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(attended)) / self.skip
        y: Tensor = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x)))) / self.skip
        return y


class LvVit(VisionTransformer):  # type: ignore[misc]
    """LV-ViT: timm's VisionTransformer with a conv stem, divided branches and a classifier of the patch tokens.

    Args:
        skip: by which the residual branches are divided.
        stem_hidden_dim: channels of the stem's convolutions.
        use_aux_head: whether it has the classifier of the patch tokens.
        kwargs: of timm's VisionTransformer.

    Attributes:
        aux_head: classifier of the patch tokens, or None.
    """

    def __init__(
        self, *, skip: float = 2.0, stem_hidden_dim: int = 64, use_aux_head: bool = True, **kwargs: Any
    ) -> None:
        own = {"mlp_ratio": 3.0, "qkv_bias": False, "norm_layer": partial(nn.LayerNorm, eps=1e-5)}
        super().__init__(**{**own, "block_fn": partial(ScaledResidualBlock, skip=skip), **kwargs})
        embed = self.patch_embed
        shape = dataclasses.replace(shape_of(embed), hidden=stem_hidden_dim)
        embed.__class__ = Stem
        embed.stem, embed.is_own, embed.proj = "conv", True, make_stem("conv", shape)
        name_first_conv(self, embed.proj)
        self.use_aux_head = use_aux_head
        self._new_aux_head()
        if self.cls_token is not None:
            reset_tensor(self.cls_token, "lvvit.cls_token")

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace both classifiers, as timm's VisionTransformer."""
        super().reset_classifier(num_classes, global_pool)
        self._new_aux_head()

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens (B, N, C) to logits (B, classes), or to the pooled token (B, C) before them."""
        y: Tensor = super().forward_head(x, pre_logits)
        if pre_logits or self.aux_head is None:
            return y
        return y + 0.5 * self.aux_head(x[:, self.num_prefix_tokens :]).amax(1)

    def _new_aux_head(self) -> None:
        like = next(self.parameters())
        make = self.use_aux_head and self.num_classes > 0
        self.aux_head = (
            nn.Linear(self.embed_dim, self.num_classes, device=like.device, dtype=like.dtype) if make else None
        )
        if self.aux_head is not None:
            reset(self.aux_head, "lvvit.aux_head")


def is_ours(name: str) -> bool:
    """Return whether timm has a name (without weights tag) only through this module."""
    return name.split(".")[0] in default_cfgs


def _entry_point(name: str, size: str) -> Callable[..., nn.Module]:
    def entry_point(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        arguments: dict[str, Any] = {"patch_size": 16, **SIZES[size], **kwargs}
        features = {"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"}
        model: nn.Module = build_model_with_cfg(
            LvVit, name, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=features, **arguments
        )
        return model

    entry_point.__name__ = entry_point.__qualname__ = name
    entry_point.__doc__ = f"LV-ViT {size} (Jiang et al. 2021)."
    return entry_point


for _size in SIZES:
    _name = f"lvvit_{_size}"
    _cfg = {
        "input_size": (3, 224, 224), "crop_pct": 0.9, "interpolation": "bicubic", "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD, "first_conv": "patch_embed.proj.conv.0", "classifier": ("head", "aux_head"),
        "fixed_input_size": True, "num_classes": 1000,
    }  # fmt: skip
    default_cfgs.update(generate_default_cfgs({f"{_name}.untrained": _cfg}))
    globals()[_name] = register_model(_entry_point(_name, _size))

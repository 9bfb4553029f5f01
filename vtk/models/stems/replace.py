"""The transform ``replace_stem``: replaces the stem of a Vision Transformer or a VOLO by another one.

The new stem is a subclass of timm's PatchEmbed with a Sequential in place of the convolution: timm handles image sizes,
padding, position tables and prefix tokens as before. Its tensors are ``patch_embed.proj.…``, those of hMLP as in deit
(``patch_embed.proj.0.weight``). VOLO's stem gives a map, and its position table comes later: there the new layers alone
take the place of the convolutions and the projection (`vtk.models.stems.own.VoloStem`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from timm.layers import PatchEmbed
from timm.models.volo import PatchEmbed as VoloEmbed
from torch import nn

from vtk.errors import UsageError
from vtk.models.stems.build import make_stem
from vtk.models.stems.names import PATCHWISE, PLAIN, ActivationName, StemName
from vtk.models.stems.own import VoloStem, own_stem, shape_of
from vtk.models.transforms.registry import register

_PROJ = "patch_embed.proj"
_KEPT = f"{_PROJ}.proj"
"""Name of the model's own projection in a stem that keeps it."""


class Stem(PatchEmbed):  # type: ignore[misc]
    """timm's PatchEmbed with the layers of a stem as its ``proj``.

    Attributes:
        stem: its name.
        is_own: whether its model was built with it, as LV-ViT is.
        kept: whether the projection of the model's own stem is in it.
        patchwise: whether a token depends only on its own patch (with BatchNorm, in eval mode).
    """

    stem: StemName
    is_own = False
    kept = False
    proj: nn.Sequential

    @property
    def patchwise(self) -> bool:
        """Whether masking patches before the stem and tokens after it are equivalent for the other tokens."""
        return self.stem in PATCHWISE

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Set another image size, as timm's PatchEmbed.

        Raises:
            UsageError: another patch size, which the strides of the stem fix.
        """
        new_size = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        if new_size is not None and tuple(new_size) != tuple(self.patch_size):
            raise UsageError(
                f"`patch_size` {patch_size}: stem {self.stem} has patches of {self.patch_size}, which cannot be "
                "resampled; set the patch size before replacing the stem"
            )
        super().set_input_size(img_size)


@register("replace_stem")
def replace_stem(
    model: nn.Module, *, stem: StemName, act: ActivationName | None = None, strides: Sequence[int] | None = None,
    depth: int | None = None,
) -> dict[str, str | None]:  # fmt: skip
    """Replace the stem of a Vision Transformer or a VOLO, in place.

    Args:
        model: any timm model whose ``patch_embed`` is timm's PatchEmbed of one convolution: vit, deit (also distilled),
            BEiT, EVA, CaiT, and their like, also of parallel branches; or a VOLO.
        stem: one of `vtk.models.stems.STEMS`.
        act: activation; by default the paper's.
        strides: of the four layers of a conv stem, by default 2, 1, 1, and half the patch.
        depth: layers of a local-transformer stem, by default 24.

    Returns:
        The map from the model's keys to themselves, None for each tensor of the stem. Stems that keep the projection
        (``1proj…``, not of a VOLO, whose projection reads convolutions) have its weights, under the key
        ``patch_embed.proj.proj.weight``.

    Raises:
        UsageError: a model or patch size that does not support it; the model is unchanged.
    """
    embed: Any = getattr(model, "patch_embed", None)
    refuse_stem(model, embed)
    is_volo, own = type(embed) is VoloEmbed, own_stem(embed)
    old = embed.proj if own == PLAIN else None
    shape = shape_of(embed)
    layers = make_stem(stem, shape, act=act, strides=strides, depth=depth, proj=old)
    kept = any(layer is old for layer in layers.modules())
    for layer in layers.modules():
        if layer is not old:
            layer.training = embed.training
    if is_volo:
        embed.conv, embed.patch_size = None, shape.patch
    embed.__class__ = VoloStem if is_volo else Stem
    embed.stem, embed.proj, embed.is_own, embed.kept = stem, layers, False, kept
    name_first_conv(model, layers)
    return {key: _source(key, kept) for key in model.state_dict()}


def refuse_stem(model: nn.Module, embed: Any) -> None:
    """Refuse a model whose stem cannot be replaced.

    Raises:
        UsageError: names the model and its stem.
    """
    kind = type(model).__name__
    own = own_stem(embed)
    if own is None and isinstance(embed, (Stem, VoloStem)):
        raise UsageError(f"{kind} already has the stem {embed.stem}; a stem is replaced once")
    if own is None:
        found = type(embed)
        # classes of other modules of timm have the same name
        name = f"{found.__module__}.{found.__name__}" if found.__name__ == PatchEmbed.__name__ else found.__name__
        what = "no `patch_embed`" if embed is None else f"a {name} as its `patch_embed`"
        raise UsageError(
            f"{kind} has {what}, and --stem replaces the projection of timm.layers.PatchEmbed; give a model that has "
            "one (vit_*, deit_*, beit_*, …), a volo_* or an lvvit_*"
        )
    if own == "conv":
        return
    conv = embed.proj
    plain = type(conv) is nn.Conv2d and conv.kernel_size == conv.stride == tuple(embed.patch_size)
    if not plain or conv.padding != (0, 0) or conv.dilation != (1, 1) or conv.groups != 1:
        raise UsageError(f"`{_PROJ}` of {kind} is {conv}, and --stem replaces a projection of whole patches only")


def _source(key: str, kept: bool) -> str | None:
    if not key.startswith(f"{_PROJ}."):
        return key
    return key.replace(_KEPT, _PROJ, 1) if kept and key.startswith(f"{_KEPT}.") else None


def name_first_conv(model: Any, layers: nn.Sequential) -> None:
    """Update the name of the first convolution, for adapting it to other channels."""
    first = next(name for name, part in layers.named_modules() if isinstance(part, nn.Conv2d))
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(model, name, None)
        if isinstance(config, Mapping):  # a copy: timm shares it between models of the name
            setattr(model, name, {**config, "first_conv": f"{_PROJ}.{first}"})

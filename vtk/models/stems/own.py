"""Stems that models have of their own: the patch projection of a Vision Transformer, convolutions of VOLO and LV-ViT.

A request for a model's own stem is no change, so that one list of stems (Wang et al. 2022, Table 2) is for both:
``1proj`` leaves a ViT as it is and takes the convolutions of the others away; ``conv`` is the opposite.
"""

from collections.abc import Sequence
from typing import Any

from timm.layers import PatchEmbed
from timm.models.volo import PatchEmbed as VoloEmbed
from torch import Tensor, nn

from vtk.card import Transform
from vtk.models.stems.names import PLAIN, StemName
from vtk.models.stems.shape import StemShape


class VoloStem(VoloEmbed):  # type: ignore[misc]
    """VOLO's PatchEmbed with the layers of another stem as its ``proj``, and no ``conv`` before it.

    Attributes:
        stem: its name.
        patch_size: height and width of a patch in pixels.
    """

    stem: StemName
    patch_size: tuple[int, int]
    proj: nn.Sequential

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, chans, H, W) to a map (B, C, H ÷ patch, W ÷ patch)."""
        y: Tensor = self.proj(x)
        return y


def own_stem(embed: Any) -> StemName | None:
    """Return the name of a ``patch_embed`` that its model was built with; None for one that is not known."""
    if (type(embed) is VoloEmbed and embed.conv is not None) or getattr(embed, "is_own", False):
        return "conv"
    return PLAIN if type(embed) is PatchEmbed else None


def shape_of(embed: Any) -> StemShape:
    """Return channels, patch and tensor type of a ``patch_embed`` that `own_stem` names."""
    convs = getattr(embed, "conv", None) if type(embed) is VoloEmbed else getattr(embed.proj, "conv", None)
    first = embed.proj if convs is None else convs[0]
    factory: dict[str, Any] = {"device": first.weight.device, "dtype": first.weight.dtype}
    if first is embed.proj:
        return StemShape(first.in_channels, first.out_channels, tuple(embed.patch_size), **factory)
    last = embed.proj if type(embed) is VoloEmbed else embed.proj.proj
    patch = (first.stride[0] * last.stride[0], first.stride[1] * last.stride[1])
    return StemShape(first.in_channels, last.out_channels, patch, hidden=first.out_channels, **factory)


def without_own_stem(model: Any, transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Return transforms without a ``replace_stem`` that names the stem which a new model has anyway."""
    own = own_stem(getattr(model, "patch_embed", None))
    return tuple(t for t in transforms if t.op != "replace_stem" or t.args != {"stem": own})

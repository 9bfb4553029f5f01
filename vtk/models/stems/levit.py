"""LeViT's stem, for comparison (Touvron et al. 2022, Table 7): overlapping 3 × 3 convolutions of stride 2 with norms.

timm's modules for its two strides: 16 (four convolutions: C/8, C/4, C/2, C channels) and 8 (three: C/4, C/2, C).
"""

from timm.models.levit import ConvNorm, Stem8, Stem16
from torch import nn

from vtk.errors import UsageError
from vtk.models.stems.names import ActivationName
from vtk.models.stems.shape import StemShape


def levit_stem(shape: StemShape, act: ActivationName, *, layer_norm: bool) -> nn.Sequential:
    """Return timm's stem, with GELU as in the paper's comparison, or another activation, in place of Hardswish.

    Args:
        shape: channels and patch of the stem.
        act: activation; none follows the last convolution.
        layer_norm: LayerNorm over the channels of each position in place of BatchNorm.

    Raises:
        UsageError: a patch that is neither 16 × 16 nor 8 × 8, or indivisible channels.
    """
    kinds = {(16, 16): (Stem16, 8), (8, 8): (Stem8, 4)}
    if shape.patch not in kinds:
        height, width = shape.patch
        raise UsageError(f"`--stem` levit needs patches of 16 or 8 pixels; this model's are {height} × {width}")
    kind, least = kinds[shape.patch]
    shape.split_dim("levit", least)
    stem: nn.Sequential = kind(shape.in_chans, shape.dim, nn.Identity, **shape.factory)
    channels = 0
    for name, part in list(stem.named_children()):
        if isinstance(part, ConvNorm):
            channels = part.linear.out_channels
            if layer_norm:
                part.bn = shape.layer_norm(channels)
        else:
            setattr(stem, name, shape.activation(act, channels))
    return stem

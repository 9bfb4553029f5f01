"""A stem by its name."""

from collections.abc import Sequence

from torch import nn

from vtk.errors import UsageError
from vtk.models.stems.conv import conv_stem
from vtk.models.stems.hmlp import hmlp
from vtk.models.stems.levit import levit_stem
from vtk.models.stems.names import ACTIVATIONS, STEMS, ActivationName, StemName, default_activation, parts
from vtk.models.stems.shape import StemShape


def make_stem(
    stem: StemName,
    shape: StemShape,
    *,
    act: ActivationName | None = None,
    strides: Sequence[int] | None = None,
    proj: nn.Conv2d | None = None,
) -> nn.Sequential:
    """Return a stem that maps images (B, chans, H, W) to (B, C, H ÷ patch, W ÷ patch).

    Weights are drawn as torch draws those of a convolution, which is what deit and VOLO do.

    Args:
        stem: one of `STEMS`.
        shape: what it must fit.
        act: another activation than the papers' own.
        strides: of a conv stem.
        proj: the patch projection to keep, for stems of it alone.

    Raises:
        UsageError: an unknown name, an argument that the stem does not have, or a shape that it cannot have.
    """
    if stem not in STEMS:
        raise UsageError(f"`--stem` {stem} is not known; choose {', '.join(STEMS)}")
    own = default_activation(stem)
    if act is not None and own is None:
        raise UsageError(f"`--stem-act` {act}: --stem {stem} has no activation; leave it out")
    if act is not None and act not in ACTIVATIONS:
        raise UsageError(f"`--stem-act` {act} is not known; choose {', '.join(ACTIVATIONS)}")
    chosen = act or own or "relu"
    if parts(stem):
        return conv_stem(stem, shape, chosen, strides, proj)
    if strides is not None:
        raise UsageError(f"`--stem-strides` is of stems with convolutions; --stem {stem} has its own")
    make = levit_stem if stem.startswith("levit") else hmlp
    return make(shape, chosen, layer_norm=stem.endswith("-ln"))

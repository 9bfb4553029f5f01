"""Builds a stem by its name."""

from collections.abc import Sequence

from torch import nn

from vtk.errors import UsageError
from vtk.models.stems.conv import conv_stem
from vtk.models.stems.hmlp import hmlp
from vtk.models.stems.levit import levit_stem
from vtk.models.stems.local_transformer import local_transformer_stem
from vtk.models.stems.names import (
    ACTIVATIONS,
    LOCAL,
    STEMS,
    ActivationName,
    StemName,
    check_arguments,
    default_activation,
    parts,
)
from vtk.models.stems.shape import StemShape


def make_stem(
    stem: StemName,
    shape: StemShape,
    *,
    act: ActivationName | None = None,
    strides: Sequence[int] | None = None,
    depth: int | None = None,
    proj: nn.Conv2d | None = None,
) -> nn.Sequential:
    """Return a stem that maps images (B, chans, H, W) to (B, C, H ÷ patch, W ÷ patch).

    Weights have torch's default initialisation of convolutions, as in deit and VOLO.

    Args:
        stem: one of `STEMS`.
        shape: channels and patch of the stem.
        act: activation; by default the paper's.
        strides: of a conv stem.
        depth: layers of the local-transformer stem.
        proj: the patch projection to keep, for the ``1proj`` stems.

    Raises:
        UsageError: an unknown name, an argument that the stem does not have, or an unsupported shape.
    """
    if stem not in STEMS:
        raise UsageError(f"`--stem` is {stem}; allowed is {', '.join(STEMS)}")
    check_arguments(stem, act, strides, depth)
    if act is not None and act not in ACTIVATIONS:
        raise UsageError(f"`--stem-act` is {act}; allowed is {', '.join(ACTIVATIONS)}")
    chosen = act or default_activation(stem) or "relu"
    if parts(stem):
        return conv_stem(stem, shape, chosen, strides, proj)
    if stem == LOCAL:
        return local_transformer_stem(shape, chosen, depth)
    make = levit_stem if stem.startswith("levit") else hmlp
    return make(shape, chosen, layer_norm=stem.endswith("-ln"))

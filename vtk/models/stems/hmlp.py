"""hMLP (Touvron et al. 2022, §5 and Fig. 5): linear layers that merge growing pieces of a patch, with norm and GELU.

Kernel and stride of each convolution are equal, so patches are independent. As in deit's code, which has only patches
of 16 × 16: three layers, the last two merging 2 × 2 each, so that the first sees a quarter of the patch's side
(4·2·2 = 16); the paper's text starts from 2 × 2. The same is done per axis for every patch divisible by 4: 8 = 2·2·2,
32 = 8·2·2. A patch divisible only by 2 merges once, and the last layer is 1 × 1: 14 = 7·2·1. An odd patch is refused.
"""

from torch import nn

from vtk.errors import UsageError
from vtk.models.stems.names import ActivationName
from vtk.models.stems.shape import StemShape


def hmlp_strides(patch: int) -> tuple[int, int, int]:
    """Return the three strides along one axis, whose product is the patch.

    Raises:
        UsageError: the patch is odd.
    """
    if patch % 4 == 0:
        return patch // 4, 2, 2
    if patch % 2 == 0:
        return patch // 2, 2, 1
    raise UsageError(
        f"`--stem` hmlp halves a patch, and this model's is {patch} pixels; use a model with an even patch size, or "
        "--stem 1proj+1bn+1relu"
    )


def hmlp(shape: StemShape, act: ActivationName, *, layer_norm: bool) -> nn.Sequential:
    """Return the stem, with deit's layer names: 0, 3, 6 convolutions with bias; 1, 4, 7 norms; 2, 5 activations.

    The widths are C/4, C/4, C; nothing follows the last norm.

    Args:
        shape: channels and patch of the stem.
        act: activation.
        layer_norm: LayerNorm over the channels of each position (any batch size) in place of BatchNorm.

    Raises:
        UsageError: an odd patch, or channels not divisible by 4.
    """
    narrow = shape.split_dim("hmlp", 4)
    norm = shape.layer_norm if layer_norm else shape.batch_norm
    layers: list[nn.Module] = []
    chans = shape.in_chans
    steps = zip(*map(hmlp_strides, shape.patch), (narrow, narrow, shape.dim), strict=True)
    for height, width, out in steps:
        step = (height, width)
        layers += [nn.Conv2d(chans, out, step, step, **shape.factory), norm(out), shape.activation(act, out)]
        chans = out
    return nn.Sequential(*layers[:-1])

"""The convolutional stem (Wang et al. 2022, after VOLO's), with the ablations and strides of its Tables 2 and 3.

Three convolutions 7 × 7, 3 × 3, 3 × 3 to 64 channels with BatchNorm and ReLU, then the projection: a convolution whose
kernel is half a patch (8 × 8), with bias and nothing after it. The strides are (2, 1, 1, 8), or any four with the patch
as their product, with the same kernels (in the paper (2, 2, 2, 2)).

Choices made here where the paper gives no details:

- padding under other strides: an odd kernel k has (k − 1)/2 on each side, as in VOLO; the projection has (k − s)/2, so
  that 8 with stride 2 has 3. Maps then shrink by the stride exactly;
- a convolution without BatchNorm has a bias: otherwise, removing BatchNorm would remove the shift together with the
  scale;
- layers after the projection (``…+1proj+1relu``, ``1proj+1bn+1relu``) are in the order of the name.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from vtk.errors import UsageError
from vtk.models.stems.names import ActivationName, StemName, parts
from vtk.models.stems.shape import StemShape

_KERNELS = (7, 3, 3)


def conv_stem(
    stem: StemName,
    shape: StemShape,
    act: ActivationName,
    strides: Sequence[int] | None = None,
    proj: nn.Conv2d | None = None,
) -> nn.Sequential:
    """Return the stem: ``conv`` (with all parts numbered as in VOLO, from 0 to 8), ``proj``, ``norm``, ``act``.

    Args:
        stem: one of the paper's names.
        shape: channels and patch of the stem.
        act: replaces ReLU.
        strides: of the three convolutions and the projection; by default 2, 1, 1 and half the patch.
        proj: the model's patch projection, which the ``1proj`` stems keep with its weights.

    Raises:
        UsageError: an odd patch, or strides that do not fit it or the kernels.
    """
    names = parts(stem)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if "3conv" in names:
        chosen = _strides(stem, shape, strides)
        has_norm, has_act = "3bn" in names, "3relu" in names
        convs: list[nn.Module] = []
        chans = shape.in_chans
        for kernel, stride in zip(_KERNELS, chosen[:3], strict=True):
            convs.append(
                nn.Conv2d(chans, shape.hidden, kernel, stride, kernel // 2, bias=not has_norm, **shape.factory)  # type: ignore[arg-type]
            )
            convs += [shape.batch_norm(shape.hidden)] if has_norm else []
            convs += [shape.activation(act, shape.hidden)] if has_act else []
            chans = shape.hidden
        layers["conv"] = nn.Sequential(*convs)
        layers["proj"] = _projection(shape, chosen[3])
    else:
        kept = proj or nn.Conv2d(shape.in_chans, shape.dim, shape.patch, shape.patch, **shape.factory)
        layers["proj"] = kept
    if "1bn" in names:
        layers["norm"] = shape.batch_norm(shape.dim)
    if "1relu" in names:
        layers["act"] = shape.activation(act, shape.dim)
    return nn.Sequential(layers)


def _strides(stem: str, shape: StemShape, strides: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return four strides, each per axis, whose products are the patch."""
    if any(side % 2 for side in shape.patch):
        raise UsageError(
            f"`--stem` {stem} halves the image before projecting patches; this model's patch is "
            f"{_sides(shape.patch)} pixels: use a model with an even patch size"
        )
    half = (shape.patch[0] // 2, shape.patch[1] // 2)
    if strides is None:
        return [(2, 2), (1, 1), (1, 1), half]
    text = " ".join(map(str, strides))
    if len(strides) != 4 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in strides):
        raise UsageError(f"`--stem-strides` {text}: allowed are four numbers of at least 1, such as 2,2,2,2")
    for side, kernel in zip(shape.patch, half, strict=True):
        if math.prod(strides) != side:
            raise UsageError(
                f"`--stem-strides` {text} multiply to {math.prod(strides)}; this model's patch is {side}: give for "
                f"example 2,1,1,{side // 2}"
            )
        if any(s > k for s, k in zip(strides, (*_KERNELS, kernel), strict=True)):
            raise UsageError(
                f"`--stem-strides` {text}: a stride larger than its kernel (7, 3, 3, {kernel}) would skip pixels"
            )
        if (kernel - strides[3]) % 2:
            raise UsageError(
                f"`--stem-strides` {text}: the last, with a kernel of {kernel}, would need asymmetric padding; "
                f"give one with {kernel} − stride even"
            )
    return [(s, s) for s in strides]


def _projection(shape: StemShape, stride: tuple[int, int]) -> nn.Conv2d:
    kernel = (shape.patch[0] // 2, shape.patch[1] // 2)
    padding = ((kernel[0] - stride[0]) // 2, (kernel[1] - stride[1]) // 2)
    return nn.Conv2d(shape.hidden, shape.dim, kernel, stride, padding, **shape.factory)  # type: ignore[arg-type]


def _sides(patch: tuple[int, int]) -> str:
    return str(patch[0]) if patch[0] == patch[1] else f"{patch[0]} × {patch[1]}"

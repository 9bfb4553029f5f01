"""Sizes of images that a network with attention in windows can take."""

import math

from timm.models.resnetv2 import ResNetV2
from torch import nn

from vtk.models.alternet.window_attention import AttentionBlock, window_fault

Size = tuple[int, int]


def windows_fault(model: nn.Module, size: Size) -> str | None:
    """Return why a model cannot take images of ``size`` pixels, height first, and which it can; None where it can.

    Models without `AttentionBlock` take every size. Each halving of a map rounds up, so that some sizes beside the
    multiples that the text names are taken, too.
    """
    unit = 1
    faults = []
    for stage, info in zip(model.stages, model.feature_info[1:], strict=True) if isinstance(model, ResNetV2) else ():
        step = info["reduction"]
        for block in stage.blocks:
            if isinstance(block, AttentionBlock):
                window = block.attn.window_size[0]
                unit = math.lcm(unit, step * window)
                faults.append(window_fault(-(-size[0] // step), -(-size[1] // step), window))
    fault = next(filter(None, faults), None)
    if fault is None:
        return None
    near = sorted({(_near(size[0], unit, up), _near(size[1], unit, up)) for up in (False, True)})
    return f"{fault}; use {' or '.join(str(h) if h == w else f'{h} {w}' for h, w in near)}"


def _near(side: int, unit: int, up: bool) -> int:
    low = side // unit * unit
    return low if low and (low == side or not up) else low + unit

"""``--dynamic-size``: which other sizes a model takes, and that it takes them."""

from typing import Any

import torch
from torch import nn

from vtk.card import InputSpec
from vtk.errors import UsageError

_STEP = 32  # of convolutional networks: their strides multiply to it


def other_sizes(model: nn.Module, spec: InputSpec) -> tuple[tuple[int, int], ...]:
    """Return sizes, height first, to verify with: a little taller, wider and smaller by whole patches."""
    patch: Any = getattr(getattr(model, "patch_embed", None), "patch_size", _STEP)
    down, across = patch if isinstance(patch, tuple) else (patch, patch)
    smaller = max(spec.height - down, down), max(spec.width - across, across)
    return (spec.height + down, spec.width), (spec.height, spec.width + 2 * across), smaller


def check_sizes(model: nn.Module, spec: InputSpec, name: str) -> None:
    """Refuse a model that has one size.

    Raises:
        UsageError: names the model and why it cannot.
    """
    for size in other_sizes(model, spec):
        try:
            with torch.inference_mode():
                model.eval()(torch.zeros(1, spec.in_chans, *size))
        except (AssertionError, RuntimeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UsageError(
                f"`--dynamic-size`: {name} takes images of {spec.height}×{spec.width} only ({reason}); leave the flag "
                "out, or take a model that was made with dynamic_img_size"
            ) from error

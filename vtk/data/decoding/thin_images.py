"""Refuses thin images, which resizing for the centre crop would enlarge too much."""

import math

from vtk.card import InputSpec
from vtk.data.decoding.images import TooLargeError

MOST_ENLARGED = 64_000_000
"""Most pixels of an enlarged image; served exports have the same limit."""

NOMINAL = InputSpec(224, 224)
"""The input assumed by an audit without a model."""


def resized(spec: InputSpec, height: int, width: int) -> tuple[int, int]:
    """Return height and width after the resize of evaluation (`vtk.data.eval_transform`)."""
    if spec.resize_mode == "squash":
        return spec.size
    if spec.resize_mode == "pad":
        scale = min(spec.height / height, spec.width / width)
        return max(round(height * scale), 1), max(round(width * scale), 1)
    rows, columns = (math.floor(side / spec.crop_pct) for side in spec.size)
    if rows == columns:
        longer = rows * max(height, width) // min(height, width)
        return (rows, longer) if height <= width else (longer, rows)
    ratio = min(height / rows, width / columns)
    return round(height / ratio), round(width / ratio)


def check_enlarged(spec: InputSpec, height: int, width: int) -> None:
    """Refuse an image that would become too large, before memory is allocated.

    Args:
        spec: of the input.
        height: pixels of the image, upright.
        width: pixels of the image, upright.

    Raises:
        TooLargeError: it would be enlarged beyond `MOST_ENLARGED`.
    """
    rows, columns = resized(spec, height, width)
    if rows * columns > max(MOST_ENLARGED, height * width):
        raise TooLargeError(
            f"{height}×{width} pixels (height×width) would be enlarged to {rows}×{columns} before the crop, more than "
            f"{MOST_ENLARGED:,} pixels; crop it, or use a model with --resize-mode pad or squash"
        )

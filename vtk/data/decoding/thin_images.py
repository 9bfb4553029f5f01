"""Refuses thin images, which the centre crop would enlarge until their shorter side fits."""

import math

from vtk.card import InputSpec
from vtk.data.decoding.images import TooLargeError

MOST_ENLARGED = 64_000_000
"""Pixels of an enlarged image; a server with an export of this toolkit has the same limit."""

NOMINAL = InputSpec(224, 224)
"""What an audit goes by that knows of no model."""


def resized(spec: InputSpec, height: int, width: int) -> tuple[int, int]:
    """Return height and width after the resizing of an evaluation (`vtk.data.eval_transform`)."""
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
    """Refuse an image before memory is taken for what it becomes.

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
            f"{MOST_ENLARGED:,} in all; cut it, or use a model of --resize-mode pad or squash"
        )

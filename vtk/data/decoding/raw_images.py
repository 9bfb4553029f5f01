"""Raw images (height, width, 3) in the type of the training images, for models that do their own preprocessing.

A model without a value range takes sRGB bytes. One with a range takes values as in its training files; an 8-bit image
is spread over the range, so that the model's own mapping restores the 8 bits.

Needs Pillow and NumPy only: servers run a copy of this file.
"""

import numpy as np
from PIL import Image

from vtk.data.decoding.pixels import Pixels, Ranges, range_of


def raw_of(
    pixels: Pixels | None, image: Image.Image | tuple[Image.Image, ...], ranges: Ranges, kind: str
) -> np.ndarray:
    """Return a raw image.

    Args:
        pixels: bands of more than 8 bits; None for an 8-bit image.
        image: the same in 8 bits, RGB or bands.
        ranges: of the model; empty for bytes.
        kind: NumPy's name of the type.
    """
    bands = isinstance(image, tuple)
    levels = np.stack([np.asarray(band) for band in image], -1) if isinstance(image, tuple) else np.asarray(image)
    found = spread(levels, ranges, kind)
    if (
        pixels is None
        or not ranges
        or not (len(pixels.planes) == levels.shape[2] if bands else pixels.roles in ("Y", "RGB"))
    ):
        return found
    for i in pixels.measured:  # opacity and 8-bit bands have no more than 8 bits
        value = _typed(pixels.planes[i], kind, range_of(ranges, i)[0], pixels.no_data)
        if len(pixels.planes) == 1:
            return np.repeat(value[..., None], levels.shape[2], -1)
        found[..., i] = value
    return found


def spread(pixels: np.ndarray, ranges: Ranges, kind: str) -> np.ndarray:
    """Return the values that the ranges map to these bytes (height, width, 3)."""
    if not ranges:
        return pixels
    low, high = (np.array([pair[i] for pair in ranges], np.float64) for i in (0, 1))
    return _cast(low + pixels * ((high - low) / 255), kind)


def _typed(plane: np.ndarray, kind: str, low: float, no_data: float | None) -> np.ndarray:
    if no_data is not None:
        plane = np.where(plane == no_data, np.nan if np.dtype(kind).kind == "f" else low, plane.astype(np.float64))
    return plane if plane.dtype == kind else _cast(plane.astype(np.float64), kind)


def _cast(values: np.ndarray, kind: str) -> np.ndarray:
    if np.dtype(kind).kind == "f":
        return values.astype(kind)
    limits = np.iinfo(kind)
    whole = np.rint(np.nan_to_num(values, posinf=float(limits.max), neginf=float(limits.min)))
    return np.clip(whole, float(limits.min), float(limits.max)).astype(kind)

"""Converts PIL images and NumPy arrays to what `read_image` returns for a file."""

from typing import Any

import numpy as np
from PIL import Image

from vtk.data.decoding.bands import Bands, to_bands
from vtk.data.decoding.decode import decode
from vtk.data.decoding.images import MAX_PIXELS, orientation, reason, to_rgb, upright
from vtk.data.decoding.pixels import Pixels, bands_of, rgb_of
from vtk.data.decoding.rules import V0_1, Decoding, show_range
from vtk.errors import DataError, UsageError

_KNOWN = range(1, 5)  # channels of Pillow's L, LA, RGB and RGBA
_ROLES = {1: "Y", 2: "YA", 3: "RGB", 4: "RGBA"}


def take_image(image: Any, in_chans: int = 3, decoding: Decoding = V0_1) -> Image.Image | Bands:
    """Return an upright image for a model of ``in_chans`` channels.

    Args:
        image: a PIL image of any mode, or an array (H, W, C) or (H, W): uint8 with values as in an 8-bit file, or, for
            a model with a value range, of another type with values as in its training images.
        in_chans: of the model.
        decoding: of the model.

    Raises:
        UsageError: another type, or other channels.
        DataError: its pixels cannot be decoded.
    """
    if isinstance(image, np.ndarray):
        return _of_array(image, in_chans, decoding)
    if not isinstance(image, Image.Image):
        raise UsageError(
            f"an image is a {type(image).__name__}; allowed is a path, a PIL image or an array (H, W, C) uint8"
        )
    try:
        if decoding.rules != "v0.1":
            return decode(image, getattr(image, "fp", None), in_chans, MAX_PIXELS, decoding)
        return upright(to_rgb(image), orientation(image)) if in_chans in (1, 3) else to_bands(image, in_chans)
    except ValueError as error:
        raise UsageError(f"an image of mode {image.mode} does not fit {in_chans} channels: {error}") from error
    except OSError as error:  # a lazily loaded file
        name = getattr(image, "filename", "") or "in memory"
        raise DataError(f"cannot read the image {name}: {reason(error, name)}") from error


def _of_array(array: np.ndarray, in_chans: int, decoding: Decoding) -> Image.Image | Bands:
    planes = array[..., None] if array.ndim == 2 else array
    if planes.ndim == 3 and planes.size and array.dtype != np.uint8 and array.dtype.kind in "iuf" and decoding.ranges:
        return _of_wide(planes, in_chans, decoding)
    if array.dtype != np.uint8 or planes.ndim != 3 or not planes.size:
        low_high = ", ".join(map(show_range, decoding.ranges[:1]))
        other = f", or values of the model's range {low_high} in a type of more than 8 bits" if low_high else ""
        raise UsageError(
            f"an array is {array.dtype} {array.shape}; give uint8 (height, width, channels), 0 to 255{other}"
        )
    channels = planes.shape[2]
    if in_chans not in (1, 3) and channels == in_chans:
        return tuple(Image.fromarray(np.ascontiguousarray(planes[..., c])) for c in range(channels))
    _check_channels(channels, in_chans)
    pixels = np.ascontiguousarray(planes[..., 0] if channels == 1 else planes)
    return take_image(Image.fromarray(pixels), in_chans, decoding)


def _of_wide(planes: np.ndarray, in_chans: int, decoding: Decoding) -> Image.Image | Bands:
    channels = planes.shape[2]
    roles = "X" * channels
    if in_chans in (1, 3) or channels != in_chans:
        _check_channels(channels, in_chans)
        roles = _ROLES[channels]
    native = planes.astype(planes.dtype.newbyteorder("="), copy=False)
    pixels = Pixels(tuple(np.ascontiguousarray(native[..., c]) for c in range(channels)), roles)
    if in_chans in (1, 3):
        return rgb_of(pixels, decoding.ranges, in_chans)
    return bands_of(pixels, decoding.ranges, in_chans)


def _check_channels(channels: int, in_chans: int) -> None:
    if channels not in _KNOWN:
        raise UsageError(
            f"an array has {channels} channels, the model takes {in_chans}; give (height, width, {in_chans})"
        )

"""Images in memory: what Pillow opened or NumPy holds becomes what `vtk.data.bands.read_image` reads from a file."""

from typing import Any

import numpy as np
from PIL import Image

from vtk.data.bands import Bands, to_bands
from vtk.data.images import orientation, reason, to_rgb, upright
from vtk.errors import DataError, UsageError

_KNOWN = range(1, 5)  # channels of Pillow's L, LA, RGB and RGBA


def take_image(image: Any, in_chans: int = 3) -> Image.Image | Bands:
    """Return an upright image for a model of ``in_chans`` channels.

    Args:
        image: a PIL image of any mode, or an array (H, W, C) or (H, W), uint8, values as in an 8-bit file.
        in_chans: of the model.

    Raises:
        UsageError: it is neither, or has not the channels.
        DataError: its pixels cannot be decoded.
    """
    if isinstance(image, np.ndarray):
        return _of_array(image, in_chans)
    if not isinstance(image, Image.Image):
        raise UsageError(f"an image is a {type(image).__name__}; give a path, a PIL image or an array (H, W, C) uint8")
    try:
        return upright(to_rgb(image), orientation(image)) if in_chans in (1, 3) else to_bands(image, in_chans)
    except ValueError as error:
        raise UsageError(f"an image of mode {image.mode} is none for {in_chans} channels: {error}") from error
    except OSError as error:  # a file that is read only now
        name = getattr(image, "filename", "") or "in memory"
        raise DataError(f"cannot read the image {name}: {reason(error, name)}") from error


def _of_array(array: np.ndarray, in_chans: int) -> Image.Image | Bands:
    planes = array[..., None] if array.ndim == 2 else array
    if array.dtype != np.uint8 or planes.ndim != 3 or not planes.size:
        raise UsageError(f"an array is {array.dtype} {array.shape}; give uint8 (height, width, channels), 0 to 255")
    channels = planes.shape[2]
    if in_chans not in (1, 3) and channels == in_chans:
        return tuple(Image.fromarray(np.ascontiguousarray(planes[..., c])) for c in range(channels))
    if channels not in _KNOWN:
        raise UsageError(
            f"an array has {channels} channels, the model takes {in_chans}; give (height, width, {in_chans})"
        )
    pixels = np.ascontiguousarray(planes[..., 0] if channels == 1 else planes)
    return take_image(Image.fromarray(pixels), in_chans)

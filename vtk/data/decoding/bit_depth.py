"""Detects images of more than 8 bits by their header, without NumPy.

Needs Pillow only: servers run a copy of this file.
"""

from typing import Any

from PIL import Image


def is_special(image: Image.Image) -> bool:
    """Return whether an opened image may need `vtk.data.decoding.read_pixels`: TIFF, or more than 8 bits per sample."""
    kind, mode = image.format, image.mode
    if kind == "TIFF" or mode == "I" or mode == "F" or mode.startswith("I;16"):
        return True
    if kind == "PNG":
        return any(str(tile[3]).endswith(";16B") for tile in getattr(image, "tile", ()))
    return kind == "PPM" and deep_ppm(image) is not None


def deep_ppm(image: Image.Image) -> tuple[int, int] | None:
    """Return the offset of the 16-bit samples of an RGB PPM, and the value of white; None for another image."""
    for tile in getattr(image, "tile", ()):
        top: Any = tile[3][-1] if isinstance(tile[3], tuple) and tile[3] else tile[3]
        if tile[0] == "ppm" and image.mode == "RGB" and isinstance(top, int) and top > 255:
            return int(tile[2]), top
    return None

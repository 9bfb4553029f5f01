"""Opens image files and converts any mode, bit depth, transparency and EXIF orientation to upright RGB."""

import contextlib
import os
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import (
    Image,
    ImageFile,
    TiffImagePlugin,  # noqa: F401  imported, like the next ones, to register the format
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

from vtk.errors import DataError
from vtk.text import one_line

if TYPE_CHECKING:
    import numpy as np

with contextlib.suppress(ImportError):
    from PIL import Jpeg2KImagePlugin  # noqa: F401
with contextlib.suppress(ImportError):
    from PIL import AvifImagePlugin  # noqa: F401  since Pillow 11.3
Image.preinit()

BACKGROUND = (255, 255, 255)
"""Background of transparent pixels: white, as in web pages and image viewers."""

MAX_PIXELS = 178_956_970
"""Default limit of width × height: Pillow's limit for a suspected decompression bomb."""

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .pnm .jp2 .avif .heic .heif".split()
)
"""File suffixes (lower case) of images; other files in a folder are not used."""

# Only these formats are opened: Pillow's EPS reader, for example, starts Ghostscript, whatever a file is called.
_WANTED = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000", "MPO")
FORMATS = tuple(name for name in _WANTED if name in Image.OPEN)

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_ALPHA_MODES = ("RGBA", "LA", "PA", "RGBa", "La")


class TooLargeError(ValueError):
    """An image has more pixels than ``--max-pixels``; only its header was read."""


def load_image(path: str | os.PathLike[str], *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode ``path`` (the first frame) to an upright 8-bit RGB image.

    Transparent pixels are composited on `BACKGROUND`; 16-bit values are scaled, not clipped.

    Args:
        path: the file.
        max_pixels: largest width × height; checked in the header, before memory is allocated.

    Raises:
        DataError: the file cannot be read or decoded; the message names it and the reason.
    """
    try:
        with open_image(path, max_pixels) as image:
            return upright(to_rgb(image), orientation(image))
    except Exception as error:  # decoders of damaged files raise nearly anything; the reason is passed on
        raise unreadable(path, error) from error


def open_image(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open ``path`` as one of `FORMATS`, reading the header only.

    Raises:
        TooLargeError: it has more than ``max_pixels``.
        OSError: not a regular file.
        Exception: whatever Pillow raises for a file that is not an image.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block
        raise OSError("not a regular file")
    own = Image.MAX_IMAGE_PIXELS
    if own is not None and max_pixels > 2 * own:
        # Pillow's limit is the process's. It is raised once and not lowered again, since other threads open images, too
        Image.MAX_IMAGE_PIXELS = max_pixels
    image = Image.open(path, formats=FORMATS)
    if image.format == "TIFF" and isinstance(image, ImageFile.ImageFile):
        # Pillow maps plain pixels into memory by the upright size: of images on their side it then garbles the rows
        image.filename = ""  # without a name it reads them
    check_pixels(image.width, image.height, max_pixels)
    return image


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image that is too large.

    Raises:
        TooLargeError: it is.
    """
    if width * height > max_pixels:
        raise TooLargeError(
            f"{width}×{height} are {width * height:,} pixels, more than --max-pixels {max_pixels:,}; make it smaller, "
            "or allow more if the file is trusted"
        )


def unreadable(path: str | os.PathLike[str], error: BaseException) -> DataError:
    """Return the error of an unreadable file, in one line even if the file's name contains line breaks."""
    return DataError(f"cannot read the image {one_line(path)}: {reason(error, path)}")


def orientation(image: Image.Image) -> int:
    """Return the EXIF (or XMP) orientation 1–8 of an opened image; 1 if it has none or its metadata is damaged."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, struct.error):
        return 1  # viewers show such a file as stored; only undecodable pixels make it unreadable
    return value if value in _UPRIGHT else 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Turn or mirror ``image`` as its EXIF ``orientation`` (1–8) says."""
    if orientation == 1:
        return image
    turned = image.transpose(_UPRIGHT[orientation])
    turned.info = {}  # its EXIF data still has the old orientation, which would rotate the image twice
    return turned


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to 8-bit RGB.

    ``I;16`` is divided by 257. ``I`` and ``F`` have no defined range, so the smallest common range with all values is
    used: [0, 1] (``F`` only), [0, 255], [0, 65535], else the image's own minimum and maximum.
    """
    mode = image.mode
    if is_wide(mode):
        return to_grey(image).convert("RGB")
    if mode in _ALPHA_MODES or "transparency" in image.info:
        image = image.convert("LA") if mode == "La" else image
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, (*BACKGROUND, 255))
        canvas.alpha_composite(image)
        return canvas.convert("RGB")
    if mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None  # None only when converting in place
        return converted
    if mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")


def reason(error: BaseException, path: str | os.PathLike[str]) -> str:
    """Return a short reason why ``path`` could not be decoded."""
    if isinstance(error, Image.DecompressionBombError):
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        return (
            f"its header declares more than {limit // 10**6} million pixels (a decompression bomb?); make it smaller, "
            "or give a higher --max-pixels if the file is trusted"
        )
    if isinstance(error, (UnidentifiedImageError, SyntaxError)):
        with contextlib.suppress(OSError):
            if os.stat(path).st_size == 0:
                return "the file is empty"
        if Path(path).suffix.lower() in (".heic", ".heif"):
            return "HEIC is not supported; convert it to JPEG or PNG"
        return "not an image in a format that can be read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, MemoryError):
        return "not enough memory to decode it"
    return " ".join(str(error).split()) or type(error).__name__


def is_wide(mode: str) -> bool:
    """Return whether the pixels of a Pillow mode have more than 8 bits."""
    return mode.startswith("I;16") or mode in ("I", "F")


def to_grey(image: Image.Image) -> Image.Image:
    """Scale a wide image (`is_wide`) to 8-bit grey, as `to_rgb` says."""
    import numpy as np  # imported here, so that the scan's workers start without it

    image.load()
    values = np.asarray(image).astype(np.float64)
    values[~np.isfinite(values)] = 0.0
    low, high = _range(image, values)
    grey = np.rint((values - low) * (255.0 / (high - low)))
    return Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8))


def _range(image: Image.Image, values: "np.ndarray") -> tuple[float, float]:
    if image.mode.startswith("I;16") or image.format in ("PNG", "PPM"):  # Pillow scales these to 16 bits
        return 0.0, 65535.0
    low, high = float(values.min()), float(values.max())
    if low >= 0:
        for limit in (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0):
            if high <= limit:
                return 0.0, limit
    return low, high if high > low else low + 1.0

"""Decodes image files to the 8-bit images that a model sees, by the rules in its card.

====  ===================================================================================================
rules effect
====  ===================================================================================================
v0.1  as version 0.1: profiles are ignored, samples of more than 8 bits are scaled by their type or by the
      values of the file, and Pillow decides which bands of a TIFF are read
srgb  embedded profiles are converted to sRGB (`icc_profiles`), every band of a TIFF is used or the file is
      refused (`tiff`), and more than 8 bits are mapped by the value range of the dataset (`vtk.data.value_range`)
====  ===================================================================================================

NumPy is imported only when an image needs it, so that the scan's workers start quickly.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from PIL import Image, UnidentifiedImageError

from vtk.card import Card, InputSpec
from vtk.data.decoding import images
from vtk.data.decoding.bands import Bands, of_one_page, to_bands
from vtk.data.decoding.bit_depth import is_special
from vtk.data.decoding.icc_profiles import IGNORED, converted, profile_name, space_of
from vtk.data.decoding.images import MAX_PIXELS, open_image, orientation, to_rgb, unreadable, upright
from vtk.data.decoding.rules import V0_1, Decoding

if TYPE_CHECKING:
    import numpy as np

    from vtk.data.decoding.pixels import Pixels

_PLAIN_GAMMA = 1 / 2.2
_SRGB_PRIMARIES = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
_NEAR = 0.02
OUTSIDE = "vtk_outside"
"""Key in an image's ``info``: values outside the value range were clipped."""


def read_image(
    path: str | os.PathLike[str], in_chans: int = 3, max_pixels: int = MAX_PIXELS, decoding: Decoding = V0_1
) -> Image.Image | Bands:
    """Decode ``path`` for a model of ``in_chans`` channels: an upright RGB image for 1 and 3, `Bands` for others.

    ``info`` of the (first) image has `OUTSIDE` if values are outside the value range.

    Args:
        path: the file.
        in_chans: channels of the model.
        max_pixels: a larger image is refused after reading its header.
        decoding: rules for profiles, bands of a TIFF, and more than 8 bits; by default those of version 0.1.

    Raises:
        DataError: the file cannot be read, or has other channels.
    """
    try:
        with opened(path, max_pixels) as (image, file):
            return decode(image, file, in_chans, max_pixels, decoding)
    except Exception as error:  # decoders raise nearly anything on damaged files
        raise unreadable(path, error) from error


def pixel_limit(card: Card) -> int:
    """Return the ``--max-pixels`` of a model's training run, which later commands apply too."""
    limit = card.data.get("max_pixels", MAX_PIXELS)
    return limit if isinstance(limit, int) and limit >= 1 else MAX_PIXELS


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS
) -> Iterator[tuple[Image.Image | None, IO[bytes] | None]]:
    """Open an image file; yields the image (None for a TIFF that Pillow has no mode for) and the file."""
    try:
        image = open_image(path, max_pixels)
    except UnidentifiedImageError:
        with open(path, "rb") as file:
            if file.read(4) not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
                raise
            yield None, file
        return
    with image:
        yield image, getattr(image, "fp", None)


def decode(
    image: Image.Image | None, file: IO[bytes] | None, in_chans: int, max_pixels: int, decoding: Decoding
) -> Image.Image | Bands:
    """Return the 8-bit image of an opened one.

    Raises:
        ValueError: other channels, or an unsupported form.
        OSError: damaged, or already loaded by Pillow with a loss.
    """
    if decoding.rules == "v0.1":
        if image is None:
            raise UnidentifiedImageError("not an image in a format that can be read")
        return (
            upright(to_rgb(image), orientation(image)) if in_chans in (1, 3) else to_bands(image, in_chans, max_pixels)
        )
    pixels = special(image, file, max_pixels, in_chans)
    if pixels is None:
        assert image is not None
        if in_chans in (1, 3):
            return upright(to_rgb(converted(image)), orientation(image))
        turn = orientation(image) if image.format != "TIFF" else 1  # Pillow turns those itself
        return of_one_page(converted(image), in_chans, turn)
    from vtk.data.decoding.pixels import bands_of, outside, rgb_of

    turn = 1 if image is None or image.format == "TIFF" else orientation(image)
    found: Bands = (
        (rgb_of(pixels, decoding.ranges, in_chans, images.BACKGROUND),)
        if in_chans in (1, 3)
        else bands_of(pixels, decoding.ranges, in_chans)
    )
    result = tuple(upright(band, turn) for band in found)
    if outside(pixels, decoding.ranges):
        result[0].info[OUTSIDE] = True
    return result[0] if in_chans in (1, 3) else result


def special(
    image: Image.Image | None, file: IO[bytes] | None, max_pixels: int, in_chans: int | None = None
) -> "Pixels | None":
    """Return the bands of a TIFF or of an image of more than 8 bits; None if Pillow's own 8-bit reading is complete."""
    if image is not None and not is_special(image):  # nearly every image
        return None
    from vtk.data.decoding import read_pixels

    if image is not None and (file is None or file.closed):  # already loaded: only Pillow's pixels are left
        if image.format == "TIFF" and not images.is_wide(image.mode):
            read_pixels.check_kept(image)
            return None
        return read_pixels.kept(image)
    return read_pixels.decode(image, file, max_pixels, in_chans)


def read_raw(path: str | os.PathLike[str], spec: InputSpec, max_pixels: int) -> "np.ndarray":
    """Return a file as a raw image (`vtk.data.decoding.raw_images`) for a model of three channels.

    Raises:
        DataError: the file cannot be read.
    """
    import numpy as np

    from vtk.data.decoding.raw_images import raw_of

    decoding = Decoding.of(spec)
    if not decoding.ranges:
        return np.asarray(read_image(path, 3, max_pixels, decoding))
    try:
        with opened(path, max_pixels) as (image, file):
            pixels = special(image, file, max_pixels)
            turn = 1 if image is None or image.format == "TIFF" else orientation(image)
            shown = decode(image, file, 3, max_pixels, decoding)
    except Exception as error:  # as in `read_image`
        raise unreadable(path, error) from error
    assert isinstance(shown, Image.Image)
    if pixels is not None and turn != 1:
        pixels = pixels.turned(turn)
    return raw_of(pixels, shown, decoding.ranges, decoding.type)


def preview(path: str | os.PathLike[str], max_pixels: int, decoding: Decoding, side: int) -> Image.Image:
    """Return a file as a viewer shows it, at reduced size but not below ``side``; the first of many bands, as grey.

    Raises:
        Exception: whatever a decoder raises.
    """
    with opened(path, max_pixels) as (image, file):
        pixels = special(image, file, max_pixels) if decoding.rules != "v0.1" else None
        if pixels is None:
            if image is None:
                raise UnidentifiedImageError
            if image.format == "JPEG":
                image.draft("RGB", (side, side))  # decodes large photographs at an eighth of the size
            return upright(to_rgb(image if decoding.rules == "v0.1" else converted(image)), orientation(image))
        from vtk.data.decoding.pixels import check_bands, rgb_of

        try:
            check_bands(pixels, 3)
        except ValueError:
            pixels = pixels._replace(planes=pixels.planes[:1], roles="Y", profile=b"")
        turn = 1 if image is None or image.format == "TIFF" else orientation(image)
        return upright(rgb_of(pixels, decoding.ranges[:1], white=images.BACKGROUND), turn)


def outside_of(image: Image.Image | Bands) -> bool:
    """Return whether values of a decoded image were clipped by the value range."""
    first = image[0] if isinstance(image, tuple) else image
    return bool(first.info.get(OUTSIDE))


def colors_of(image: Image.Image, mode: str) -> str:
    """Return the description of an image's colour profile (``mode``: before decoding); empty if there is none."""
    info = image.info
    if profile := info.get("icc_profile"):
        return "" if mode == "LAB" else profile_name(profile, space_of(mode))
    if image.format != "PNG" or "srgb" in info:
        return ""
    if (gamma := info.get("gamma")) and abs(gamma - _PLAIN_GAMMA) > _NEAR:
        return f"{IGNORED}a PNG's gamma without a profile"
    if (primaries := info.get("chromaticity")) and any(
        abs(a - b) > _NEAR for a, b in zip(primaries, _SRGB_PRIMARIES, strict=False)
    ):
        return f"{IGNORED}a PNG's primaries without a profile"
    return ""

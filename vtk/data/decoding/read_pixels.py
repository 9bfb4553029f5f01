"""Reads every band of a TIFF, and images of more than 8 bits, as arrays.

Needs Pillow and NumPy only: servers run a copy of this file.
"""

import io
import struct
from typing import IO, Any

import numpy as np
from PIL import Image

from vtk.data.decoding.bit_depth import deep_ppm
from vtk.data.decoding.pixels import Pixels, straighten, turn_plane
from vtk.data.decoding.tiff import GREY, INKS, MASK, RGB, WHITE_IS_ZERO, Page, page_of, pages
from vtk.data.decoding.tiff_samples import read_samples

_MOST_ROLES = 5
"""Channels of a CMYK image with opacity: the most that a model of fewer channels can use."""

_MOST_BANDS = 4
"""Limit of all values of a TIFF, in multiples of ``max_pixels``: as many as RGB with opacity has."""


def decode(
    image: Image.Image | None, file: IO[bytes] | None, max_pixels: int, in_chans: int | None = None
) -> Pixels | None:
    """Return the bands of an image; None if Pillow's own 8-bit reading of ``image`` is complete.

    Args:
        image: opened by Pillow; moved to its main page. None for a TIFF that Pillow has no mode for.
        file: its file; not needed for grey images other than TIFF.
        max_pixels: largest page.
        in_chans: of the model: a file with many more pages is refused before decoding. None: any number.

    Raises:
        ValueError: bands of different sizes or types, or an unsupported form; the text says what to do.
        OSError: the file is damaged.
    """
    if image is None or image.format == "TIFF":
        assert file is not None
        return _tiff(image, file, max_pixels, in_chans)
    profile = image.info.get("icc_profile") or b""
    if image.format == "PNG" and not image.mode.startswith("I"):
        tiles: Any = image.tile  # type: ignore[attr-defined]
        stored = str(tiles[0][3]).partition(";")[0]  # differs from Pillow's mode for grey with opacity
        return Pixels(_png(_whole(file), stored), "YA" if stored == "LA" else stored, profile)
    if deep := deep_ppm(image):
        return Pixels(_ppm(_whole(file), image.size, *deep), "RGB", profile)
    return kept(image)


def kept(image: Image.Image) -> Pixels:
    """Return the values of a grey image of more than 8 bits, from Pillow's pixels."""
    image.load()
    values = np.asarray(image)
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # Pillow scales these to 16 bits
        values = values.astype(np.uint16)
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return Pixels((native,), "Y", image.info.get("icc_profile") or b"")


def check_kept(image: Image.Image) -> None:
    """Refuse a TIFF that Pillow already loaded with a loss.

    Raises:
        ValueError: says so.
    """
    tags: Any = getattr(image, "tag_v2", {})
    bits = tags.get(258, (8,))
    samples = int(tags.get(277, 1))
    if samples > len(image.getbands()) or max(bits if isinstance(bits, tuple) else (bits,)) > 8:
        raise ValueError("Pillow already loaded it and dropped bands or bits; give the path of the file")


def _png(data: bytes, mode: str) -> tuple[np.ndarray, ...]:
    """Return the 16-bit planes of a colour PNG, of which Pillow's modes keep only the high bytes."""
    if mode == "LA":  # read as an 8-bit RGBA image by changing the header
        kind = data[12:24] + bytes([8, 6]) + data[26:29]
        import zlib

        four = data[:12] + kind + struct.pack(">I", zlib.crc32(kind)) + data[33:]
        with Image.open(io.BytesIO(four), formats=("PNG",)) as image:
            image.info.pop("transparency", None)
            found = np.asarray(image).astype(np.uint16)
        return found[..., 0] << 8 | found[..., 1], found[..., 2] << 8 | found[..., 3]
    halves = []
    for order in "BL":  # selects the high or the low byte of each sample
        with Image.open(io.BytesIO(data), formats=("PNG",)) as opened:
            png: Any = opened
            png.tile = [(*tile[:3], f"{mode};16{order}") for tile in png.tile]
            png.load()
            halves.append(np.asarray(png).astype(np.uint16))
    whole = halves[0] << 8 | halves[1]
    return tuple(np.ascontiguousarray(whole[..., c]) for c in range(len(mode)))


def _ppm(data: bytes, size: tuple[int, int], start: int, top: int) -> tuple[np.ndarray, ...]:
    """Return the planes of a PPM scaled to 16 bits by the largest value in its header."""
    width, height = size
    if len(data) < start + 6 * width * height:
        raise OSError("image file is truncated")
    values = np.frombuffer(data, ">u2", 3 * width * height, start).astype(np.float64)
    found = np.rint(np.minimum(values / top, 1.0) * 65535).astype(np.uint16).reshape(height, width, 3)
    return tuple(np.ascontiguousarray(found[..., c]) for c in range(3))


def _whole(file: IO[bytes] | None) -> bytes:
    assert file is not None
    file.seek(0)
    return file.read()


def _tiff(image: Image.Image | None, file: IO[bytes], max_pixels: int, in_chans: int | None) -> Pixels | None:
    own: Any = getattr(image, "tag_v2", None)
    # Pillow has the directory of a single page, unless the image was moved to another page
    found = (
        [page_of(0, dict(own))]
        if getattr(own, "next", 1) == 0 and image is not None and image.tell() == 0
        else pages(file)
    )
    main = [page for page in found if not page.reduced and page.photometric != MASK] or found[:1]
    if not main:
        raise ValueError("it has no pages")
    for page in main:
        if page.width * page.height > max_pixels:
            raise ValueError(
                f"{page.width}×{page.height} are {page.width * page.height:,} pixels, more than --max-pixels "
                f"{max_pixels:,}; make it smaller, or allow more if the file is trusted"
            )
    if len(main) == 1 and main[0].plain and image is not None:
        if main[0].number:
            image.seek(main[0].number)
        return None
    if in_chans is not None and len(main) > max(in_chans, _MOST_ROLES):
        raise ValueError(f"it has {len(main)} pages of a channel or more, --in-chans is {in_chans}; save only one page")
    values = sum(page.width * page.height * len(page.bits) for page in main)
    if values > _MOST_BANDS * max_pixels:  # a few bytes may declare thousands of bands
        raise ValueError(
            f"its {len(main)} page{'s have' if len(main) > 1 else ' has'} {values:,} values in all, more than "
            f"{_MOST_BANDS} × --max-pixels {max_pixels:,}; make it smaller, or allow more if the file is trusted"
        )
    data = _whole(file)
    planes: list[np.ndarray] = []
    roles = ""
    for page in main:
        bands, kinds = _page(image, data, page)
        planes += bands
        roles += kinds
    if len({plane.shape for plane in planes}) > 1:
        raise ValueError("its pages differ in size; store pages of one size")
    return Pixels(tuple(planes), roles, main[0].profile, main[0].no_data, len(main), main[0].orientation)


def _page(image: Image.Image | None, data: bytes, page: Page) -> tuple[list[np.ndarray], str]:
    single = len(page.bits) == 1
    if page.plain or (single and page.bits[0] % 8):  # Pillow also reads 12 bits per pixel
        if image is None:
            raise ValueError("not an image in a format that can be read")
        return _by_pillow(image, page.number)
    known = {WHITE_IS_ZERO: "Y", GREY: "Y", RGB: "RGB", INKS: "cmyk"}.get(page.photometric)
    if known is None or len(page.bits) < len(known):
        raise ValueError(
            f"its {len(page.bits)} samples of {max(page.bits)} bits have an unsupported colour space (TIFF photometric "
            f"{page.photometric}); save it as grey or RGB"
        )
    further = len(page.bits) - len(known)
    extra = page.extra or ((2,) if (further, known) == (1, "RGB") else ())  # Pillow's interpretation
    roles = known + "".join({1: "a", 2: "A"}.get(kind, "X") for kind in extra).ljust(further, "X")[:further]
    if roles.startswith("YX"):
        roles = "X" + roles[1:]
    samples = read_samples(data, page)
    if page.photometric == WHITE_IS_ZERO and samples.dtype.kind == "u":
        samples[0] = np.iinfo(samples.dtype).max - samples[0]
    planes = [turn_plane(plane, page.orientation) for plane in samples]
    if "a" in roles:
        planes = straighten(planes, roles)
    return planes, roles.replace("a", "A")


def _by_pillow(image: Image.Image, number: int) -> tuple[list[np.ndarray], str]:
    image.seek(number)
    image.load()  # also rotates it upright
    if image.mode.startswith("I"):
        return [np.asarray(image).astype(np.uint16)], "Y"
    mode = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "YCbCr": "RGB"}.get(image.mode, image.mode)
    planes = (image.convert(mode) if mode != image.mode else image).split()
    roles = {"L": "Y", "LA": "YA", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "cmyk"}.get(mode, "X" * len(planes))
    return [np.asarray(plane) for plane in planes], roles

"""Pixels of more than 8 bits, and every band of a TIFF, to 8 bits by a value range.

A value range (LOW, HIGH) maps LOW to 0 and HIGH to 255, rounded to the nearest level; what lies outside is cut off.
NaN, minus infinity and a TIFF's no-data value become 0, infinity 255.

Needs Pillow and NumPy only: servers run a copy of this file.
"""

import io
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image

from vtk.data.bit_depth import deep_ppm
from vtk.data.icc_profiles import to_srgb
from vtk.data.tiff import GREY, INKS, MASK, RGB, WHITE_IS_ZERO, Page, page_of, pages, read_samples

Range = tuple[float, float]
Ranges = Sequence[Range]
"""One for all bands, or one for each; empty where none was settled."""

_MOST_ROLES = 5
"""Channels of an image of inks with opacity: so many a model of fewer can take."""

_MOST_BANDS = 4
"""Values of a TIFF in all, in shares of the largest image: as many as one of RGB and opacity has."""

OPACITY = "Aa"
"""Roles of opacity: as it is, and one that colours were multiplied by."""


class Pixels(NamedTuple):
    """Decoded bands of an image.

    Attributes:
        planes: (height, width) each, all of one size, upright; 8 bits or more.
        roles: a letter for each: Y grey, R, G, B, the inks C, M, Y, K as ``cmyk``, A opacity, X anything else.
        profile: embedded ICC profile.
        no_data: the value that stands for none.
        pages: of the file.
        orientation: of a TIFF as it was stored.
    """

    planes: tuple[np.ndarray, ...]
    roles: str
    profile: bytes = b""
    no_data: float | None = None
    pages: int = 1
    orientation: int = 1

    @property
    def space(self) -> str:
        """Pillow's mode of the colours that a profile is of; empty of other bands."""
        return {"Y": "L", "R": "RGB", "c": "CMYK"}.get(self.roles[:1], "") if "X" not in self.roles else ""

    def turned(self, orientation: int) -> "Pixels":
        """Return it turned or mirrored as an EXIF orientation says."""
        return self._replace(planes=tuple(_turned(plane, orientation) for plane in self.planes))

    @property
    def measured(self) -> list[int]:
        """Positions of the planes that a value range is of: more than 8 bits, and neither opacity nor ink."""
        return [
            i for i, (plane, role) in enumerate(zip(self.planes, self.roles, strict=True))
            if plane.dtype != np.uint8 and role not in OPACITY and role not in "cmyk"
        ]  # fmt: skip


def decode(
    image: Image.Image | None, file: IO[bytes] | None, max_pixels: int, in_chans: int | None = None
) -> Pixels | None:
    """Return the bands of an image; None where Pillow's own 8-bit reading of ``image`` has all that there is.

    Args:
        image: as Pillow opened it; it is moved to its main page. None of a TIFF for which Pillow knows no mode.
        file: it lies in; not needed for grey images that are no TIFF.
        max_pixels: of a page.
        in_chans: of the model: a file of many more pages is refused before they are decoded. None takes any.

    Raises:
        ValueError: bands of unlike sizes or types, or in a form that cannot be read; the text says what to do.
        OSError: the file is damaged.
    """
    if image is None or image.format == "TIFF":
        assert file is not None
        return _tiff(image, file, max_pixels, in_chans)
    profile = image.info.get("icc_profile") or b""
    if image.format == "PNG" and not image.mode.startswith("I"):
        tiles: Any = image.tile  # type: ignore[attr-defined]
        stored = str(tiles[0][3]).partition(";")[0]  # of grey with opacity Pillow's mode is another
        return Pixels(_png(_whole(file), stored), "YA" if stored == "LA" else stored, profile)
    if deep := deep_ppm(image):
        return Pixels(_ppm(_whole(file), image.size, *deep), "RGB", profile)
    return kept(image)


def kept(image: Image.Image) -> Pixels:
    """Return the values of a grey image of more than 8 bits, as Pillow has them."""
    image.load()
    values = np.asarray(image)
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # Pillow scales these to 16 bits
        values = values.astype(np.uint16)
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return Pixels((native,), "Y", image.info.get("icc_profile") or b"")


def check_kept(image: Image.Image) -> None:
    """Refuse a TIFF that Pillow read before, if it kept not all of it.

    Raises:
        ValueError: says so.
    """
    tags: Any = getattr(image, "tag_v2", {})
    bits = tags.get(258, (8,))
    samples = int(tags.get(277, 1))
    if samples > len(image.getbands()) or max(bits if isinstance(bits, tuple) else (bits,)) > 8:
        raise ValueError("Pillow read it before and kept not all of its bands or bits; give the path of the file")


def _png(data: bytes, mode: str) -> tuple[np.ndarray, ...]:
    """Return the 16-bit planes of a PNG of colours, of which Pillow has a mode for the high bytes only."""
    if mode == "LA":  # the four bytes of a pixel are those of an 8-bit RGBA image: only its header differs
        kind = data[12:24] + bytes([8, 6]) + data[26:29]
        import zlib

        four = data[:12] + kind + struct.pack(">I", zlib.crc32(kind)) + data[33:]
        with Image.open(io.BytesIO(four), formats=("PNG",)) as image:
            image.info.pop("transparency", None)
            found = np.asarray(image).astype(np.uint16)
        return found[..., 0] << 8 | found[..., 1], found[..., 2] << 8 | found[..., 3]
    halves = []
    for order in "BL":  # the byte that Pillow keeps of each sample is the first, or told so the second
        with Image.open(io.BytesIO(data), formats=("PNG",)) as opened:
            png: Any = opened
            png.tile = [(*tile[:3], f"{mode};16{order}") for tile in png.tile]
            png.load()
            halves.append(np.asarray(png).astype(np.uint16))
    whole = halves[0] << 8 | halves[1]
    return tuple(np.ascontiguousarray(whole[..., c]) for c in range(len(mode)))


def _ppm(data: bytes, size: tuple[int, int], start: int, top: int) -> tuple[np.ndarray, ...]:
    """Return the planes of a PPM, whose largest value its header states, as 16 bits."""
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
    # of a single page Pillow has read the directory; of one that was moved to another page not the first
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
    if values > _MOST_BANDS * max_pixels:  # a few bytes may claim thousands of bands
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
        raise ValueError("its pages differ in size; store one page of each channel, all of one size")
    return Pixels(tuple(planes), roles, main[0].profile, main[0].no_data, len(main), main[0].orientation)


def _page(image: Image.Image | None, data: bytes, page: Page) -> tuple[list[np.ndarray], str]:
    single = len(page.bits) == 1
    if page.plain or (single and page.bits[0] % 8):  # 12 bits a pixel are Pillow's, too
        if image is None:
            raise ValueError("not an image in a format that can be read")
        return _by_pillow(image, page.number)
    known = {WHITE_IS_ZERO: "Y", GREY: "Y", RGB: "RGB", INKS: "cmyk"}.get(page.photometric)
    if known is None or len(page.bits) < len(known):
        raise ValueError(
            f"its {len(page.bits)} samples of {max(page.bits)} bits are colours of another kind (TIFF photometric "
            f"{page.photometric}); save it as grey or RGB"
        )
    further = len(page.bits) - len(known)
    extra = page.extra or ((2,) if (further, known) == (1, "RGB") else ())  # as Pillow takes it
    roles = known + "".join({1: "a", 2: "A"}.get(kind, "X") for kind in extra).ljust(further, "X")[:further]
    if roles.startswith("YX"):
        roles = "X" + roles[1:]
    samples = read_samples(data, page)
    if page.photometric == WHITE_IS_ZERO and samples.dtype.kind == "u":
        samples[0] = np.iinfo(samples.dtype).max - samples[0]
    planes = [_turned(plane, page.orientation) for plane in samples]
    if "a" in roles:
        planes = _straight(planes, roles)
    return planes, roles.replace("a", "A")


def _by_pillow(image: Image.Image, number: int) -> tuple[list[np.ndarray], str]:
    image.seek(number)
    image.load()  # turned upright, too
    if image.mode.startswith("I"):
        return [np.asarray(image).astype(np.uint16)], "Y"
    mode = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA", "YCbCr": "RGB"}.get(image.mode, image.mode)
    planes = (image.convert(mode) if mode != image.mode else image).split()
    roles = {"L": "Y", "LA": "YA", "RGB": "RGB", "RGBA": "RGBA", "CMYK": "cmyk"}.get(mode, "X" * len(planes))
    return [np.asarray(plane) for plane in planes], roles


def _turned(plane: np.ndarray, orientation: int) -> np.ndarray:
    if orientation in (2, 3):
        plane = plane[:, ::-1]
    if orientation in (3, 4):
        plane = plane[::-1]
    if orientation in (5, 6, 7, 8):
        plane = plane.T
        plane = plane[:, ::-1] if orientation in (6, 7) else plane
        plane = plane[::-1] if orientation in (7, 8) else plane
    return np.ascontiguousarray(plane)


def _straight(planes: list[np.ndarray], roles: str) -> list[np.ndarray]:
    """Undo the multiplication of colours by their opacity."""
    at = roles.index("a")
    top = full(planes[at].dtype)
    share = np.maximum(planes[at].astype(np.float64) / top, 1e-12)
    first = len(roles.rstrip("AXa"))
    straight = []
    for i, plane in enumerate(planes):
        if i < first:
            limit = full(plane.dtype)
            plane = (
                np.clip(plane / share, 0, limit)
                if plane.dtype.kind == "f"
                else np.rint(np.clip(plane / share, 0, limit))
            )
        straight.append(plane.astype(planes[i].dtype))
    return straight


def full(dtype: np.dtype[Any]) -> float:
    """Return what stands for full opacity or ink in a type."""
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)


def scaled(plane: np.ndarray, low: float, high: float, no_data: float | None = None) -> np.ndarray:
    """Return rint((values - low) · 255 / (high - low)) as 8 bits, cut off at both ends."""
    if plane.dtype.kind in "iu" and plane.dtype.itemsize <= 2:
        least = int(np.iinfo(plane.dtype).min)
        found = _table(plane.dtype.str, low, high)[plane.astype(np.int32) - least]
    else:
        found = _levels(plane.astype(np.float64), low, high)
    if no_data is not None:
        found[plane == no_data] = 0
    return found


@lru_cache(64)
def _table(kind: str, low: float, high: float) -> np.ndarray:
    limits = np.iinfo(np.dtype(kind))
    return _levels(np.arange(int(limits.min), int(limits.max) + 1, dtype=np.float64), low, high)


def _levels(values: np.ndarray, low: float, high: float) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        levels = np.clip(np.rint((values - low) * (255.0 / (high - low))), 0, 255)
    return np.where(np.isnan(levels), 0, levels).astype(np.uint8)


def valid(plane: np.ndarray, no_data: float | None) -> np.ndarray:
    """Return the values of a plane that are numbers, (count,)."""
    flat = plane.reshape(-1)
    if plane.dtype.kind == "f":
        flat = flat[np.isfinite(flat)]
    return flat if no_data is None else flat[flat != no_data]


def own_range(plane: np.ndarray) -> Range:
    """Return a range for an image of a model that was trained without one: the smallest usual one that holds all."""
    if plane.dtype.kind == "u" and plane.dtype.itemsize == 2:
        return 0.0, 65535.0
    values = valid(plane, None)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if low >= 0:
        for limit in (1.0, 255.0, 65535.0) if plane.dtype.kind == "f" else (255.0, 65535.0):
            if high <= limit:
                return 0.0, limit
    return low, high if high > low else low + 1.0


def range_of(ranges: Ranges, band: int) -> Range:
    """Return the range of a band."""
    return ranges[band] if len(ranges) > band and len(ranges) > 1 else ranges[0]


def outside(pixels: Pixels, ranges: Ranges) -> bool:
    """Tell whether a value of an image lies outside of the ranges."""
    for band in pixels.measured if ranges else ():
        values, (low, high) = valid(pixels.planes[band], pixels.no_data), range_of(ranges, band)
        if values.size and (values.min() < low or values.max() > high):
            return True
    return False


def bytes_of(pixels: Pixels, ranges: Ranges) -> list[np.ndarray]:
    """Return the planes in 8 bits: by the ranges, opacity and inks by their type."""
    found, measured = [], set(pixels.measured)
    for i, plane in enumerate(pixels.planes):
        if i in measured:
            low, high = range_of(ranges, i) if ranges else own_range(plane)
            plane = scaled(plane, low, high, pixels.no_data)
        elif plane.dtype != np.uint8:
            plane = scaled(plane, 0.0, full(plane.dtype))
        found.append(plane)
    return found


def rgb_of(
    pixels: Pixels, ranges: Ranges, in_chans: int = 3, white: tuple[int, int, int] = (255, 255, 255)
) -> Image.Image:
    """Return an RGB image, transparent pixels on white, of grey, colours, inks, or three bands.

    Raises:
        ValueError: it has other bands than ``in_chans``, 1 or 3, can take.
    """
    check_bands(pixels, in_chans)
    planes = [Image.fromarray(plane) for plane in bytes_of(pixels, ranges)]
    opacity = planes.pop() if pixels.roles.endswith("A") else None
    image = planes[0] if len(planes) == 1 else Image.merge("RGB" if len(planes) == 3 else "CMYK", planes)
    image = to_srgb(image, pixels.profile if pixels.space else b"").convert("RGB")
    if opacity is not None:
        canvas = Image.new("RGBA", image.size, (*white, 255))
        canvas.alpha_composite(Image.merge("RGBA", (*image.split(), opacity)))
        image = canvas.convert("RGB")
    return image


def bands_of(pixels: Pixels, ranges: Ranges, in_chans: int) -> tuple[Image.Image, ...]:
    """Return ``in_chans`` grey images: the bands as they are, or of a grey or colour image with its opacity.

    Raises:
        ValueError: it has other bands.
    """
    check_bands(pixels, in_chans)
    roles = pixels.roles
    planes = [Image.fromarray(plane) for plane in bytes_of(pixels, ranges)]
    if len(roles) == in_chans and not (roles == "RGBA" and pixels.profile):
        return tuple(planes)
    opacity = planes.pop() if roles.endswith("A") else Image.new("L", planes[0].size, 255)
    colours = to_srgb(planes[0] if len(planes) == 1 else Image.merge("RGB", planes), pixels.profile)
    return (colours.convert("L"), opacity) if in_chans == 2 else (*colours.convert("RGB").split(), opacity)


def check_bands(pixels: Pixels, in_chans: int) -> None:
    """Refuse an image whose bands a model of ``in_chans`` cannot all take.

    Raises:
        ValueError: says what it has, and what to do.
    """
    roles = pixels.roles
    if in_chans in (1, 3):
        three = in_chans == 3 and len(roles) == 3 and not set(roles) & set("RGBAcmyk")
        fits = three or roles in ("Y", "YA", "RGB", "RGBA", "cmyk", "cmykA")
    else:
        fits = len(roles) == in_chans or (in_chans in (2, 4) and roles in ("Y", "YA", "RGB", "RGBA"))
    if fits:
        return
    count = len(roles)
    names = {"Y": "grey", "RGB": "RGB", "cmyk": "CMYK"}
    first = next((text for text in ("RGB", "cmyk", "Y") if roles.startswith(text)), "")
    more = count - len(first)
    what = (
        f"on {pixels.pages} pages" if pixels.pages > 1 else f"{names[first]} and {more} more" if first and more else ""
    )
    if count < in_chans:
        raise ValueError(
            f"it has {count} channel{'s' * (count > 1)}; --in-chans {in_chans} wants a TIFF file whose pages have "
            f"{in_chans} together"
        )
    raise ValueError(
        f"it has {count} channel{'s' * (count > 1)}{f' ({what})' if what else ''}, --in-chans is {in_chans}; give "
        f"--in-chans {count}, or save only the channels that are meant"
    )

"""Pixels of more than 8 bits, mapped to 8 bits by a value range.

A value range (LOW, HIGH) maps LOW to 0 and HIGH to 255, rounded to the nearest level; values outside are clipped.
NaN, minus infinity and a TIFF's no-data value become 0, infinity 255.

Needs Pillow and NumPy only: servers run a copy of this file.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vtk.data.decoding.icc_profiles import to_srgb

Range = tuple[float, float]
Ranges = Sequence[Range]
"""One for all bands, or one per band; may be empty."""

OPACITY = "Aa"
"""Roles of opacity: straight, and premultiplied."""


class Pixels(NamedTuple):
    """Decoded bands of an image.

    Attributes:
        planes: one (height, width) array per band, upright, of 8 bits or more.
        roles: a letter per plane: Y grey, R, G, B, the inks C, M, Y, K as ``cmyk``, A opacity, X anything else.
        profile: embedded ICC profile.
        no_data: the value of missing data.
        pages: number of pages of the file.
        orientation: stored EXIF orientation of a TIFF.
    """

    planes: tuple[np.ndarray, ...]
    roles: str
    profile: bytes = b""
    no_data: float | None = None
    pages: int = 1
    orientation: int = 1

    @property
    def space(self) -> str:
        """Pillow's mode of the colours for a profile; empty for other bands."""
        return {"Y": "L", "R": "RGB", "c": "CMYK"}.get(self.roles[:1], "") if "X" not in self.roles else ""

    def turned(self, orientation: int) -> "Pixels":
        """Return the pixels rotated or mirrored by an EXIF orientation."""
        return self._replace(planes=tuple(turn_plane(plane, orientation) for plane in self.planes))

    @property
    def measured(self) -> list[int]:
        """Indices of the planes that a value range applies to: more than 8 bits, neither opacity nor ink."""
        return [
            i for i, (plane, role) in enumerate(zip(self.planes, self.roles, strict=True))
            if plane.dtype != np.uint8 and role not in OPACITY and role not in "cmyk"
        ]  # fmt: skip


def turn_plane(plane: np.ndarray, orientation: int) -> np.ndarray:
    """Return a plane rotated or mirrored by an EXIF orientation."""
    if orientation in (2, 3):
        plane = plane[:, ::-1]
    if orientation in (3, 4):
        plane = plane[::-1]
    if orientation in (5, 6, 7, 8):
        plane = plane.T
        plane = plane[:, ::-1] if orientation in (6, 7) else plane
        plane = plane[::-1] if orientation in (7, 8) else plane
    return np.ascontiguousarray(plane)


def straighten(planes: list[np.ndarray], roles: str) -> list[np.ndarray]:
    """Return planes with straight opacity from premultiplied ones."""
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
    """Return the value of full opacity or ink in a type."""
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)


def scaled(plane: np.ndarray, low: float, high: float, no_data: float | None = None) -> np.ndarray:
    """Return rint((values - low) · 255 / (high - low)) as 8 bits, clipped at both ends."""
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
    """Return the finite values of a plane other than ``no_data``, (count,)."""
    flat = plane.reshape(-1)
    if plane.dtype.kind == "f":
        flat = flat[np.isfinite(flat)]
    return flat if no_data is None else flat[flat != no_data]


def own_range(plane: np.ndarray) -> Range:
    """Return a range for a model trained without one: the smallest common range with all values."""
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
    """Return whether a value of an image is outside the ranges."""
    for band in pixels.measured if ranges else ():
        values, (low, high) = valid(pixels.planes[band], pixels.no_data), range_of(ranges, band)
        if values.size and (values.min() < low or values.max() > high):
            return True
    return False


def bytes_of(pixels: Pixels, ranges: Ranges) -> list[np.ndarray]:
    """Return the planes in 8 bits: opacity and inks scaled by their type, others by the ranges."""
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
    """Return an RGB image, transparent pixels on white, from grey, RGB, CMYK or three bands.

    Raises:
        ValueError: bands that do not fit ``in_chans``, 1 or 3.
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
    """Return ``in_chans`` grey images: the bands, or the channels of a grey or colour image and its opacity.

    Raises:
        ValueError: other bands.
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
    """Refuse an image with bands that a model of ``in_chans`` cannot use.

    Raises:
        ValueError: names the bands, and what to do.
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
            f"it has {count} channel{'s' * (count > 1)}; --in-chans {in_chans} needs a TIFF file whose pages have "
            f"{in_chans} in total"
        )
    raise ValueError(
        f"it has {count} channel{'s' * (count > 1)}{f' ({what})' if what else ''}, --in-chans is {in_chans}; give "
        f"--in-chans {count}, or save only the needed channels"
    )

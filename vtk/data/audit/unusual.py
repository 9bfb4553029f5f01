"""Finds unusual images of a set, by kind, with how each kind is handled."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from vtk.data.decoding.icc_profiles import SRGB
from vtk.data.decoding.images import BACKGROUND, is_wide
from vtk.data.probing.probe import TRANSPARENT, Probe

SHOWN = 12
"""Most examples stored of each kind."""

LONG = 3.0
"""Aspect ratio above which an image is long: a centre crop shows little of it."""

SMALL = 32
"""Pixels; an image whose shorter side has fewer is small."""

LARGE = 25_000_000
"""Pixels; decoding more takes a tenth of a second or longer."""


class UnusualImage(NamedTuple):
    """An unusual image: its path below the root (with ``/``), its class, and the reason."""

    name: str
    of_class: str
    text: str


class UnusualKind(NamedTuple):
    """One kind of unusual image.

    Attributes:
        kind: short name.
        title: what they are.
        handling: how they are handled, and options that change it.
        total: number of images.
        examples: the first `SHOWN` of them, or the most extreme of kinds about size.
    """

    kind: str
    title: str
    handling: str
    total: int
    examples: tuple[UnusualImage, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self._asdict(), "examples": [example._asdict() for example in self.examples]}


_KINDS = {
    "bad": ("Unreadable", "Skipped and counted, not replaced by other images (--on-bad-image fail refuses the set)."),
    "transparent": (
        "Transparent pixels",
        "Composited on white, {background}. With --in-chans 2 or 4, opacity is a channel.",
    ),
    "wide": ("More than 8 bits", "Mapped to 0 to 255 by one value range for all images (--value-range sets another)."),
    "bands": ("Several channels", "Each is a channel of the input."),
    "profile": (
        "Colour profiles other than sRGB",
        "Converted to sRGB (relative colorimetric); a damaged profile, or one of another colour space, is ignored.",
    ),
    "ink": ("CMYK, YCbCr, Lab or HSV", "Converted to RGB."),
    "grey": ("Grey among colour images", "The grey channel is repeated; fewer than half of the images are grey."),
    "turned": ("Rotated by EXIF", "Turned upright, as image viewers do."),
    "long": ("Long and thin", "The default --resize-mode crop keeps only the middle; pad and squash keep all of it."),
    "small": ("Small", "Enlarged and therefore blurred; a smaller --img-size costs less and loses nothing."),
    "large": ("Large", "Decoded at full size in every epoch; smaller copies train faster."),
}


_Kind = tuple[str, str, float]


def find_unusual(images: Iterable[tuple[str, str, Probe]]) -> tuple[UnusualKind, ...]:
    """Return the kinds of unusual images among (name, class, probe); an image may be of several kinds."""
    found: dict[str, list[tuple[float, UnusualImage]]] = {kind: [] for kind in _KINDS}
    good = 0
    for name, of_class, probe in images:
        good += not probe.bad
        for kind, text, rank in _odd(*probe[:5], probe.colors):
            found[kind].append((rank, UnusualImage(name, of_class, text)))
    if 2 * len(found["grey"]) >= good:
        del found["grey"]
    result = []
    for kind, of_kind in found.items():
        if of_kind:
            title, handling = _KINDS[kind]
            extreme = sorted(of_kind, key=lambda pair: pair[0])[:SHOWN]  # stable: the first ones of equal rank
            white = "#{:02x}{:02x}{:02x}".format(*BACKGROUND)
            examples = tuple(image for _, image in extreme)
            result.append(UnusualKind(kind, title, handling.format(background=white), len(of_kind), examples))
    return tuple(result)


@functools.lru_cache(4096)  # most images of a set have equal arguments
def _odd(width: int, height: int, mode: str, orientation: int, bad: str, colors: str) -> tuple[_Kind, ...]:
    """Return (kind, reason, rank: lowest first) for a probe."""
    return tuple(_kinds(width, height, mode, orientation, bad, colors))


def _kinds(width: int, height: int, mode: str, orientation: int, bad: str, colors: str) -> Iterable[_Kind]:
    if bad:
        yield "bad", bad, 0
        return
    if not mode:  # not decoded
        return
    size, short = f"{height}×{width}", min(width, height)
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or mode.endswith(TRANSPARENT):
        yield "transparent", mode, 0
    if is_wide(mode):
        yield "wide", {"F": "F, 32-bit float", "I": "I, 32-bit integer"}.get(mode, f"{mode}, 16-bit"), 0
    elif "×" in mode:
        yield ("bands" if mode.endswith("×uint8") else "wide"), mode, 0
    if colors and colors != SRGB:
        yield "profile", colors, 0
    if mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        yield "ink", mode, 0
    if mode in ("L", "1", "LA", "La") or is_wide(mode):
        yield "grey", mode, 0
    if orientation != 1:
        yield "turned", f"EXIF orientation {orientation}", 0
    if max(width, height) > LONG * short:
        yield "long", size, -max(width, height) / short
    if short < SMALL:
        yield "small", size, short
    if width * height > LARGE:
        yield "large", f"{size}, {width * height / 1e6:.0f} million pixels", -width * height

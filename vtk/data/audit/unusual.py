"""What is unusual among the images of a folder, and what will be done about it: the body of the audit's page."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from vtk.data.decoding.icc_profiles import SRGB
from vtk.data.decoding.images import BACKGROUND, is_wide
from vtk.data.probing.probe import TRANSPARENT, Probe

SHOWN = 12
"""Examples kept of each kind."""

LONG = 3.0
"""Sides that differ by more than this factor make an image long: a centre crop shows little of it."""

SMALL = 32
"""Pixels; an image whose shorter side has fewer is small."""

LARGE = 25_000_000
"""Pixels; more take a tenth of a second and longer to decode."""


class OddImage(NamedTuple):
    """One example: its path below the root (with ``/``), its class, and what is odd."""

    name: str
    of_class: str
    text: str


class Odd(NamedTuple):
    """One kind of unusual image.

    Attributes:
        kind: short name.
        title: what they are.
        handling: what the toolkit does with them, and what the user can do.
        total: how many there are.
        examples: the first `SHOWN` of them; of kinds that are about size the most extreme.
    """

    kind: str
    title: str
    handling: str
    total: int
    examples: tuple[OddImage, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self._asdict(), "examples": [example._asdict() for example in self.examples]}


_KINDS = {
    "bad": ("Cannot be read", "Skipped and counted; no other image takes their place (--on-bad-image fail stops)."),
    "transparent": (
        "Transparent pixels",
        "Shown on white {background}. With --in-chans 2 or 4 the opacity is a channel of its own.",
    ),
    "wide": (
        "More than 8 bits",
        "The value range of the data set becomes 0 to 255, one range for all images (--value-range sets another).",
    ),
    "bands": ("Several channels", "Every one of them is a channel of the input."),
    "profile": (
        "Colour profiles other than sRGB",
        "Converted to sRGB (relative colorimetric); one that is damaged or of other colours is ignored.",
    ),
    "ink": ("Inks or Lab in place of RGB", "Converted to RGB."),
    "grey": ("Grey among colour", "The one channel is repeated; fewer than half of the images are grey."),
    "turned": ("Turned by EXIF", "Turned upright, as viewers do."),
    "long": (
        "Long and thin",
        "The default --resize-mode crop shows the middle only; pad or squash show all of it.",
    ),
    "small": ("Small", "Enlarged, so blurred; a small --img-size costs less and loses nothing."),
    "large": ("Large", "Decoded in every epoch; smaller copies would train faster."),
}


_Kind = tuple[str, str, float]


def find_odd(images: Iterable[tuple[str, str, Probe]]) -> tuple[Odd, ...]:
    """Sort (name, class, probe) into kinds; an image may be of several."""
    found: dict[str, list[tuple[float, OddImage]]] = {kind: [] for kind in _KINDS}
    good = 0
    for name, of_class, probe in images:
        good += not probe.bad
        for kind, text, rank in _odd(*probe[:5], probe.colors):
            found[kind].append((rank, OddImage(name, of_class, text)))
    if 2 * len(found["grey"]) >= good:
        del found["grey"]
    result = []
    for kind, of_kind in found.items():
        if of_kind:
            title, handling = _KINDS[kind]
            extreme = sorted(of_kind, key=lambda pair: pair[0])[:SHOWN]  # stable: of one rank the first ones
            white = "#{:02x}{:02x}{:02x}".format(*BACKGROUND)
            examples = tuple(image for _, image in extreme)
            result.append(Odd(kind, title, handling.format(background=white), len(of_kind), examples))
    return tuple(result)


@functools.lru_cache(4096)  # images of a set are alike
def _odd(width: int, height: int, mode: str, orientation: int, bad: str, colors: str) -> tuple[_Kind, ...]:
    """Return (kind, what is odd, rank: the lowest first) of a probe."""
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
        yield "turned", f"orientation {orientation}", 0
    if max(width, height) > LONG * short:
        yield "long", size, -max(width, height) / short
    if short < SMALL:
        yield "small", size, short
    if width * height > LARGE:
        yield "large", f"{size}, {width * height / 1e6:.0f} million pixels", -width * height

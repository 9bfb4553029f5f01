"""Converts images with embedded colour profiles (ICC) to sRGB, with Pillow's lcms.

The intent is relative colorimetric with black point compensation, which preserves every colour of sRGB. With an sRGB
profile the pixels stay unchanged, bit for bit. A damaged profile, or one of another colour space than the pixels, is
ignored, as are gamma and primaries of a PNG without a profile (gAMA, cHRM).

Needs Pillow only: servers run a copy of this file.
"""

import io
from functools import lru_cache
from typing import Any

from PIL import Image

SRGB = "sRGB"
"""Name of a profile that changes nothing."""

IGNORED = "ignored: "
"""Prefix of the name of an ignored profile."""

_NEAR = 2  # levels of 255 by which sRGB profiles of different vendors differ
_KEPT = 64
_BLACK_POINT: Any = 0x2000  # lcms's flag; its name differs between versions of Pillow
_SPACES = {"L": ("GRAY", "RGB"), "RGB": ("RGB",), "CMYK": ("CMYK",)}


def profile_name(profile: bytes, mode: str) -> str:
    """Return the name of an embedded profile; `SRGB` if it changes nothing.

    Args:
        profile: its bytes.
        mode: Pillow's mode of the pixels: L, RGB or CMYK.
    """
    return _conversion(bytes(profile), mode)[0]


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return an image of mode L, RGB or CMYK in sRGB: L stays L, CMYK becomes RGB."""
    if not profile or image.mode not in _SPACES:
        return image
    change = _conversion(bytes(profile), image.mode)[1]
    if change is None:
        return image
    if isinstance(change, list):
        return image.point(change)
    converted: Image.Image = change.apply(image)
    return converted


def converted(image: Image.Image) -> Image.Image:
    """Return an opened 8-bit image converted to sRGB, opacity unchanged; the same object if nothing changes.

    A converted image has mode L, RGB or, with opacity, RGBA.
    """
    profile = image.info.get("icc_profile")
    if not profile or image.mode == "LAB":
        return image
    mode = space_of(image.mode)
    name = profile_name(profile, mode)
    if name == SRGB or name.startswith(IGNORED):
        return image
    if image.mode not in ("RGBA", "LA", "PA", "RGBa", "La") and "transparency" not in image.info:
        image.load()
        if "transparency" not in image.info:  # a PNG may have this chunk at its end
            return to_srgb(image if image.mode == mode else image.convert(mode), profile)
    straight = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    colours = straight.convert("RGB")
    colours = to_srgb(colours.convert("L") if mode == "L" else colours, profile).convert("RGB")
    return Image.merge("RGBA", (*colours.split(), straight.getchannel("A")))


def space_of(mode: str) -> str:
    """Return the colour space of a profile for an image of Pillow's ``mode``: L, RGB or CMYK."""
    return {"1": "L", "L": "L", "LA": "L", "La": "L", "CMYK": "CMYK"}.get(mode, "RGB")


@lru_cache(_KEPT)
def _conversion(profile: bytes, mode: str) -> tuple[str, Any]:
    """Return the profile's name and its conversion: a transform, a table for grey, or None for no change."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        name = _clean(source.profile.profile_description or "") or f"unnamed {space}"
    except Exception:  # lcms and Pillow raise several types on invalid profiles
        return f"{IGNORED}a damaged profile", None
    if space not in _SPACES[mode]:
        return f"{IGNORED}{name}, of {space or 'unknown'} colours in an image of mode {mode}", None
    try:
        inside = space if space != "GRAY" else "L"
        change = ImageCms.buildTransform(
            source, ImageCms.createProfile("sRGB"), inside, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC,
            _BLACK_POINT,
        )  # fmt: skip
        if mode == "CMYK":
            return name, change
        before = _ramp() if mode == "L" else _grid()
        source_image = before if inside == "L" or mode == "RGB" else before.convert("RGB")
        after = change.apply(source_image)
        if mode == "L":
            table = list(after.getchannel("G").tobytes())
            same = all(abs(value - i) <= _NEAR for i, value in enumerate(table))
            return (SRGB, None) if same else (name, table)
        near = all(abs(a - b) <= _NEAR for a, b in zip(before.tobytes(), after.tobytes(), strict=True))
        return (SRGB, None) if near else (name, change)
    except Exception:
        return f"{IGNORED}{name}, which cannot be applied", None


def _ramp() -> Image.Image:
    return Image.frombytes("L", (256, 1), bytes(range(256)))


def _grid() -> Image.Image:
    """Return all levels of grey, and a grid of colours."""
    steps = range(0, 256, 17)
    colours = bytes(value for r in steps for g in steps for b in steps for value in (r, g, b))
    greys = bytes(value for level in range(256) for value in (level, level, level))
    return Image.frombytes("RGB", (256 + len(steps) ** 3, 1), greys + colours)


def _clean(text: str) -> str:
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:60]

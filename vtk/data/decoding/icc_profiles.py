"""Embedded colour profiles (ICC): pixels are converted to sRGB, by Pillow's lcms.

The intent is relative colorimetric with black point compensation, which keeps every colour that sRGB has. A profile
that says nothing but sRGB leaves the pixels as they are, bit for bit; one that is damaged, or of another kind of
colours than the pixels, is passed over. So are gamma and primaries that a PNG tells without a profile (gAMA, cHRM).

Needs Pillow only: servers run a copy of this file.
"""

import io
from functools import lru_cache
from typing import Any

from PIL import Image

SRGB = "sRGB"
"""What `profile_name` calls a profile that changes nothing."""

IGNORED = "ignored: "
"""What stands before the name of a profile that is passed over."""

_NEAR = 2  # levels of 255 in which profiles of sRGB by several makers differ
_KEPT = 64
_BLACK_POINT: Any = 0x2000  # lcms's flag, which older versions of Pillow have another name for
_SPACES = {"L": ("GRAY", "RGB"), "RGB": ("RGB",), "CMYK": ("CMYK",)}


def profile_name(profile: bytes, mode: str) -> str:
    """Return what an embedded profile is, for people; `SRGB` where it changes nothing.

    Args:
        profile: as it is in the file.
        mode: Pillow's name of the pixels: L, RGB or CMYK.
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
    """Return an opened image of 8 bits with its colours in sRGB, opacity as it is; the same one if nothing changes.

    What changes is of mode L, RGB or, with opacity, RGBA.
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
        if "transparency" not in image.info:  # a PNG may tell of it at its end
            return to_srgb(image if image.mode == mode else image.convert(mode), profile)
    straight = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    colours = straight.convert("RGB")
    colours = to_srgb(colours.convert("L") if mode == "L" else colours, profile).convert("RGB")
    return Image.merge("RGBA", (*colours.split(), straight.getchannel("A")))


def space_of(mode: str) -> str:
    """Return the colours that a profile of an image of Pillow's ``mode`` is of: L, RGB or CMYK."""
    return {"1": "L", "L": "L", "LA": "L", "La": "L", "CMYK": "CMYK"}.get(mode, "RGB")


@lru_cache(_KEPT)
def _conversion(profile: bytes, mode: str) -> tuple[str, Any]:
    """Return the profile's name and what it does: a transform, a table for grey, or None for nothing."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = source.profile.xcolor_space.strip()
        name = _clean(source.profile.profile_description or "") or f"unnamed {space}"
    except Exception:  # lcms and Pillow raise several kinds for what is no profile
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
        given = before if inside == "L" or mode == "RGB" else before.convert("RGB")
        after = change.apply(given)
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
    """Return greys in all levels, and colours at even distances."""
    steps = range(0, 256, 17)
    colours = bytes(value for r in steps for g in steps for b in steps for value in (r, g, b))
    greys = bytes(value for level in range(256) for value in (level, level, level))
    return Image.frombytes("RGB", (256 + len(steps) ** 3, 1), greys + colours)


def _clean(text: str) -> str:
    return "".join(c for c in " ".join(text.split()) if c.isprintable())[:60]

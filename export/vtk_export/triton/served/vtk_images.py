"""Encoded images to what a model takes; part of a preprocessing model, and of the client.

Needs numpy and Pillow. Images are turned upright, brought to RGB, resized and normalised as this toolkit does it when
it evaluates and predicts; an export compares the two.
"""

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

MOST_PIXELS = 64_000_000
"""Of an image as it is sent, and as it is after resizing: memory is not taken on a stranger's word."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000", "MPO")
"""What is looked for: Pillow knows more, but some of its readers start other programs."""

Image.init()
_KNOWN = [name for name in FORMATS if name in Image.OPEN]
_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR,
            "nearest": Image.Resampling.NEAREST}  # fmt: skip
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_WHITE = (255, 255, 255, 255)


class Unreadable(Exception):
    """The image cannot be used; the text says why."""


def decode(data: bytes) -> Image.Image:
    """Decode an image file (the first frame, if it has several) to an upright 8-bit RGB image.

    Raises:
        Unreadable: it is no image, damaged, or too large.
    """
    if not data:
        raise Unreadable("there are no bytes")
    try:
        with Image.open(io.BytesIO(data), formats=_KNOWN) as image:
            _check(image.height, image.width)
            pixels = _rgb(image)
            turn = _TURNS.get(_orientation(image))  # of some formats known only now
        return pixels if turn is None else pixels.transpose(turn)
    except Unreadable:
        raise
    except Image.DecompressionBombError as error:
        raise Unreadable(f"it has more than {MOST_PIXELS:,} pixels; make it smaller") from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        why = " ".join(str(error).split())
        raise Unreadable("not an image in a format that can be read" if "cannot identify" in why else why) from error


def prepare(image: Image.Image, spec: Mapping[str, Any]) -> np.ndarray:
    """Resize, crop or pad, and normalise an RGB image.

    Args:
        image: upright, RGB.
        spec: height, width, in_chans, mean, std, interpolation, crop_pct and resize_mode.

    Returns:
        fp32 (channels, height, width).

    Raises:
        Unreadable: its sides differ so much that it would be enlarged beyond all bounds.
    """
    high, wide = spec["height"], spec["width"]
    rows, columns = _size(image, spec)
    _check(rows, columns)
    image = image.resize((columns, rows), _FILTERS[spec["interpolation"]])
    if spec["resize_mode"] == "pad":
        mean = (list(spec["mean"]) * 3)[:3]
        padded = Image.new("RGB", (wide, high), tuple(round(255 * value) for value in mean))
        padded.paste(image, ((wide - columns) // 2, (high - rows) // 2))
        image = padded
    else:
        top, left = round((rows - high) / 2), round((columns - wide) / 2)
        image = image.crop((left, top, left + wide, top + high))
    grey = spec["in_chans"] == 1
    pixels = np.asarray(image.convert("L") if grey else image).reshape(high, wide, -1)
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    out = np.empty((spec["in_chans"], high, wide), dtype=np.float32)
    for channel, (mean, std) in enumerate(zip(spec["mean"], spec["std"], strict=True)):
        # the arithmetic is done once for the 256 values that there are
        np.take((levels - np.float32(mean)) / np.float32(std), pixels[..., channel], out=out[channel], mode="wrap")
    return out


def _size(image: Image.Image, spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return (height, width) to resize to."""
    high, wide = spec["height"], spec["width"]
    if spec["resize_mode"] == "squash":
        return high, wide
    if spec["resize_mode"] == "pad":
        scale = min(high / image.height, wide / image.width)
        return max(round(image.height * scale), 1), max(round(image.width * scale), 1)
    cover = math.floor(high / spec["crop_pct"]), math.floor(wide / spec["crop_pct"])
    if cover[0] == cover[1]:  # of a square the longer side is cut off to whole pixels, not rounded
        longer = cover[0] * max(image.size) // min(image.size)
        return (cover[0], longer) if image.height <= image.width else (longer, cover[0])
    ratio = min(image.height / cover[0], image.width / cover[1])
    return round(image.height / ratio), round(image.width / ratio)


def _check(height: int, width: int) -> None:
    if height * width > MOST_PIXELS:
        raise Unreadable(f"{height}×{width} pixels are more than {MOST_PIXELS:,}; make it smaller, or less thin")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata: viewers show such a file as it is stored
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    """Bring any mode to RGB: transparency on white, 16 bits divided by 257."""
    image.load()
    mode = image.mode
    if mode.startswith("I;16") or mode in ("I", "F"):
        return _from_wide(image)
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = (image.convert("LA") if mode == "La" else image).convert("RGBA")
        canvas = Image.new("RGBA", image.size, _WHITE)
        canvas.alpha_composite(image)
        return canvas.convert("RGB")
    if mode == "LAB":
        from PIL import ImageCms

        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_wide(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    values[~np.isfinite(values)] = 0.0
    low, high = 0.0, 65535.0
    if not image.mode.startswith("I;16") and image.format not in ("PNG", "PPM"):  # Pillow scales these to 16 bits
        least, most = float(values.min()), float(values.max())
        limits = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        fits = [limit for limit in limits if most <= limit] if least >= 0 else []
        low, high = (0.0, fits[0]) if fits else (least, most if most > least else least + 1.0)
    grey = np.rint((values - low) * (255.0 / (high - low)))
    return Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8)).convert("RGB")

"""Encoded images to what a model takes; part of a preprocessing model, and of the client.

Needs numpy and Pillow, and beside it the modules that decode (`vtk_pixels.py` and others). Images are turned upright,
brought to 8 bits and the model's channels, resized and normalised as this toolkit does it when it evaluates and
predicts; an export compares the two.
"""

import importlib
import io
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, UnidentifiedImageError

Decoded: TypeAlias = Image.Image | tuple[Image.Image, ...]

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
_OWN_NAMES = {"depth": "bit_depth", "profiles": "icc_profiles", "raw": "raw_images"}
"""Names in `vtk.data.decoding` of the modules that decode, where they are other than here."""


class Unreadable(Exception):
    """The image cannot be used; the text says why."""


def decode(data: bytes, spec: Mapping[str, Any] | None = None) -> Decoded:
    """Decode an image file (the first frame, if it has several) to an upright 8-bit image.

    Args:
        data: the file.
        spec: of the model (`prepare`); by default one of version 0.1.

    Returns:
        RGB; for a model of other than 1 or 3 channels a grey image for each.

    Raises:
        Unreadable: it is no image, damaged, too large, or has not the channels.
    """
    return _decode(data, spec or {}, raw=False)


def decode_raw(data: bytes, spec: Mapping[str, Any]) -> np.ndarray:
    """Decode an image file to what a model takes as raw image, (height, width, 3): bytes, or values of its type.

    Raises:
        Unreadable: as `decode`.
    """
    found: np.ndarray = _decode(data, spec, raw=True)
    return found


def from_array(array: np.ndarray, spec: Mapping[str, Any]) -> Decoded:
    """Return the 8-bit image of a raw one, (height, width, channels) of bytes or of the model's type.

    Raises:
        Unreadable: it has other axes than these, no pixels, no finite value, or values of a type that the model has no
            range for.
    """
    channels = 3 if spec["in_chans"] == 1 else spec["in_chans"]
    if array.ndim != 3 or array.shape[2] != channels or not array.size or array.dtype.kind not in "uif":
        raise Unreadable(f"it is {array.dtype} of the shape {array.shape}; the model takes numbers of (height, width, "
                         f"{channels})")  # fmt: skip
    if (
        array.dtype.kind == "f" and not np.isfinite(array).any()
    ):  # some pixels without a value are mapped as in training
        raise Unreadable("it holds no finite value")
    if array.dtype != np.uint8 and not spec.get("value_range"):
        if not (array.min() >= 0 and array.max() <= 255):
            raise Unreadable("the model takes values from 0 to 255")
        array = np.rint(array).astype(np.uint8)
    if array.dtype == np.uint8 and array.shape[2] == 3 and spec["in_chans"] in (1, 3):
        return Image.fromarray(array)
    planes = tuple(np.ascontiguousarray(array[..., c]) for c in range(array.shape[2]))
    pixels = _module("pixels").Pixels(planes, "RGB" if spec["in_chans"] in (1, 3) else "X" * len(planes))
    return _shown(pixels, spec)


def _decode(data: bytes, spec: Mapping[str, Any], *, raw: bool) -> Any:
    if not data:
        raise Unreadable("there are no bytes")
    if spec.get("decoding", "v0.1") == "v0.1" and spec.get("in_chans", 3) not in (1, 3):
        raise Unreadable(f"files for a model of {spec['in_chans']} channels are not decoded here; send `pixel_values`")
    try:
        image = _open(data)
        if image is not None:
            _check(image.height, image.width)
        pixels = None
        if spec.get("decoding", "v0.1") != "v0.1":
            if image is None or _module("depth").is_special(image):
                pixels = _module("read_pixels").decode(image, io.BytesIO(data), MOST_PIXELS)
            if pixels is None:
                shown: Decoded = _rgb(_module("profiles").converted(image))
            else:
                shown = _shown(pixels, spec)
        elif image is None:
            raise Unreadable("not an image in a format that can be read")
        else:
            shown = _rgb(image)
        turn = None if image is None else _TURNS.get(_orientation(image))  # of some formats known only now
        if pixels is not None and (image is None or image.format == "TIFF"):
            turn = None  # upright already
        if pixels is None and spec.get("in_chans", 3) not in (1, 3):
            shown = _of_one_page(image, spec)
        if turn is not None:
            shown = tuple(each.transpose(turn) for each in shown) if isinstance(shown, tuple) else shown.transpose(turn)
        if not raw:
            return shown
        if pixels is not None and turn is not None:
            pixels = pixels.turned(_orientation(image))
        return _module("raw").raw_of(pixels, shown, spec.get("value_range", ()), spec.get("value_type", ""))
    except Unreadable:
        raise
    except Image.DecompressionBombError as error:
        raise Unreadable(f"it has more than {MOST_PIXELS:,} pixels; make it smaller") from error
    except Exception as error:  # decoders of damaged files raise nearly anything
        why = " ".join(str(error).split())
        raise Unreadable("not an image in a format that can be read" if "cannot identify" in why else why) from error


def _open(data: bytes) -> Any:
    """Open an image; None for a TIFF of which Pillow has no mode."""
    try:
        return Image.open(io.BytesIO(data), formats=_KNOWN)
    except UnidentifiedImageError:
        if data[:4] not in (b"II*\0", b"MM\0*", b"II+\0"):
            raise
        return None


def _module(name: str) -> Any:
    """Return a module that decodes: the copy beside this file, or where vtk itself runs this file its own."""
    try:
        return importlib.import_module(f"vtk_{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"vtk.data.decoding.{_OWN_NAMES.get(name, name)}")


def _shown(pixels: Any, spec: Mapping[str, Any]) -> Decoded:
    ranges = [tuple(pair) for pair in spec.get("value_range", ())]
    chans = spec.get("in_chans", 3)
    code = _module("pixels")
    found: Decoded = (
        code.rgb_of(pixels, ranges, chans, _WHITE[:3]) if chans in (1, 3) else code.bands_of(pixels, ranges, chans)
    )
    return found


def _of_one_page(image: Any, spec: Mapping[str, Any]) -> tuple[Image.Image, ...]:
    """Return grey or colours and opacity, for a model of two or four channels."""
    if spec["in_chans"] not in (2, 4):
        raise Unreadable(f"it has {len(image.getbands())} channels; the model takes {spec['in_chans']}")
    image = _module("profiles").converted(image)
    bands = image.convert("RGBA").split()
    if spec["in_chans"] == 4:
        return tuple(bands)
    return (image if image.mode == "L" else Image.merge("RGB", bands[:3]).convert("L")), bands[3]


def prepare(image: Decoded, spec: Mapping[str, Any]) -> np.ndarray:
    """Resize, crop or pad, and normalise an image.

    Args:
        image: upright, RGB; or a grey image for each channel.
        spec: height, width, in_chans, mean, std, interpolation, crop_pct and resize_mode.

    Returns:
        fp32 (channels, height, width).

    Raises:
        Unreadable: its sides differ so much that it would be enlarged beyond all bounds.
    """
    if isinstance(image, tuple):
        parts = [
            {**spec, "in_chans": 1, "mean": [m], "std": [s]} for m, s in zip(spec["mean"], spec["std"], strict=True)
        ]
        return np.concatenate([prepare(band, part) for band, part in zip(image, parts, strict=True)])
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

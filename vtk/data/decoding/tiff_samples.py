"""Samples of a TIFF page as an array, where Pillow has no mode for them: many bands, 16 bits a colour, floats.

Pillow and its libtiff decompress: they are given the same bytes described as a grey 8-bit image as wide as a row has
bytes. Types, byte order, predictors, tiles and planes are then handled here, with NumPy.

Needs Pillow and NumPy only: servers run a copy of this file.
"""

import io
import struct
from typing import Any

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin

from vtk.data.decoding.tiff import GREY, Page

_BYTEWISE = {1: "raw", 5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate", 34925: "LZMA", 50000: "Zstandard"}
"""Compressions of byte streams; JPEG, WebP and fax compress pixels of certain types."""

_TYPES = {
    (1, 8): "u1", (1, 16): "u2", (1, 32): "u4", (2, 8): "i1", (2, 16): "i2", (2, 32): "i4", (3, 16): "f2",
    (3, 32): "f4", (3, 64): "f8",
}  # fmt: skip
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES = 256, 257, 258, 259, 262, 266, 277
_STRIPS, _ROWS, _STRIP_BYTES, _PLANAR, _PREDICTOR = 273, 278, 279, 284, 317
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 322, 323, 324, 325


def read_samples(data: bytes, page: Page) -> np.ndarray:
    """Return all samples of a page as stored: (samples, height, width), of the file's type.

    Orientation and colour space are not applied.

    Args:
        data: the whole file.
        page: one of its `pages`.

    Raises:
        ValueError: samples of different types, or an unsupported compression.
        OSError: the file is damaged.
    """
    kind, bits = set(page.formats), set(page.bits)
    code = _TYPES.get((1 if kind == {4} else min(kind), min(bits))) if len(kind) == len(bits) == 1 else None
    if code is None:
        names = {1: "unsigned", 2: "signed", 3: "floating-point"}
        types = sorted({f"{b}-bit {names.get(f, 'unknown')}" for b, f in zip(page.bits, page.formats, strict=True)})
        raise ValueError(
            f"its {len(page.bits)} samples are {' and '.join(types)}; save all as one type of 8, 16 or 32 bits"
        )
    compression = int(page.tags.get(_COMPRESSION, 1))
    if compression not in _BYTEWISE:
        raise ValueError(
            f"its {len(page.bits)} samples of {page.bits[0]} bits are compressed as pixels (TIFF compression "
            f"{compression}); save them with LZW, deflate or none"
        )
    if len(data) >= 1 << 32:
        raise ValueError("it is larger than 4 GB; cut it into smaller images")
    order = "<" if data[:1] == b"I" else ">"
    dtype = np.dtype(order + code)
    planes = len(page.bits) if int(page.tags.get(_PLANAR, 1)) == 2 else 1
    each = len(page.bits) // planes
    out = np.empty((len(page.bits), page.height, page.width), dtype.newbyteorder("="))
    try:
        for plane in range(planes):
            rows = _bytes(data, order, page, plane, planes, each * dtype.itemsize)
            out[plane * each : (plane + 1) * each] = _values(rows, page, each, dtype)
    except (struct.error, TypeError, ZeroDivisionError, OverflowError, SyntaxError) as error:
        raise ValueError(f"its directory is damaged ({type(error).__name__})") from error
    return out


def _bytes(data: bytes, order: str, page: Page, plane: int, planes: int, step: int) -> np.ndarray:
    """Return the decompressed bytes of one plane, (height, bytes), with whole tiles."""
    tags = page.tags
    tiled = _TILES in tags
    wide = page.width
    if tiled:
        side = int(tags[_TILE_WIDTH])
        wide = -(-page.width // side) * side
    at, sizes = (
        value if isinstance(value := tags.get(tag, ()), tuple) else (value,)
        for tag in ((_TILES, _TILE_BYTES) if tiled else (_STRIPS, _STRIP_BYTES))
    )
    many = len(at) // planes
    if many * planes != len(at) or not many:
        raise ValueError(f"its {len(at)} strips or tiles do not divide into {planes} planes")
    if not sizes and len(at) == planes:  # old writers omit them
        sizes = (page.height * wide * step,) * planes
    part = slice(plane * many, (plane + 1) * many)
    entries: dict[int, tuple[int, ...]] = {
        _WIDTH: (wide * step,), _HEIGHT: (page.height,), _BITS: (8,), _COMPRESSION: (int(tags.get(_COMPRESSION, 1)),),
        _PHOTOMETRIC: (GREY,), _SAMPLES: (1,), _PLANAR: (1,), _FILL_ORDER: (int(tags.get(_FILL_ORDER, 1)),),
    }  # fmt: skip
    if tiled:
        entries |= {_TILE_WIDTH: (side * step,), _TILE_HEIGHT: (int(tags[_TILE_HEIGHT]),)}
        entries |= {_TILES: at[part], _TILE_BYTES: sizes[part]}
    else:
        rows = min(int(tags.get(_ROWS, page.height)), page.height)
        entries |= {_ROWS: (rows,), _STRIPS: at[part], _STRIP_BYTES: sizes[part]}
    with _Rows(io.BytesIO(_described(data, order, entries))) as image:
        image.load()
        return np.asarray(image)


class _Rows(TiffImagePlugin.TiffImageFile):
    """A TIFF whose pixels are bytes, without Pillow's check for decompression bombs.

    The numbers of pixels and bands were checked before.
    """

    def load_prepare(self) -> None:
        own: Any = self
        core: Any = Image
        own.im = core.core.new(self.mode, getattr(own, "_tile_size", self.size))
        ImageFile.ImageFile.load_prepare(self)


def _described(data: bytes, order: str, entries: dict[int, tuple[int, ...]]) -> bytes:
    """Return the file with a new first directory appended."""
    start = len(data) + len(data) % 2
    end = start + 2 + 12 * len(entries) + 4
    table, lists = b"", b""
    for tag, values in sorted(entries.items()):
        place = packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(packed) > 4:
            place = struct.pack(f"{order}I", end + len(lists))
            lists += packed
        table += struct.pack(f"{order}HHI", tag, 4, len(values)) + place
    first = data[:2] + struct.pack(f"{order}HI", 42, start)  # bytes 8 to 16 of a BigTIFF are not read
    body = data[8:] + b"\0" * (start - len(data))
    return first + body + struct.pack(f"{order}H", len(entries)) + table + b"\0" * 4 + lists


def _values(rows: np.ndarray, page: Page, each: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return (samples, height, width) of a plane's bytes, with the predictor undone."""
    height, step = len(rows), each * dtype.itemsize
    wide = rows.shape[1] // step
    side = int(page.tags[_TILE_WIDTH]) if _TILES in page.tags else wide
    predictor = int(page.tags.get(_PREDICTOR, 1)) if int(page.tags.get(_COMPRESSION, 1)) != 1 else 1
    if predictor == 3:  # floating point: byte planes of each row, highest first, as differences
        tiles = rows.reshape(height, wide // side, side * dtype.itemsize, each)
        tiles = np.cumsum(tiles, axis=2, dtype=np.uint8).reshape(height, wide // side, dtype.itemsize, side * each)
        rows = np.ascontiguousarray(tiles.swapaxes(2, 3)).reshape(height, -1)
        dtype = dtype.newbyteorder(">")
    values = np.ascontiguousarray(rows).view(dtype).reshape(height, wide // side, side, each)
    values = values.astype(dtype.newbyteorder("="), copy=False)
    if predictor == 2:
        whole = values.view(f"u{dtype.itemsize}")
        values = np.cumsum(whole, axis=2, dtype=whole.dtype).view(values.dtype)  # differences wrap around
    elif predictor not in (1, 3):
        raise ValueError(f"its predictor {predictor} is not supported")
    found: np.ndarray = values.reshape(height, wide, each)[:, : page.width].transpose(2, 0, 1)
    return found

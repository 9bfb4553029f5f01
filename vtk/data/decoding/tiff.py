"""The samples of a TIFF file as arrays, where Pillow knows no mode for them: many bands, 16 bits a colour, floats.

Pillow and its libtiff decompress; what they are told is only another description of the same bytes: a grey 8-bit image
as wide as a row has bytes. Types, byte order, predictors, tiles and planes are then settled here, with NumPy.

Needs Pillow and NumPy only: servers run a copy of this file.
"""

import io
import struct
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin

_BYTEWISE = {1: "raw", 5: "LZW", 8: "deflate", 32773: "PackBits", 32946: "deflate", 34925: "LZMA", 50000: "Zstandard"}
"""Compressions of bytes, whatever these mean; JPEG, WebP and fax compress pixels of certain kinds."""

_TYPES = {
    (1, 8): "u1", (1, 16): "u2", (1, 32): "u4", (2, 8): "i1", (2, 16): "i2", (2, 32): "i4", (3, 16): "f2",
    (3, 32): "f4", (3, 64): "f8",
}  # fmt: skip
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_MOST_PAGES = 2048
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES = 256, 257, 258, 259, 262, 266, 277
_STRIPS, _ROWS, _STRIP_BYTES, _PLANAR, _PREDICTOR = 273, 278, 279, 284, 317
_TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES, _EXTRA, _FORMAT = 322, 323, 324, 325, 338, 339
_SUBFILE, _ORIENTATION, _PROFILE, _NO_DATA = 254, 274, 34675, 42113

WHITE_IS_ZERO, GREY, RGB, PALETTE, MASK, INKS = range(6)
"""Photometric interpretations."""


class Page(NamedTuple):
    """What a page says of itself.

    Attributes:
        number: from 0.
        width, height: pixels, as stored.
        bits: of each sample.
        formats: of each sample: 1 unsigned, 2 signed, 3 floating-point, 4 not said.
        photometric: what the first samples are.
        extra: what each further sample is: 0 not said, 1 opacity that colours are multiplied by, 2 opacity.
        orientation: 1 to 8, as in EXIF.
        reduced: a smaller copy, or a mask, of another page.
        profile: embedded ICC profile.
        no_data: the value that stands for none (GDAL's tag).
        tags: of its directory.
    """

    number: int
    width: int
    height: int
    bits: tuple[int, ...]
    formats: tuple[int, ...]
    photometric: int
    extra: tuple[int, ...]
    orientation: int
    reduced: bool
    profile: bytes
    no_data: float | None
    tags: Any

    @property
    def plain(self) -> bool:
        """Whether Pillow reads all of it: no more than 8 bits, no sample whose meaning is not said."""
        signed = 2 in self.formats and max(self.bits) >= 8
        return max(self.bits) <= 8 and not signed and 0 not in self.extra and (len(self.bits) <= 4 or bool(self.extra))


def is_tiff(start: bytes) -> bool:
    """Tell by the first four bytes of a file whether it is TIFF or BigTIFF."""
    return start[:4] in _MAGIC


def pages(file: IO[bytes]) -> list[Page]:
    """Return the pages of a TIFF file, in order.

    Raises:
        ValueError: a directory is damaged, or there are very many.
    """
    return list(_pages(file))


def _pages(file: IO[bytes]) -> Iterator[Page]:
    file.seek(0)
    header = file.read(8)
    if header[3:4] == b"+":  # Pillow knows no such directory
        raise ValueError("it is a big-endian BigTIFF; save it as a TIFF, or with the little end first")
    if header[2:3] == b"+":
        header += file.read(8)
    seen: set[int] = set()
    try:
        directory: Any = TiffImagePlugin.ImageFileDirectory_v2(header)
        at = directory.next
        while at:
            if at in seen or len(seen) >= _MOST_PAGES:
                raise ValueError(f"its directories go round in a circle, or are more than {_MOST_PAGES}")
            seen.add(at)
            file.seek(at)
            directory = TiffImagePlugin.ImageFileDirectory_v2(header)
            directory.load(file)
            yield page_of(len(seen) - 1, dict(directory))
            at = directory.next
    except (struct.error, SyntaxError, TypeError, LookupError, OSError, OverflowError) as error:
        raise ValueError(f"its directory is damaged ({type(error).__name__})") from error


def page_of(number: int, tags: dict[int, Any]) -> Page:
    """Return what a directory says of a page.

    Raises:
        ValueError: something impossible.
    """
    samples = int(tags.get(_SAMPLES, 1))
    if not 1 <= samples <= 4096:
        raise ValueError(f"it claims {samples} samples a pixel")
    bits, formats = (_each(tags.get(tag, default), samples) for tag, default in ((_BITS, 1), (_FORMAT, 1)))
    photometric = int(tags.get(_PHOTOMETRIC, GREY))
    extra = tags.get(_EXTRA, ())
    known = {RGB: 3, INKS: 4, 6: 3, 8: 3, 9: 3, 10: 3}.get(photometric, 1)
    extra = tuple(map(int, extra if isinstance(extra, tuple) else (extra,)))[: max(samples - known, 0)]
    if photometric in (WHITE_IS_ZERO, GREY) and samples > 1:  # without words further samples are bands, not opacity
        extra += (0,) * (samples - 1 - len(extra))
    profile, text = tags.get(_PROFILE, b""), tags.get(_NO_DATA)
    try:
        no_data = float(str(text).strip("\0 ")) if text is not None else None
    except ValueError:
        no_data = None
    orientation = tags.get(_ORIENTATION, 1)
    return Page(
        number, int(tags[_WIDTH]), int(tags[_HEIGHT]), bits, formats, photometric, extra,
        orientation if orientation in range(1, 9) else 1, bool(int(tags.get(_SUBFILE, 0)) & 5),
        profile if isinstance(profile, bytes) else b"", no_data, tags,
    )  # fmt: skip


def _each(value: Any, samples: int) -> tuple[int, ...]:
    found = tuple(map(int, value if isinstance(value, tuple) else (value,)))
    return found if len(found) == samples else (found[0],) * samples  # some writers give one for all


def read_samples(data: bytes, page: Page) -> np.ndarray:
    """Return all samples of a page as they are stored: (samples, height, width), of the file's type.

    Orientation and colour space are left alone.

    Args:
        data: the whole file.
        page: one of its `pages`.

    Raises:
        ValueError: the samples are of unlike types, or compressed in a way that cannot be read so.
        OSError: the file is damaged.
    """
    kind, bits = set(page.formats), set(page.bits)
    code = _TYPES.get((1 if kind == {4} else min(kind), min(bits))) if len(kind) == len(bits) == 1 else None
    if code is None:
        names = {1: "unsigned", 2: "signed", 3: "floating-point"}
        types = sorted({f"{b}-bit {names.get(f, 'unknown')}" for b, f in zip(page.bits, page.formats, strict=True)})
        raise ValueError(f"its {len(page.bits)} samples are {' and '.join(types)}; save all as one of 8, 16 or 32 bits")
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
    """Return the decompressed bytes of one plane: (height, bytes), the bytes of whole tiles."""
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
        raise ValueError(f"its {len(at)} pieces are not the same number for each of {planes} planes")
    if not sizes and len(at) == planes:  # old writers leave them out
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
    """A picture of bytes, each a pixel: Pillow would take so wide a one for a decompression bomb.

    How many pixels and bands a page may have was checked before.
    """

    def load_prepare(self) -> None:
        own: Any = self
        core: Any = Image
        own.im = core.core.new(self.mode, getattr(own, "_tile_size", self.size))
        ImageFile.ImageFile.load_prepare(self)


def _described(data: bytes, order: str, entries: dict[int, tuple[int, ...]]) -> bytes:
    """Return the file as a TIFF with another first directory, behind its own bytes."""
    start = len(data) + len(data) % 2
    end = start + 2 + 12 * len(entries) + 4
    table, lists = b"", b""
    for tag, values in sorted(entries.items()):
        place = packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(packed) > 4:
            place = struct.pack(f"{order}I", end + len(lists))
            lists += packed
        table += struct.pack(f"{order}HHI", tag, 4, len(values)) + place
    first = data[:2] + struct.pack(f"{order}HI", 42, start)  # what a BigTIFF has in bytes 8 to 16 is not read
    body = data[8:] + b"\0" * (start - len(data))
    return first + body + struct.pack(f"{order}H", len(entries)) + table + b"\0" * 4 + lists


def _values(rows: np.ndarray, page: Page, each: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return (samples, height, width) of a plane's bytes, its predictor undone."""
    height, step = len(rows), each * dtype.itemsize
    wide = rows.shape[1] // step
    side = int(page.tags[_TILE_WIDTH]) if _TILES in page.tags else wide
    predictor = int(page.tags.get(_PREDICTOR, 1)) if int(page.tags.get(_COMPRESSION, 1)) != 1 else 1
    if predictor == 3:  # of floats: the bytes of a row lie in planes, the highest first, as differences
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
        raise ValueError(f"its predictor {predictor} is not known")
    found: np.ndarray = values.reshape(height, wide, each)[:, : page.width].transpose(2, 0, 1)
    return found

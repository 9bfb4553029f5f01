"""Pages of a TIFF file, and what their directories say.

Needs Pillow only: servers run a copy of this file.
"""

import struct
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from PIL import TiffImagePlugin

_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_MOST_PAGES = 2048
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _SAMPLES = 256, 257, 258, 262, 277
_EXTRA, _FORMAT, _SUBFILE, _ORIENTATION, _PROFILE, _NO_DATA = 338, 339, 254, 274, 34675, 42113

WHITE_IS_ZERO, GREY, RGB, PALETTE, MASK, INKS = range(6)
"""Photometric interpretations."""


class Page(NamedTuple):
    """The directory of a page.

    Attributes:
        number: index from 0.
        width, height: pixels, before rotation.
        orientation: 1 to 8, as in EXIF.
        photometric: colour space of the first samples.
        bits: bits of each sample.
        formats: type of each sample: 1 unsigned, 2 signed, 3 floating-point, 4 undefined.
        extra: meaning of each extra sample: 0 unspecified, 1 premultiplied opacity, 2 straight opacity.
        reduced: whether it is a thumbnail or a mask of another page.
        profile: embedded ICC profile.
        no_data: the value of missing data (GDAL's tag).
        tags: all tags.
    """

    number: int
    width: int
    height: int
    orientation: int
    photometric: int
    bits: tuple[int, ...]
    formats: tuple[int, ...]
    extra: tuple[int, ...]
    reduced: bool
    profile: bytes
    no_data: float | None
    tags: Any

    @property
    def plain(self) -> bool:
        """Whether Pillow reads it without loss: at most 8 bits, no sample of unspecified meaning."""
        signed = 2 in self.formats and max(self.bits) >= 8
        return max(self.bits) <= 8 and not signed and 0 not in self.extra and (len(self.bits) <= 4 or bool(self.extra))


def is_tiff(start: bytes) -> bool:
    """Return whether the first four bytes of a file are those of TIFF or BigTIFF."""
    return start[:4] in _MAGIC


def pages(file: IO[bytes]) -> list[Page]:
    """Return the pages of a TIFF file, in order.

    Raises:
        ValueError: a damaged directory, or too many.
    """
    return list(_pages(file))


def _pages(file: IO[bytes]) -> Iterator[Page]:
    file.seek(0)
    header = file.read(8)
    if header[3:4] == b"+":  # unsupported by Pillow
        raise ValueError("it is a big-endian BigTIFF; save it as a TIFF or a little-endian BigTIFF")
    if header[2:3] == b"+":
        header += file.read(8)
    seen: set[int] = set()
    try:
        directory: Any = TiffImagePlugin.ImageFileDirectory_v2(header)
        at = directory.next
        while at:
            if at in seen or len(seen) >= _MOST_PAGES:
                raise ValueError(f"its directories form a cycle, or are more than {_MOST_PAGES}")
            seen.add(at)
            file.seek(at)
            directory = TiffImagePlugin.ImageFileDirectory_v2(header)
            directory.load(file)
            yield page_of(len(seen) - 1, dict(directory))
            at = directory.next
    except (struct.error, SyntaxError, TypeError, LookupError, OSError, OverflowError) as error:
        raise ValueError(f"its directory is damaged ({type(error).__name__})") from error


def page_of(number: int, tags: dict[int, Any]) -> Page:
    """Return the page of a directory's tags.

    Raises:
        ValueError: impossible values.
    """
    samples = int(tags.get(_SAMPLES, 1))
    if not 1 <= samples <= 4096:
        raise ValueError(f"it declares {samples} samples per pixel")
    bits, formats = (_each(tags.get(tag, default), samples) for tag, default in ((_BITS, 1), (_FORMAT, 1)))
    photometric = int(tags.get(_PHOTOMETRIC, GREY))
    extra = tags.get(_EXTRA, ())
    known = {RGB: 3, INKS: 4, 6: 3, 8: 3, 9: 3, 10: 3}.get(photometric, 1)
    extra = tuple(map(int, extra if isinstance(extra, tuple) else (extra,)))[: max(samples - known, 0)]
    if photometric in (WHITE_IS_ZERO, GREY) and samples > 1:  # unspecified extra samples are bands, not opacity
        extra += (0,) * (samples - 1 - len(extra))
    profile, text = tags.get(_PROFILE, b""), tags.get(_NO_DATA)
    try:
        no_data = float(str(text).strip("\0 ")) if text is not None else None
    except ValueError:
        no_data = None
    orientation = tags.get(_ORIENTATION, 1)
    return Page(
        number, int(tags[_WIDTH]), int(tags[_HEIGHT]), orientation if orientation in range(1, 9) else 1, photometric,
        bits, formats, extra, bool(int(tags.get(_SUBFILE, 0)) & 5),
        profile if isinstance(profile, bytes) else b"", no_data, tags,
    )  # fmt: skip


def _each(value: Any, samples: int) -> tuple[int, ...]:
    found = tuple(map(int, value if isinstance(value, tuple) else (value,)))
    return found if len(found) == samples else (found[0],) * samples  # some writers give one value for all

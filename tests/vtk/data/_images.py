"""TIFF files and colour profiles packed by hand, from their specifications, for tests."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

ADOBE_RGB = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
"""Red, green and blue of Adobe RGB (1998) in XYZ of D50."""

DISPLAY_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
_FORMATS = {"u": 1, "i": 2, "f": 3}


def tiff(path: Path, *pages: np.ndarray, photometric: int = 1, extra: tuple[int, ...] = (), planes: bool = False,
         order: str = "<", more: dict[int, tuple[int, ...]] | None = None, subfile: tuple[int, ...] = (),
         profile: bytes = b"", text: dict[int, str] | None = None) -> Path:  # fmt: skip
    """Write pages (height, width) or (height, width, samples), not compressed, a strip for each plane."""
    body = bytearray(struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 0))
    link = 4
    for number, page in enumerate(pages):
        samples = page[..., None] if page.ndim == 2 else page
        count = samples.shape[2]
        stored = samples.astype(samples.dtype.newbyteorder(order))
        strips = [stored[..., c].tobytes() for c in range(count)] if planes else [stored.tobytes()]
        offsets = []
        for strip in strips:
            offsets.append(len(body))
            body += strip + b"\0" * (len(strip) % 2)
        bits, kind = samples.dtype.itemsize * 8, _FORMATS[samples.dtype.kind]
        tags: dict[int, tuple[int, tuple[Any, ...]]] = {
            256: (4, (page.shape[1],)), 257: (4, (page.shape[0],)), 258: (3, (bits,) * count), 259: (3, (1,)),
            262: (3, (photometric,)), 273: (4, tuple(offsets)), 277: (3, (count,)), 278: (4, (page.shape[0],)),
            279: (4, tuple(map(len, strips))), 284: (3, (2 if planes else 1,)), 339: (3, (kind,) * count),
        }  # fmt: skip
        if extra:
            tags[338] = (3, extra)
        if subfile:
            tags[254] = (4, (subfile[number],))
        if profile:
            tags[34675] = (7, tuple(profile))
        tags |= {tag: (3, values) for tag, values in (more or {}).items()}
        tags |= {tag: (2, tuple(value.encode() + b"\0")) for tag, value in (text or {}).items()}
        entries = b""
        for tag, (code, values) in sorted(tags.items()):
            packed = struct.pack(f"{order}{len(values)}{ {2: 'B', 3: 'H', 4: 'I', 7: 'B'}[code] }", *values)
            if len(packed) > 4:
                body += b"\0" * (len(body) % 2)
                place = struct.pack(f"{order}I", len(body))
                body += packed
            else:
                place = packed.ljust(4, b"\0")
            entries += struct.pack(f"{order}HHI", tag, code, len(values)) + place
        body += b"\0" * (len(body) % 2)
        struct.pack_into(f"{order}I", body, link, len(body))
        body += struct.pack(f"{order}H", len(tags)) + entries
        link = len(body)
        body += b"\0\0\0\0"
    path.write_bytes(bytes(body))
    return path


def matrix_profile(name: str, colours: tuple[tuple[float, ...], ...], gamma: float) -> bytes:
    """Return an ICC profile (version 2) of RGB by three primaries and one exponent."""
    tags = {f"{letter}XYZ": _xyz(*colour) for letter, colour in zip("rgb", colours, strict=True)}
    return _profile(b"RGB ", name, tags | {f"{letter}TRC": _exponent(gamma) for letter in "rgb"})


def grey_profile(name: str, gamma: float) -> bytes:
    """Return an ICC profile of grey."""
    return _profile(b"GRAY", name, {"kTRC": _exponent(gamma)})


def ink_profile(name: str, cyan: tuple[float, float, float]) -> bytes:
    """Return an ICC profile of CMYK by a table of Lab: white paper, and ``cyan`` for full cyan; other inks darken."""
    table = b""
    for c in (0, 1):
        for m in (0, 1):
            for y in (0, 1):
                for k in (0, 1):
                    lab = cyan if c else (100.0, 0.0, 0.0)
                    level = lab[0] * (0.4 ** (m + y)) * (0 if k else 1)
                    table += bytes(
                        [round(level * 2.55), *(round(v + 128) if not (m or y or k) else 128 for v in lab[1:])]
                    )
    straight = bytes(range(256))
    head = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + b"".join(_s15(v) for v in (1, 0, 0, 0, 1, 0, 0, 0, 1))
    return _profile(b"CMYK", name, {"A2B0": head + straight * 4 + table + straight * 3}, space=b"Lab ", kind=b"prtr")


def _profile(colours: bytes, name: str, tags: dict[str, bytes], space: bytes = b"XYZ ", kind: bytes = b"mntr") -> bytes:
    label = name.encode() + b"\0"
    described = b"desc\0\0\0\0" + struct.pack(">I", len(label)) + label + b"\0" * 78
    tags = {"desc": described, "cprt": b"text\0\0\0\0none\0", "wtpt": _xyz(0.9642, 1, 0.8249), **tags}
    head = b"\0" * 8 + struct.pack(">I", 0x02400000) + kind + colours + space + b"\0" * 12 + b"acsp" + b"\0" * 28
    head += _s15(0.9642) + _s15(1) + _s15(0.8249) + b"\0" * 48
    start, table, body = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for key, value in tags.items():
        table += key.encode() + struct.pack(">II", start + len(body), len(value))
        body += value + b"\0" * (-len(value) % 4)
    return struct.pack(">I", len(head + table + body)) + (head + table + body)[4:]


def _s15(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def _xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(map(_s15, values))


def _exponent(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256))

"""Fingerprints of 128 bits: a difference hash, made of the small picture that the audit decodes anyway.

Workers make a grid of 9×9 grey values of each image, with Pillow alone; the bits of many grids are made at once, where
NumPy is there, which takes a tenth of the time.
"""

from collections.abc import Sequence

from PIL import Image

from vtk.data.decoding.images import upright

CELLS = 9
LEAST_SIDE = 32
"""Pixels; of a smaller image too little is left to tell it from others."""

DRAFT = 18
"""Pixels of the shorter side that a grid wants: a JPEG need not be decoded larger, two pixels a cell."""

_STEP = 3
"""Grey levels, of 255, between two cells; less is noise."""
_LEAST_STEPS = 64
"""Of 128 differences so many must be more than noise. Blank pages, skies and small things on white have fewer: their
bits are alike although the images are not."""


def grid(image: Image.Image, size: tuple[int, int], turn: int = 1) -> str:
    """Return 9×9 grey values of an image, row by row, as 162 hexadecimal digits; nothing of a small one.

    Args:
        image: of any mode that converts to grey; may be a small version.
        size: width and height of the whole image.
        turn: EXIF orientation that is still to be applied.
    """
    if min(size) < LEAST_SIDE:
        return ""
    small = upright(image.resize((CELLS, CELLS), Image.Resampling.BOX), turn)
    return (small if small.mode == "L" else small.convert("L")).tobytes().hex()


def fingerprints(grids: Sequence[str]) -> list[str]:
    """Return 32 hexadecimal digits for each grid, of which alike images have most bits in common.

    Bits say whether a cell is brighter than the one to its left (64) and the one above it (64): the difference hash
    ("dHash", N. Krawetz 2013) in both directions. It is empty for what has no features, and for an empty grid.
    """
    import numpy as np

    found = [""] * len(grids)
    there = [i for i, text in enumerate(grids) if text]
    if not there:
        return found
    cells = np.frombuffer(bytes.fromhex("".join(grids[i] for i in there)), np.uint8).reshape(-1, CELLS, CELLS)
    values = cells.astype(np.int16)
    steps = np.stack([np.diff(values, axis=2)[:, :8], np.diff(values, axis=1)[:, :, :8]], axis=1).reshape(-1, 128)
    featured = (abs(steps) >= _STEP).sum(axis=1) >= _LEAST_STEPS
    digits = np.packbits(steps > 0, axis=1).tobytes().hex()
    for k, i in enumerate(there):
        if featured[k]:
            found[i] = digits[32 * k : 32 * k + 32]
    return found

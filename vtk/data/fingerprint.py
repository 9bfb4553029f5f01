"""What an image looks like in 128 bits: a difference hash, made of the small picture that the audit decodes anyway.

Nothing here imports torch or NumPy: it runs in the scan's worker processes.
"""

from PIL import Image

from vtk.data.images import upright

_CELLS = 9
LEAST_SIDE = 32
"""Pixels; of a smaller image too little is left to tell it from others."""

DRAFT = 18
"""Pixels of the shorter side that a fingerprint wants: a JPEG need not be decoded larger, two pixels a cell."""

_STEP = 3
"""Grey levels, of 255, between two cells; less is noise."""
_LEAST_STEPS = 64
"""Of 128 differences so many must be more than noise. Blank pages, skies and small things on white have fewer: their
bits are alike although the images are not."""


def fingerprint(image: Image.Image, size: tuple[int, int], turn: int = 1) -> str:
    """Return 32 hexadecimal digits, of which alike images have most bits in common; empty for what has no features.

    Bits say whether a cell of a 9×9 grid is brighter than the one to its left (64) and the one above it (64): the
    difference hash ("dHash", N. Krawetz 2013) in both directions.

    Args:
        image: of any mode that converts to grey; may be a small version.
        size: width and height of the whole image.
        turn: EXIF orientation that is still to be applied.
    """
    if min(size) < LEAST_SIDE:
        return ""
    small = upright(image.resize((_CELLS, _CELLS), Image.Resampling.BOX), turn)
    cells = small.convert("L").tobytes()
    bits = steps = 0
    for distance in (1, _CELLS):
        for row in range(0, _CELLS * 8, _CELLS):
            for i in range(row, row + 8):
                step = cells[i + distance] - cells[i]
                bits = bits << 1 | (step > 0)
                steps += step >= _STEP or step <= -_STEP
    return f"{bits:032x}" if steps >= _LEAST_STEPS else ""

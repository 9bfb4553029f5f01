"""Decode one file and note what it is; also the program that the scan's worker processes run.

Nothing here imports torch or NumPy: a worker is ready in a fraction of a second and takes little memory.
"""

import json
import os
import sys
import warnings
from typing import Any, NamedTuple

from PIL import Image

from vtk.data.images import FORMATS, orientation, reason, to_rgb


class Probe(NamedTuple):
    """What decoding a file told.

    Attributes:
        width: pixels, after turning upright; 0 for a bad file.
        height: pixels, after turning upright; 0 for a bad file.
        mode: Pillow's name for the stored pixels (``RGB``, ``P``, ``I;16`` …).
        orientation: EXIF orientation, 1–8.
        bad: why the file cannot be used; empty if it can.
    """

    width: int
    height: int
    mode: str
    orientation: int
    bad: str = ""


def probe(path: str) -> Probe:
    """Decode the whole file, exactly as `vtk.data.images.load_image` would."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            mode, (width, height) = image.mode, image.size
            turn = orientation(image)  # before decoding: Pillow turns TIFF files itself and then forgets it
            to_rgb(image)
    except Exception as error:  # whatever a decoder raises is the reason that the audit prints
        return Probe(0, 0, "", 1, reason(error, path))
    return Probe(height, width, mode, turn) if turn >= 5 else Probe(width, height, mode, turn)


def probe_all(paths: list[str]) -> list[Probe]:
    """Probe a few files in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubtful metadata, large images: neither makes a file bad
        return [probe(path) for path in paths]


def serve() -> None:
    """Answer each line of stdin, a JSON list of paths, with one line of JSON probes, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # a decoder that prints must not garble the answers
    for line in sys.stdin:
        value: list[Any] = probe_all(json.loads(line))
        answers.write(json.dumps(value) + "\n")
        answers.flush()

"""Decode one file and note what it is; also the program that the scan's worker processes run.

Nothing here imports torch or NumPy: a worker is ready in a fraction of a second and takes little memory.
"""

import hashlib
import json
import os
import sys
import warnings
from typing import Any, NamedTuple

from vtk.data.bands import to_bands
from vtk.data.images import MAX_PIXELS, open_image, orientation, reason, to_rgb

TRANSPARENT = " with transparency"
"""Behind the mode of an image that has no opacity channel, but a palette entry or a colour that is transparent."""


class Probe(NamedTuple):
    """What decoding a file told.

    Attributes:
        width: pixels, after turning upright; 0 for a bad file.
        height: pixels, after turning upright; 0 for a bad file.
        mode: Pillow's name for the stored pixels (``RGB``, ``P``, ``I;16`` …), with `TRANSPARENT` behind it or not.
        orientation: EXIF orientation, 1–8.
        bad: why the file cannot be used; empty if it can.
        digest: of the file's bytes (`content_digest`), whatever it is called; empty where they cannot be read.
    """

    width: int
    height: int
    mode: str
    orientation: int
    bad: str = ""
    digest: str = ""


EMPTY = Probe(0, 0, "", 1)
"""What is known of a file before it is decoded."""


def content_digest(path: str | os.PathLike[str]) -> str:
    """Return the first 32 hexadecimal digits of the sha256 of a file's bytes: what tells two images apart.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def probe(path: str, in_chans: int = 3, max_pixels: int = MAX_PIXELS) -> Probe:
    """Decode the whole file, as `vtk.data.bands.read_image` would; a JPEG at an eighth of its size.

    Damage shows while the entropy-coded bytes are read; what is spared is their transform to full size, a third to a
    half of the time.
    """
    digest = ""
    try:
        with open_image(path, max_pixels) as image:
            digest = content_digest(path)
            mode, (width, height) = image.mode, image.size
            tiff = image.format == "TIFF"
            # Pillow turns TIFF files itself and then forgets it. A PNG it decodes to find EXIF: what fails there would
            # be taken for damaged metadata, and not fail a second time
            turn = orientation(image) if tiff else 1
            if image.format == "JPEG":
                image.draft(None, (1, 1))  # type: ignore[arg-type]
            if in_chans in (1, 3):
                to_rgb(image)
            else:
                to_bands(image, in_chans, max_pixels)
            turn = turn if tiff else orientation(image)
            if "transparency" in image.info and "A" not in mode:  # known of a PNG once it is decoded
                mode += TRANSPARENT
    except Exception as error:  # whatever a decoder raises is the reason that the audit prints
        return Probe(0, 0, "", 1, reason(error, path), digest)
    size = (height, width) if turn >= 5 else (width, height)
    return Probe(*size, mode, turn, "", digest)


def probe_all(paths: list[str], in_chans: int = 3, max_pixels: int = MAX_PIXELS) -> list[Probe]:
    """Probe a few files in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # doubtful metadata, large images: neither makes a file bad
        return [probe(path, in_chans, max_pixels) for path in paths]


def serve() -> None:
    """Answer each line of stdin, JSON arguments of `probe_all`, with one line of JSON probes, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # a decoder that prints must not garble the answers
    for line in sys.stdin:
        value: list[Any] = probe_all(*json.loads(line))
        answers.write(json.dumps(value) + "\n")
        answers.flush()

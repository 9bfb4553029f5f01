"""Decodes one file and records its size, mode, digest and values; also the program of the scan's worker processes.

It imports neither torch nor NumPy: a worker starts in a fraction of a second and needs little memory.
"""

import hashlib
import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image, UnidentifiedImageError

from vtk.data.decoding.bands import of_one_page, to_bands
from vtk.data.decoding.decode import colors_of, opened, special
from vtk.data.decoding.icc_profiles import profile_name
from vtk.data.decoding.images import MAX_PIXELS, orientation, reason, to_rgb
from vtk.data.decoding.rules import Rules
from vtk.data.probing.fingerprint import CELLS, DRAFT, grid

if TYPE_CHECKING:
    from vtk.data.decoding.pixels import Pixels

TRANSPARENT = " with transparency"
"""Suffix of the mode of an image without opacity channel but with a transparent colour or palette entry."""


class Probe(NamedTuple):
    """Properties of a decoded file.

    Attributes:
        width: pixels, after rotation; 0 for an unreadable file.
        height: pixels, after rotation; 0 for an unreadable file.
        mode: Pillow's name for the stored pixels (``RGB``, ``P``, ``I;16`` …), optionally followed by `TRANSPARENT`.
        orientation: EXIF orientation, 1–8.
        bad: reason why the file cannot be used; empty if it can.
        digest: of the file's bytes (`content_digest`); empty if they cannot be read.
        looks: its grid (`vtk.data.probing.fingerprint`), of which its fingerprint is made; empty for a bad
            file, and where it has none.
        values: what an image of more than 8 bits holds (`vtk.data.value_range.values.Values.text`); empty of others.
        colors: the embedded profile (`vtk.data.decoding.icc_profiles.profile_name`); empty if there is none.
    """

    width: int
    height: int
    mode: str
    orientation: int
    bad: str = ""
    digest: str = ""
    looks: str = ""
    values: str = ""
    colors: str = ""


EMPTY = Probe(0, 0, "", 1)
"""The probe of a file that was not decoded."""


def content_digest(path: str | os.PathLike[str]) -> str:
    """Return the first 32 hexadecimal digits of the sha256 of a file's bytes.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:32]


def probe(path: str, in_chans: int = 3, max_pixels: int = MAX_PIXELS, rules: Rules = "srgb") -> Probe:
    """Decode the whole file, as `vtk.data.decoding.decode.read_image` would; a JPEG in grey, a large one at an eighth
    of its size.

    All entropy-coded bytes are read, so that damage is found; skipping the transform to full size and colour saves a
    third to a half of the time.
    """
    digest = ""
    try:
        with opened(path, max_pixels) as (image, file):
            digest = content_digest(path)
            pixels = special(image, file, max_pixels, in_chans) if rules != "v0.1" else None
            if pixels is not None:
                return _of_pixels(pixels, image, in_chans, digest)
            if image is None:
                raise UnidentifiedImageError
            mode, (width, height) = image.mode, image.size
            tiff = image.format == "TIFF"
            # Pillow turns TIFF files itself and then forgets it. A PNG it decodes to find EXIF: what fails there would
            # be taken for damaged metadata, and not fail a second time
            turn = orientation(image) if tiff else 1
            if image.format == "JPEG":
                # in grey if channels are not needed; all bytes are read anyway
                image.draft("L" if in_chans in (1, 3) else image.mode, (DRAFT, DRAFT))
            if in_chans in (1, 3):
                image.load()
                shown = image if image.format == "JPEG" and image.mode == "L" else to_rgb(image)
                turn = turn if tiff else orientation(image)
                looks = grid(shown, (width, height), 1 if tiff else turn)
            else:
                of_all = to_bands(image, in_chans, max_pixels) if rules == "v0.1" else of_one_page(image, in_chans)
                turn = turn if tiff else orientation(image)
                looks = grid(of_all[0], (width, height))
            colors = colors_of(image, mode) if rules != "v0.1" else ""
            if "transparency" in image.info and "A" not in mode:  # a PNG's is known after decoding
                mode += TRANSPARENT
    except Exception as error:  # whatever a decoder raises is the reason in the audit
        return Probe(0, 0, "", 1, reason(error, path), digest)
    size = (height, width) if turn >= 5 else (width, height)
    return Probe(*size, mode, turn, "", digest, looks, "", colors)


def _of_pixels(pixels: "Pixels", image: Image.Image | None, in_chans: int, digest: str) -> Probe:
    """Return the probe of an image of more than 8 bits, or of several bands.

    Raises:
        ValueError: the bands do not fit the model.
    """
    from vtk.data.decoding.pixels import check_bands  # NumPy: only for such images
    from vtk.data.value_range.values import measure

    check_bands(pixels, in_chans)
    found = measure(pixels)
    plane = pixels.planes[0]
    turn = pixels.orientation if image is None or image.format == "TIFF" else orientation(image)
    height, width = plane.shape
    # a TIFF's planes are upright already
    if turn >= 5 and image is not None and image.format != "TIFF":
        height, width = width, height
    mode = image.mode if image is not None and len(pixels.planes) == 1 else f"{len(pixels.planes)}×{plane.dtype.name}"
    colors = profile_name(pixels.profile, pixels.space) if pixels.profile and pixels.space else ""
    looks = grid(_grey(plane), (plane.shape[1], plane.shape[0]), 1 if (width, height) == plane.shape[::-1] else turn)
    return Probe(width, height, mode, turn, "", digest, looks, found.text() if found else "", colors)


def _grey(plane: Any) -> Image.Image:
    """Return a plane of any type in 8 bits, scaled by its own range, for the fingerprint."""
    import numpy as np

    step = max(min(plane.shape) // (4 * CELLS), 1)
    values = np.nan_to_num(plane[::step, ::step].astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = values.min(), values.max()
    return Image.fromarray(((values - low) * (255 / max(high - low, 1e-300))).astype(np.uint8))


def probe_all(paths: list[str], in_chans: int = 3, max_pixels: int = MAX_PIXELS, rules: Rules = "srgb") -> list[Probe]:
    """Return the probes of files, decoded in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata and large images, which do not make a file unreadable
        return [probe(path, in_chans, max_pixels, rules) for path in paths]


def serve() -> None:
    """Answer each line of stdin, JSON arguments of `probe_all`, with one line of JSON probes, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # output of a decoder must not mix with the answers
    for line in sys.stdin:
        value: list[Any] = probe_all(*json.loads(line))
        answers.write(json.dumps(value) + "\n")
        answers.flush()

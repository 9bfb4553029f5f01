"""Compresses plots for the page: 256 colours where the loss is not visible, JPEG for photographs."""

import io
from typing import Any

from vtk.html import data_uri

_VISIBLE = 2.5
"""Root mean square error (of 255) above which 256 colours are too few: plots have below 2, photographs above 4."""

_QUALITY = 82


def embed(png: bytes) -> tuple[str, int, int]:
    """Return a PNG as the source of an ``img``, with its width and height in pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        whole = image.convert("RGB")
    few = whole.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    data, kind = _png(few), "image/png"
    if _error(whole, few.convert("RGB")) > _VISIBLE:
        data, kind = _jpeg(whole), "image/jpeg"
    return data_uri(data, kind), *whole.size


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _jpeg(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_QUALITY, subsampling=0, optimize=True)
    return buffer.getvalue()


def _error(a: Any, b: Any) -> float:
    """Return the root mean square difference of two images."""
    import numpy as np

    return float(np.sqrt(np.mean((np.asarray(a, dtype=np.float32) - np.asarray(b, dtype=np.float32)) ** 2)))

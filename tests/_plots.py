"""A plot in place of those that tests of runs do not look at: drawing takes longer than the run."""

import io

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vtk.marks import SOFTWARE


def not_drawn() -> bytes:
    """Return a picture of one pixel that is marked as this toolkit marks its plots."""
    info = PngInfo()
    for key, text in SOFTWARE.items():
        info.add_text(key, text)
    Image.new("L", (1, 1)).save(buffer := io.BytesIO(), "PNG", pnginfo=info)
    return buffer.getvalue()

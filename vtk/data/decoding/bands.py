"""Channels of images for models with other inputs than grey or RGB.

====  =================================================================================
in    from
====  =================================================================================
1     the luminance of the RGB image (transparent pixels on white)
2     luminance and opacity, each as stored; opacity is 255 if a file has none
3     RGB (transparent pixels on white)
4     RGB and opacity, likewise
any   a TIFF file whose pages have this number of channels in total (a grey page has one, an RGB page three)
====  =================================================================================

With other than 1 or 3 channels, each is resized separately, so that transparent pixels keep their stored colour.
"""

from PIL import Image, ImageSequence

from vtk.data.decoding.images import (
    MAX_PIXELS,
    check_pixels,
    is_wide,
    orientation,
    to_grey,
    upright,
)

Bands = tuple[Image.Image, ...]
"""One 8-bit grey image for each channel, all of one size."""

_WITH_OPACITY = {2: "LA", 4: "RGBA"}


def to_bands(image: Image.Image, in_chans: int, max_pixels: int = MAX_PIXELS) -> Bands:
    """Return the channels of an opened image, upright.

    Raises:
        ValueError: another number of channels, or pages of different sizes.
    """
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    if pages > 1:
        found: list[Image.Image] = []
        for page in ImageSequence.Iterator(image):
            check_pixels(page.width, page.height, max_pixels)
            found += _upright(_planes(page), page)
            if len(found) > in_chans:
                break
        if len({band.size for band in found}) > 1:
            raise ValueError("its pages differ in size; store pages of one size")
        if len(found) == in_chans:
            return tuple(found)
        if in_chans not in _WITH_OPACITY:
            many = f"more than {in_chans}" if len(found) > in_chans else str(len(found))
            raise ValueError(f"its {pages} pages have {many} channels; --in-chans is {in_chans}")
        image.seek(0)
    return of_one_page(image, in_chans)


def of_one_page(image: Image.Image, in_chans: int, turn: int | None = None) -> Bands:
    """Return the channels of a grey or colour image with its opacity (``in_chans`` 2 or 4), upright.

    Args:
        image: opened or decoded.
        in_chans: of the model.
        turn: EXIF orientation of a decoded image; by default read from the image.

    Raises:
        ValueError: another number of channels.
    """
    if in_chans not in _WITH_OPACITY:
        count = len(image.getbands())
        raise ValueError(
            f"it has {count} channel{'s' * (count > 1)}; --in-chans {in_chans} needs a TIFF file whose pages have "
            f"{in_chans} in total"
        )
    bands = _with_opacity(image, _WITH_OPACITY[in_chans])
    return tuple(_upright(bands, image) if turn is None else [upright(band, turn) for band in bands])


def _with_opacity(image: Image.Image, mode: str) -> list[Image.Image]:
    grey = to_grey(image) if is_wide(image.mode) else image
    straight = grey.convert("RGBA")  # from any mode; transparent pixels keep their colour
    bands = list(straight.split())
    return bands if mode == "RGBA" else [grey if grey.mode == "L" else straight.convert("RGB").convert("L"), bands[-1]]


def _planes(page: Image.Image) -> list[Image.Image]:
    """Return the channels of one page, 8 bits each; a palette image becomes RGB."""
    if is_wide(page.mode):
        return [to_grey(page)]
    mode = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA"}.get(page.mode, page.mode)
    return list(page.convert(mode).split()) if mode != page.mode else list(page.split())


def _upright(bands: list[Image.Image], image: Image.Image) -> list[Image.Image]:
    turn = orientation(image)  # after decoding: Pillow rotates a TIFF itself and drops the tag
    return [upright(band, turn) for band in bands]

"""Images for models that take other than grey or colour: which file fills which channels.

====  =================================================================================
in    from
====  =================================================================================
1     the luminance of the RGB image (transparent pixels on white)
2     luminance and opacity, each as it is stored; opacity is 255 where a file has none
3     RGB (transparent pixels on white)
4     RGB and opacity, likewise
any   a TIFF file of several pages whose channels are so many together (grey pages are one, RGB pages are three)
====  =================================================================================

Channels other than 1 and 3 are resized one by one, so that a transparent pixel keeps the colour it was stored with.
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
        ValueError: it does not have so many, or its pages differ in size.
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
            raise ValueError("its pages differ in size; store one page of each channel, all of one size")
        if len(found) == in_chans:
            return tuple(found)
        if in_chans not in _WITH_OPACITY:
            many = f"more than {in_chans}" if len(found) > in_chans else str(len(found))
            raise ValueError(f"its {pages} pages have {many} channels; --in-chans is {in_chans}")
        image.seek(0)
    return of_one_page(image, in_chans)


def of_one_page(image: Image.Image, in_chans: int, turn: int | None = None) -> Bands:
    """Return the channels of an image of grey or colours and, for 2 and 4, of its opacity, upright.

    Args:
        image: opened, or already decoded.
        in_chans: of the model.
        turn: EXIF orientation, of an image that was decoded; by default its own.

    Raises:
        ValueError: it does not have so many.
    """
    if in_chans not in _WITH_OPACITY:
        count = len(image.getbands())
        raise ValueError(
            f"it has {count} channel{'s' * (count > 1)}; --in-chans {in_chans} wants a TIFF file whose pages have "
            f"{in_chans} together"
        )
    bands = _with_opacity(image, _WITH_OPACITY[in_chans])
    return tuple(_upright(bands, image) if turn is None else [upright(band, turn) for band in bands])


def _with_opacity(image: Image.Image, mode: str) -> list[Image.Image]:
    grey = to_grey(image) if is_wide(image.mode) else image
    straight = grey.convert("RGBA")  # from any mode; a colour that is transparent keeps its value
    bands = list(straight.split())
    return bands if mode == "RGBA" else [grey if grey.mode == "L" else straight.convert("RGB").convert("L"), bands[-1]]


def _planes(page: Image.Image) -> list[Image.Image]:
    """Return the channels of one page: what it stores, eight bits each; a palette becomes its colours."""
    if is_wide(page.mode):
        return [to_grey(page)]
    mode = {"1": "L", "P": "RGB", "PA": "RGBA", "La": "LA", "RGBa": "RGBA"}.get(page.mode, page.mode)
    return list(page.convert(mode).split()) if mode != page.mode else list(page.split())


def _upright(bands: list[Image.Image], image: Image.Image) -> list[Image.Image]:
    turn = orientation(image)  # after decoding: of TIFF Pillow turns the pixels itself, and then forgets the tag
    return [upright(band, turn) for band in bands]

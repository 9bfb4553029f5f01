"""Writes the preprocessing of a card as Python code for a README, with Pillow and NumPy only."""

import math

from vtk.card import InputSpec

_FILTERS = {"bicubic": "BICUBIC", "bilinear": "BILINEAR", "nearest": "NEAREST"}


def prepare_code(spec: InputSpec, *, raw: bool = False) -> str:
    """Return the definition of ``prepare(path)`` with its imports.

    It gives what the model takes of an image file: (1, C, H, W) fp32, or with ``raw`` (1, height, width, 3) for a graph
    that prepares images itself. Values are those of `vtk.data.eval_transform` for files that Pillow
    reads without loss; it reads colours of more than 8 bits, and TIFF files of several bands a page, only in part.
    """
    colours = spec.in_chans in (1, 3)
    imports = ["import numpy as np", f"from PIL import Image, {'' if colours else 'ImageSequence, '}ImageOps"]
    profile = spec.decoding == "srgb" and colours
    if profile:
        imports = ["import io", "", imports[0], "from PIL import Image, ImageCms, ImageOps"]
    parts = ["\n".join(imports)]
    if spec.value_range:
        parts.append(_levels(spec))
    parts.append(_open_colours(spec, profile) if colours else _open_bands(spec))
    if raw:
        parts.append(_raw(spec))
    else:
        parts += [_resize(spec), _prepare(spec, colours)]
    return "\n\n\n".join(parts)


def _levels(spec: InputSpec) -> str:
    """Return the lines that bring values of more than 8 bits to 0 to 255."""
    low, high = ([pair[i] for pair in spec.value_range] for i in (0, 1))
    shown = (low[0], high[0]) if len(low) == 1 else (low, high)
    band = "" if len(low) == 1 else "[band]"
    return f"""LOW, HIGH = {shown[0]!r}, {shown[1]!r}  # these values become 0 and 255


def to_bytes(values, band=0):
    values = values.astype(np.float64)
    levels = np.rint((values - LOW{band}) * (255.0 / (HIGH{band} - LOW{band})))
    return np.nan_to_num(np.clip(levels, 0, 255)).astype(np.uint8)"""


def _open_colours(spec: InputSpec, profile: bool) -> str:
    """Return the lines that give an upright RGB image."""
    lines = [
        "def open_image(path):",
        "    image = ImageOps.exif_transpose(Image.open(path))",
        '    if image.mode.startswith("I") or image.mode == "F":  # grey of more than 8 bits',
        "        values = np.asarray(image)",
    ]
    if spec.value_range:
        lines.append("        image = Image.fromarray(to_bytes(values))")
    else:
        lines += [
            '        tops = (1, 255, 65535) if image.mode == "F" else (65535,)  # no other range is known',
            "        top = min(t for t in tops if values.min() >= 0 and values.max() <= t)",
            "        image = Image.fromarray(np.rint(values * (255 / top)).clip(0, 255).astype(np.uint8))",
        ]
    if profile:
        lines += ["    image = to_srgb(image)"]
    lines += [
        '    if "A" in image.getbands() or "transparency" in image.info:  # transparent pixels on white',
        '        white = Image.new("RGBA", image.size, (255, 255, 255, 255))',
        '        white.alpha_composite(image.convert("RGBA"))',
        "        image = white",
        '    return image.convert("RGB")',
    ]
    return f"{_SRGB}\n\n\n" * profile + "\n".join(lines)


_SRGB = """\
def to_srgb(image):  # by the embedded colour profile, if there is one
    icc, bands = image.info.get("icc_profile"), image.getbands()
    if not icc:
        return image
    colours = image if image.mode in ("L", "CMYK") else image.convert("L" if bands[0] == "L" else "RGB")
    try:
        change = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB"), colours.mode, "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC, 0x2000,  # black point compensation
        )
    except (OSError, ImageCms.PyCMSError):  # damaged, or of other colours than the pixels
        return image
    found, before = ImageCms.applyTransform(colours, change), colours.convert("RGB")
    if np.abs(np.asarray(found, int) - np.asarray(before, int)).max() <= 2:  # it is sRGB
        return image
    if "A" in bands or "transparency" in image.info:
        found.putalpha(image.convert("RGBA").getchannel("A"))
    return found"""


def _open_bands(spec: InputSpec) -> str:
    """Return the lines that give one 8-bit grey image for each channel."""
    opacity = {
        2: ['    rgba = image.convert("RGBA")', '    return [rgba.convert("RGB").convert("L"), rgba.getchannel("A")]'],
        4: ['    return list(image.convert("RGBA").split())'],
    }.get(spec.in_chans, ["    return [image]"])
    if spec.value_range:
        one = "to_bytes(np.asarray(page), i)"
        paged = [f"        return [Image.fromarray({one}) for i, page in enumerate(ImageSequence.Iterator(image))]"]
    else:
        paged = ['        return [page.convert("L") for page in ImageSequence.Iterator(image)]']
    return "\n".join([
        "def open_bands(path):  # one 8-bit grey image for each channel",
        "    image = Image.open(path)",
        '    if getattr(image, "n_frames", 1) > 1:  # a page for each channel',
        *paged,
        "    image = ImageOps.exif_transpose(image)",
        *opacity,
    ])  # fmt: skip


def _raw(spec: InputSpec) -> str:
    """Return ``prepare`` for a graph that resizes and normalises itself."""
    if not spec.value_range:
        return (
            "def prepare(path):  # (1, height, width, 3) uint8, of any size\n"
            "    return np.asarray(open_image(path))[None]"
        )
    cast = f".astype(np.{spec.value_type})"
    spread = "LOW + np.asarray(open_image(path)) * ((np.array(HIGH) - LOW) / 255)"
    whole = "" if spec.value_type.startswith("float") else "np.rint"
    return f"""def prepare(path):  # (1, height, width, 3) {spec.value_type}, of any size: values as they are stored
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I") or image.mode == "F":
        return np.repeat(np.asarray(image)[..., None], 3, -1)[None]{cast}
    # 8 bits are spread over the range
    return {whole}({spread})[None]{cast}"""


def _resize(spec: InputSpec) -> str:
    """Return the lines that resize and crop or pad an image."""
    high, wide = spec.height, spec.width
    by = f"Image.Resampling.{_FILTERS[spec.interpolation]}"
    if spec.resize_mode == "squash":
        return f"def resize(image):\n    return image.resize(({wide}, {high}), {by})  # width, height"
    if spec.resize_mode == "pad":
        bands = spec.in_chans not in (1, 3)
        fill = "fill" if bands else repr(tuple(round(255 * value) for value in (list(spec.mean) * 3)[:3]))
        return f"""def resize(image{", fill" if bands else ""}):  # the whole image inside, the mean colour around it
    scale = min({high} / image.height, {wide} / image.width)
    rows, columns = max(round(image.height * scale), 1), max(round(image.width * scale), 1)
    canvas = Image.new(image.mode, ({wide}, {high}), {fill})
    canvas.paste(image.resize((columns, rows), {by}), (({wide} - columns) // 2, ({high} - rows) // 2))
    return canvas"""
    cover = math.floor(high / spec.crop_pct), math.floor(wide / spec.crop_pct)
    if cover[0] == cover[1]:
        size = [
            "    short = min(image.size)",
            f"    rows, columns = {cover[0]} * image.height // short, {cover[0]} * image.width // short",
        ]
    else:
        size = [
            f"    ratio = min(image.height / {cover[0]}, image.width / {cover[1]})",
            "    rows, columns = round(image.height / ratio), round(image.width / ratio)",
        ]
    return "\n".join([
        f"def resize(image):  # to cover {cover[0]}×{cover[1]} (height × width), then the centre of it",
        *size,
        f"    top, left = round((rows - {high}) / 2), round((columns - {wide}) / 2)",
        f"    return image.resize((columns, rows), {by}).crop((left, top, left + {wide}, top + {high}))",
    ])  # fmt: skip


def _prepare(spec: InputSpec, colours: bool) -> str:
    """Return ``prepare``: open, resize and normalise."""
    shape = f"(1, {spec.in_chans}, {spec.height}, {spec.width})"
    if colours:
        grey = spec.in_chans == 1
        pixels = 'resize(open_image(path)).convert("L")' if grey else "resize(open_image(path))"
        planes = f"np.asarray({pixels}, np.float32)" + (f".reshape({spec.height}, {spec.width}, 1)" if grey else "")
    else:
        each = "resize(band)"
        if spec.resize_mode == "pad":
            each = "resize(band, round(255 * mean))"
        over = "band, mean in zip(open_bands(path), MEAN)" if "mean" in each else "band in open_bands(path)"
        planes = f"np.stack([{each} for {over}], -1).astype(np.float32)"
    return f"""MEAN, STD = {list(spec.mean)}, {list(spec.std)}  # of values from 0 to 1


def prepare(path):  # {shape} fp32
    pixels = {planes}
    pixels = (pixels / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]"""

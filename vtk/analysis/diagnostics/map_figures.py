"""Draws maps over images; results keep the images as small JPEGs, so that they can be drawn without the files."""

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Picture, Run

_SIDE = 224  # pixels of the longer side of a stored picture
_QUALITY = 90
_A_PAGE = 8  # images in one figure
_HEADS_OF = 4  # images whose heads are drawn; fewer if they need more rows than
_HEAD_ROWS = 8
_IN_A_ROW = 6  # heads
_OPACITY = (0.3, 0.85)  # of a map's lowest and highest values: regions with little attention stay visible
_WIDTH = 5.0  # inches of a row
_COLOURS = "inferno"
_UNDER = 0.75  # brightness of the image under a map, so that the map is visible


def chosen_images(context: Context) -> list[tuple[Tensor, Tensor]]:
    """Return the first ``--overlay-images`` images with labels, in batches; they stay in memory."""
    left = context.config.overlay_images
    held: list[tuple[Tensor, Tensor]] = []
    loader = context.shown or context.loader
    for images, labels in loader(min(left, context.config.batch_size)):
        held.append((images[:left], labels[:left]))
        left -= len(held[-1][0])
        if left == 0:
            break
    return held


def encode_picture(pixels: Tensor) -> str:
    """Return an image (C, H, W) of values from 0 to 1 as a JPEG in base64, its longer side at most 224 pixels.

    Images with other than 3 channels are shown as the mean over channels, in grey.
    """
    from PIL import Image

    shown = pixels if len(pixels) == 3 else pixels.mean(dim=0, keepdim=True)
    values = (shown.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(values if values.shape[2] == 3 else values[..., 0])
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def decode_picture(text: str) -> Any:
    """Return a picture of `encode_picture` as (H, W, 3) uint8."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def draw_maps(name: str, runs: Sequence[Run], what: str) -> list[Picture]:
    """Draw every image of a result beside its map, eight per figure; of two results the same images side by side.

    Args:
        name: of the pictures.
        runs: whose results have ``images`` with ``picture`` and ``map``.
        what: the map shows, for the caption.
    """
    count = min(len(run.result["images"]) for run in runs)
    pages = math.ceil(count / _A_PAGE)
    pictures = []
    for page in range(pages):
        numbers = range(page * _A_PAGE, min((page + 1) * _A_PAGE, count))
        cells = [(run, run.result["images"][i]) for i in numbers for run in runs]
        columns = 1 if len(cells) == 1 else 2
        figure, axes = _grid(2 * columns, math.ceil(len(cells) / columns), [image["picture"] for _, image in cells])
        for i, (run, image) in enumerate(cells):
            photo, over = axes[2 * i : 2 * i + 2]
            background = decode_picture(image["picture"])
            photo.imshow(background)
            _overlay(over, background, image["map"])
            if len(runs) > 1 and i < len(runs):
                photo.set_title(figures.label(run.label), fontsize=8, loc="left")
        caption = f"Images as the model sees them, beside {what}. Yellow is high; each map is scaled to its maximum."
        pictures.append(Picture(name if pages == 1 else f"{name}-{page + 1}", figure, caption))
    return pictures


def draw_heads(name: str, run: Run, number: int | None) -> Picture:
    """Draw the maps of all heads over the first images of one result, at most four.

    Args:
        name: of the picture.
        run: whose result has ``images`` with ``picture`` and ``heads``.
        number: of the run where there are several.
    """
    heads = len(run.result["images"][0]["heads"])
    across = min(heads, _IN_A_ROW)
    down = math.ceil(heads / across)
    images = run.result["images"][: min(_HEADS_OF, max(_HEAD_ROWS // down, 1))]
    figure, axes = _grid(1 + across, down * len(images), [image["picture"] for image in images])
    for i, image in enumerate(images):
        background = decode_picture(image["picture"])
        axes[i * down * (1 + across)].imshow(background)
        for head, values in enumerate(image["heads"]):
            row, column = divmod(head, across)
            one = axes[(i * down + row) * (1 + across) + 1 + column]
            _overlay(one, background, values)
            if i == 0:
                one.set_title(f"head {head + 1}", fontsize=7, pad=2)
    whose = f" of {run.label}" if number is not None else ""
    caption = (
        f"Attention heads{whose}, layer {run.result['layer']}, over the first images; each map is scaled to its "
        "maximum."
    )
    return Picture(f"{name}-heads" if number is None else f"{name}-heads-{number}", figure, caption)


def _grid(columns: int, rows: int, pictures: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return a figure of bare axes with the shape of its pictures."""
    height, width, _ = decode_picture(pictures[0]).shape
    side = _WIDTH / max(columns, 3)
    figure, axes = figures.new(columns, rows, width=side, height=side * height / width + 0.06)
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0.01, hspace=0.01)
    for one in axes:
        one.set_axis_off()
    return figure, axes


def _overlay(axes: Any, picture: Any, values: Any) -> None:
    height, width, _ = picture.shape
    grey = (picture.mean(axis=2) * _UNDER).astype(np.uint8)
    extent = (0, width, height, 0)
    axes.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=extent)
    weights = np.asarray(values, dtype=float)
    top = weights.max() or 1.0
    low, high = _OPACITY
    axes.imshow(
        weights, cmap=_COLOURS, vmin=0, vmax=top, alpha=low + (high - low) * weights / top, extent=extent,
        interpolation="nearest",
    )  # fmt: skip  # a square is a patch

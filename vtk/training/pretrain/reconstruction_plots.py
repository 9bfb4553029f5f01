"""Draws ``reconstruction.png``: held-out images, their masked versions and their reconstructions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vtk import files
from vtk.card import InputSpec
from vtk.data.loading.normalization import to_pixels
from vtk.marks import SOFTWARE
from vtk.training.pretrain.masks import Masks
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.patches import blank_out, patchify, positions_of, unpatchify
from vtk.training.pretrain.seeds import HELD_OUT, seeds_of
from vtk.training.runs.outputs import RECONSTRUCTION

SHOWN = 6
"""Maximum number of images in the plot."""
_ROW, _TITLE = 1.5, 0.35  # inches


@torch.no_grad()
def reconstruction(model: nn.Module, images: Tensor, masks: Masks, setting: Setting) -> None:
    """Draw original, masked and reconstructed images; the visible patches of a reconstruction are the original's.

    If normalised pixels were predicted, the true mean and standard deviation of each patch are restored: the plot then
    shows the structure within patches.
    """
    grid = masks.grid
    mask = masks.draw(seeds_of(torch.arange(len(images)), setting.config.seed, HELD_OUT)).to(images.device)
    where = positions_of(mask, masks.count)
    predicted = model(images, mask, count=masks.count).float()
    patches = patchify(images.float(), grid)
    if setting.config.norm_pixels:
        true = patches.gather(1, where.unsqueeze(-1).expand_as(predicted))
        mean, var = true.mean(-1, keepdim=True), true.var(-1, keepdim=True)
        predicted = predicted * (var + 1e-6).sqrt() + mean
    filled = patches.scatter(1, where.unsqueeze(-1).expand_as(predicted), predicted)
    columns = [images, blank_out(images, mask, grid), unpatchify(filled, grid, images.shape[1:])]
    draw(columns, ("original", "masked", "reconstructed"), setting.spec, setting.out / RECONSTRUCTION)


def draw(columns: Sequence[Tensor], titles: Sequence[str], spec: InputSpec, path: Path) -> None:
    """Draw images (B, C, H, W), normalised as ``spec`` says, in columns; more than three channels as grey.

    Raises:
        DataError: the file cannot be written.
    """
    # not pyplot: it would choose a back-end with windows, and keep every figure
    from matplotlib.figure import Figure

    rows, wide = len(columns[0]), _ROW * spec.width / spec.height
    size = (wide * len(columns), _ROW * rows + _TITLE)
    figure = Figure(figsize=size, dpi=130)
    top = 1 - _TITLE / size[1]
    for c, (images, title) in enumerate(zip(columns, titles, strict=True)):
        for r, pixels in enumerate(_pixels(images, spec)):
            height, width = top / rows, 1 / len(columns)
            box = c * width + 0.005, top - (r + 1) * height + 0.004, width - 0.01, height - 0.008
            axes: Any = figure.add_axes(box)
            axes.imshow(pixels, vmin=0, vmax=1, cmap="gray", interpolation="nearest", aspect="auto")
            axes.set_axis_off()
            if r == 0:
                axes.set_title(title, fontsize=9)
    with files.replace_file(path) as tmp:
        figure.savefig(tmp, format="png", metadata=SOFTWARE)


def _pixels(images: Tensor, spec: InputSpec) -> np.ndarray:
    """Return (B, H, W, 3), or (B, H, W) for images without colours, from 0 to 1."""
    values = to_pixels(images.detach().float().cpu(), spec).clamp(0, 1)
    plain: np.ndarray = (values.mean(1) if values.shape[1] != 3 else values.permute(0, 2, 3, 1)).numpy()
    return plain

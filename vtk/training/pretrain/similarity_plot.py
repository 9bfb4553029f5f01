"""Draws the cosines between some held-out images."""

from pathlib import Path

from torch import Tensor

from vtk.files import replace_file
from vtk.marks import SOFTWARE
from vtk.training.runs.outputs import SIMILARITY


def draw_similarity(vectors: Tensor, label: str, out: Path, order: str = "") -> None:
    """Draw the products of unit vectors (B, D), each with each, into ``similarity.png`` of the folder ``out``.

    Args:
        vectors: of the images.
        label: of the colours.
        out: folder of the run.
        order: of the images, in words.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3.4), dpi=130)
    axes = figure.add_subplot()
    shown = axes.imshow((vectors @ vectors.T).float().cpu().numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
    figure.colorbar(shown, ax=axes, label=label)
    axes.set_xlabel(f"held-out images{order and f', {order}'}")
    with replace_file(out / SIMILARITY) as tmp:
        figure.savefig(tmp, format="png", metadata=SOFTWARE)

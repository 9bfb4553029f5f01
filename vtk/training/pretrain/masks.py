"""Draws masks: the same number of hidden patches in every image, from a seed of its own.

The seed follows from the run's seed, the epoch and the image (`vtk.training.pretrain.seeds`), so that neither the
batch size, nor the number of processes, nor a stop and a resume changes what is hidden.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vtk.errors import UsageError

_LEAST_BLOCK = 16 / 196
"""Smallest area of a block, as a share of the grid: BEiT's 16 of 14×14 patches (Bao et al. 2021, algorithm 1)."""
_ASPECT = 0.3
"""Blocks have aspect ratios from this to its inverse, evenly on a logarithmic scale (ibid.)."""
_TRIES = 10


@dataclass(frozen=True)
class Masks:
    """Draws masks.

    Attributes:
        grid: patches, height and width.
        count: hidden patches of an image.
        shape: ``random`` squares or ``block``s.
        unit: side of the squares, in patches.
    """

    grid: tuple[int, int]
    count: int
    shape: Literal["random", "block"]
    unit: int = 1

    def draw(self, seeds: Tensor) -> Tensor:
        """Return (B, N) bool, True where a patch is hidden, on the device of ``seeds`` (B,) int64."""
        kind = self._blocks if self.shape == "block" else self._random
        rows = [kind(np.random.Generator(np.random.Philox(seed))) for seed in seeds.tolist()]
        return torch.from_numpy(np.stack(rows)).to(seeds.device)

    def _random(self, random: np.random.Generator) -> np.ndarray:
        height, width = (side // self.unit for side in self.grid)
        coarse = np.zeros(height * width, dtype=bool)
        coarse[random.permutation(height * width)[: self.count // self.unit**2]] = True
        return coarse.reshape(height, width).repeat(self.unit, 0).repeat(self.unit, 1).ravel()

    def _blocks(self, random: np.random.Generator) -> np.ndarray:
        """Mask random rectangles, which may overlap, until none fits any more; then single patches."""
        height, width = self.grid
        mask = np.zeros(self.grid, dtype=bool)
        least = max(1.0, _LEAST_BLOCK * height * width)
        failed = 0
        while (left := self.count - int(mask.sum())) > 0 and failed < _TRIES:
            area = random.uniform(min(least, left), left)
            ratio = math.exp(random.uniform(math.log(_ASPECT), -math.log(_ASPECT)))
            h, w = max(1, round(math.sqrt(area * ratio))), max(1, round(math.sqrt(area / ratio)))
            failed += 1
            if h > height or w > width:
                continue
            top, start = int(random.integers(height - h + 1)), int(random.integers(width - w + 1))
            block = mask[top : top + h, start : start + w]
            if 0 < block.size - int(block.sum()) <= left:
                block[:] = True
                failed = 0
        flat = mask.ravel()
        flat[random.permutation(np.flatnonzero(~flat))[: self.count - int(flat.sum())]] = True
        return flat


def make_masks(
    grid: tuple[int, int], ratio: float, shape: Literal["random", "block"] = "random", unit: int = 1
) -> Masks:
    """Return masks that hide ``ratio`` of the patches, rounded to whole squares.

    Raises:
        UsageError: no patch or all would be hidden, or the squares do not fill the grid.
    """
    if unit > 1 and shape == "block":
        raise UsageError(f"`--mask-unit` {unit} is for --mask-shape random; leave it out, or give that shape")
    if grid[0] % unit or grid[1] % unit:
        raise UsageError(
            f"`--mask-unit` {unit} does not divide the grid of {grid[0]}×{grid[1]} patches; give a divisor of both"
        )
    squares = grid[0] * grid[1] // unit**2
    count = round(ratio * squares)
    if squares == 1:
        raise UsageError(
            f"`--mask-ratio` {ratio:g}: an image has only one {'square' if unit > 1 else 'patch'}, so none would be "
            "visible; give larger images or smaller patches"
        )
    if not 0 < count < squares:
        what = "nothing" if count == 0 else "everything"
        raise UsageError(
            f"`--mask-ratio` {ratio:g} hides {what} of {squares} {'squares' if unit > 1 else 'patches'}; give "
            f"{1 / squares:.2g} to {(squares - 1) / squares:.2g}, or larger images"
        )
    return Masks(grid, count * unit**2, shape, unit)

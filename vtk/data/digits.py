"""scikit-learn's handwritten digits (1,797 real images of 8×8 px, no download) as folders of PNG files."""

from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from vtk.data.audit.split import split
from vtk.errors import UsageError

Task = Literal["digits", "parity"]


def write_digits(root: Path, task: Task = "digits", *, val_split: float = 0.2, seed: int = 0, limit: int = 0) -> Path:
    """Write ``root/train/CLASS/*.png`` and ``root/val/CLASS/*.png``; return ``root``.

    The same images are held out for both tasks, so that a base trained on one has not seen those of the other.

    Args:
        root: folder to write into.
        task: ``digits`` (classes 0 … 9) or ``parity`` (even, odd).
        val_split: fraction of each digit that goes to ``val/``.
        seed: random seed of the split.
        limit: images per digit, for quick tests; 0: all.

    Raises:
        UsageError: an unknown task.
    """
    from sklearn.datasets import load_digits

    if task not in ("digits", "parity"):
        raise UsageError(f"unknown task {task!r}; give digits or parity")
    bunch = load_digits()
    grey = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # 17 levels, 0…16
    for digit in range(10):
        numbers = np.flatnonzero(bunch.target == digit)[: limit or None].tolist()
        parts = split(numbers, [str(number) for number in numbers], val_split, seed)
        name = str(digit) if task == "digits" else ("even", "odd")[digit % 2]
        for part, members in zip(("train", "val"), parts, strict=True):
            folder = root / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for number in members:
                Image.fromarray(grey[number]).save(folder / f"{digit}_{number:04d}.png")
    return root

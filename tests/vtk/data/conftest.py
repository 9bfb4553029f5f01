import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def picture() -> Callable[..., Path]:
    """Write an image file of random pixels; the size is (height, width)."""

    def write(path: Path, size: tuple[int, int] = (8, 10), seed: int = 0) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        return path

    return write


@pytest.fixture
def tree(tmp_path: Path, picture: Callable[..., Path]) -> Callable[..., Path]:
    """Make a folder from {"train/cat": 3, …}: so many PNG files in each sub-folder."""

    def make(counts: dict[str, int], name: str = "data") -> Path:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                picture(root / folder / f"{i}.png", seed=zlib.crc32(f"{folder}/{i}".encode()))  # no two alike
        return root

    return make

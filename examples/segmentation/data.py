"""A small segmentation set made on the spot: one to three shapes over each other on a busy ground, with their masks."""

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

SIZE = 48
CLASSES = ("ground", "disc", "square", "triangle")
HUES = ("red", "green", "blue")


def draw(rng: random.Random, kinds: list[int], hue: int | None = None) -> tuple[Image.Image, Image.Image]:
    """Return a picture with a shape of each kind (1 to 3), later ones in front, and its mask of class numbers.

    Args:
        rng: of all that is left to chance.
        kinds: of shapes.
        hue: number of the colour that stands out in them; None for one by chance in each.
    """
    low = Image.new("RGB", (6, 6))
    low.putdata([tuple(rng.randint(40, 215) for _ in range(3)) for _ in range(36)])
    picture, mask = low.resize((SIZE, SIZE), Image.Resampling.BICUBIC), Image.new("L", (SIZE, SIZE), 0)
    for kind in kinds:
        r = rng.uniform(8, 14)
        x, y = (rng.uniform(r, SIZE - r) for _ in range(2))
        colour = [rng.randint(0, 110) for _ in range(3)]
        colour[rng.randrange(3) if hue is None else hue] = rng.randint(190, 255)
        for canvas, fill in ((picture, tuple(colour)), (mask, kind)):
            pen = ImageDraw.Draw(canvas)
            if kind == 1:
                pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
            elif kind == 2:
                pen.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill=fill)
            else:
                pen.polygon(((x, y - r), (x - r, y + 0.8 * r), (x + r, y + 0.8 * r)), fill=fill)
    grain = np.random.default_rng(rng.randint(0, 2**32)).normal(0, 12, (SIZE, SIZE, 3))
    return Image.fromarray((np.asarray(picture) + grain).clip(0, 255).astype(np.uint8)), mask


def pairs(count: int, seed: int, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return pictures (count, 3, SIZE, SIZE), normalised, and their class numbers (count, SIZE, SIZE) int64."""
    images, masks = [], []
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        picture, mask = draw(rng, rng.sample((1, 2, 3), rng.randint(1, 3)))
        images.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255)
        masks.append(torch.from_numpy(np.array(mask)).long())
    shape = (1, 3, 1, 1)
    return (torch.stack(images) - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape), torch.stack(masks)


def write_classes(root: Path, count: int, seed: int) -> None:
    """Write two classification tasks as class folders: ``hues`` of one shape, and on which of two ``sides`` it is."""
    for i in range(count):
        rng = random.Random(f"{seed} c {i}")
        hue = i % 3
        picture, mask = draw(rng, [rng.randint(1, 3)], hue)
        column = np.nonzero(np.asarray(mask))[1].mean()
        part = "train" if i // 3 % 5 else "val"
        for task, name in (("hues", HUES[hue]), ("sides", "left" if column < SIZE / 2 else "right")):
            folder = root / task / part / name
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{i}.png")

"""A small segmentation set made on the spot: fields from the air with trees, houses and ponds, and their masks."""

import math
import random
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

SIZE = 32
CLASSES = ("field", "tree", "house", "pond")
THINGS = (1, 2, 3)
CROPS = ("wheat", "meadow", "soil")  # of the field
# a class has a range of colours, and ranges meet: meadows are as green as trees, ponds as dark as slate
_COLOURS = (
    ((180, 160, 90), (105, 150, 70), (150, 115, 95)),
    ((40, 95, 40), (70, 120, 50), (95, 110, 45)),
    ((170, 75, 55), (110, 105, 115), (190, 120, 90)),
    ((60, 95, 140), (75, 120, 120), (55, 70, 100)),
)
_GRAIN = (12, 22, 6, 4)  # crowns are rough, water is smooth


def draw(rng: random.Random, kinds: list[int], crop: int | None = None) -> tuple[Image.Image, Image.Image]:
    """Return a picture with a thing of each kind, later ones in front, and its mask of class numbers.

    Args:
        rng: of all that is left to chance.
        kinds: of things.
        crop: number of what grows on the field; None for one by chance.
    """
    mask = Image.new("L", (SIZE, SIZE), 0)
    colours = np.empty((SIZE, SIZE, 3))
    colours[:] = _colour(rng, 0, crop)
    for kind in kinds:
        shape = Image.new("L", (SIZE, SIZE), 0)
        pen = ImageDraw.Draw(shape)
        r = rng.uniform(5, 9)
        x, y = (rng.uniform(r, SIZE - r) for _ in range(2))
        if kind == 2:
            turn = rng.uniform(0, math.pi / 2)
            corners = (turn + i * math.pi / 2 for i in range(4))
            pen.polygon([(x + 1.1 * r * math.cos(a), y + 1.1 * r * math.sin(a)) for a in corners], fill=1)
        else:
            flat = rng.uniform(0.6, 1.0) if kind == 3 else 1.0
            pen.ellipse((x - r, y - flat * r, x + r, y + flat * r), fill=1)
        inside = np.asarray(shape) > 0
        colours[inside] = _colour(rng, kind)
        mask.paste(kind, (0, 0), Image.fromarray(inside))
    noise = np.random.default_rng(rng.randint(0, 2**32))
    grain = noise.normal(0, 1, (SIZE, SIZE, 1)) * np.array(_GRAIN)[np.asarray(mask)][..., None]
    light = rng.uniform(0.75, 1.2) * np.array([rng.uniform(0.93, 1.07) for _ in range(3)])  # of the hour
    return Image.fromarray(((colours + grain) * light).clip(0, 255).astype(np.uint8)), mask


def _colour(rng: random.Random, kind: int, which: int | None = None) -> np.ndarray:
    which = rng.randrange(3) if which is None else which
    return np.array(_COLOURS[kind][which]) + [rng.gauss(0, 10) for _ in range(3)]


@cache  # all models see the same pictures
def pairs(count: int, seed: int, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return pictures (count, 3, SIZE, SIZE), normalised, and their class numbers (count, SIZE, SIZE) int64."""
    images, masks = [], []
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        picture, mask = draw(rng, rng.sample(THINGS, rng.randint(1, 3)))
        images.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255)
        masks.append(torch.from_numpy(np.array(mask)).long())
    shape = (1, 3, 1, 1)
    return (torch.stack(images) - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape), torch.stack(masks)


def write_classes(root: Path, count: int, seed: int) -> None:
    """Write two classification tasks as class folders: which of the ``things`` there is, and which of the ``crops``."""
    for i in range(count):
        rng = random.Random(f"{seed} c {i}")
        kind, crop = THINGS[i % 3], i // 3 % 3
        picture, _ = draw(rng, [kind], crop)
        part = "train" if i // 9 % 5 else "val"
        for task, name in (("things", CLASSES[kind]), ("crops", CROPS[crop])):
            folder = root / task / part / name
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{i}.png")

"""A small set of pictures with questions, made on the spot: coloured shapes on a 3 × 3 grid."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

CELL = 8
SIZE = 3 * CELL
SHAPES = ("circle", "square", "cross")
COLORS = {"red": (200, 60, 50), "green": (60, 150, 70), "blue": (60, 90, 190)}
ANSWERS = (*COLORS, *SHAPES, "yes", "no", "0", "1", "2", "3")
_TEXTS = ("what color is the", "what shape is the thing", "how many things are there", "is there a")
WORDS = ("[PAD]", "[CLS]", *sorted({*" ".join(_TEXTS).split(), *SHAPES, *COLORS}))
LENGTH = 7  # of the longest question, [CLS] included

KINDS = ("color", "shape", "count", "exists")


@dataclass(frozen=True)
class Questions:
    """Pictures, each with a question about it.

    Attributes:
        images: (n, 3, SIZE, SIZE) fp32 from −1 to 1.
        words: (n, LENGTH) int64, numbers of ``WORDS``; 0 behind the end.
        answers: (n,) int64, numbers of ``ANSWERS``.
        kinds: of the questions.
    """

    images: Tensor
    words: Tensor
    answers: Tensor
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.answers)


def draw(rng: random.Random) -> tuple[Image.Image, list[tuple[str, str]]]:
    """Return a picture and its two or three things, each of another shape or colour: (shape, colour)."""
    things = rng.sample([(shape, color) for shape in SHAPES for color in COLORS], rng.randint(2, 3))
    picture = Image.new("RGB", (SIZE, SIZE), (rng.randint(90, 150),) * 3)
    pen = ImageDraw.Draw(picture)
    for (shape, color), cell in zip(things, rng.sample(range(9), len(things)), strict=True):
        fill = tuple(round(value + rng.gauss(0, 12)) for value in COLORS[color])
        x, y, r = CELL * (cell % 3) + CELL // 2, CELL * (cell // 3) + CELL // 2, 3
        if shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill)
        elif shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill)
        else:
            pen.rectangle((x - r, y - 1, x + r, y + 1), fill)
            pen.rectangle((x - 1, y - r, x + 1, y + r), fill)
    return picture, things


def ask(rng: random.Random, things: Sequence[tuple[str, str]], kind: str) -> tuple[str, str] | None:
    """Return a question and its answer, or None where the things leave the question open."""
    shape, color = rng.choice(things)
    if kind == "color":
        return (f"what color is the {shape}", color) if sum(shape == s for s, _ in things) == 1 else None
    if kind == "shape":
        return (f"what shape is the {color} thing", shape) if sum(color == c for _, c in things) == 1 else None
    if kind == "count":
        word = rng.choice((*SHAPES, *COLORS))
        return f"how many {word} things are there", str(sum(word in thing for thing in things))
    if rng.random() < 0.5:
        return f"is there a {color} {shape}", "yes"
    # of what is not there, its shape or its colour is: only both together give the answer
    near = [(s, c) for s in SHAPES for c in COLORS if (s, c) not in things and (s == shape or c == color)]
    shape, color = rng.choice(near)
    return f"is there a {color} {shape}", "no"


def questions(count: int, seed: int, kinds: Sequence[str] = KINDS) -> Questions:
    """Return a picture with a question for each of ``count`` answers; the same for the same arguments."""
    images, words, answers, asked = [], [], [], []
    number = 0
    while len(answers) < count:
        rng = random.Random(f"{seed} {number}")
        number += 1
        picture, things = draw(rng)
        kind = kinds[len(answers) % len(kinds)]
        pair = ask(rng, things, kind)
        if pair is None:
            continue
        numbers = [WORDS.index(word) for word in ("[CLS]", *pair[0].split())]
        images.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1)
        words.append(torch.tensor(numbers + [0] * (LENGTH - len(numbers))))
        answers.append(ANSWERS.index(pair[1]))
        asked.append(kind)
    return Questions(torch.stack(images), torch.stack(words), torch.tensor(answers), tuple(asked))

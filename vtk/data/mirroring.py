"""Chooses the probability of mirroring training images: 0 for digits, letters, and classes of left and right."""

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vtk.data.audit.result import DataAudit
from vtk.data.decoding.decode import read_image
from vtk.errors import DataError

USUAL = 0.5
"""Probability of mirroring otherwise."""

_SIDES = frozenset("left right leftward rightward leftwards rightwards lefthand righthand clockwise anticlockwise "
                   "counterclockwise ccw".split())  # fmt: skip
# words of other languages, and short ones, mean a side only in pairs
_PAIRS = (
    ("links", "rechts"), ("linke", "rechte"), ("gauche", "droite"), ("izquierda", "derecha"), ("izquierdo", "derecho"),
    ("sinistra", "destra"), ("sinistro", "destro"), ("esquerda", "direita"), ("esquerdo", "direito"),
    ("слева", "справа"), ("налево", "направо"), ("左", "右"), ("l", "r"), ("lt", "rt"), ("lh", "rh"), ("lhs", "rhs"),
    ("os", "od"), ("sx", "dx"), ("izq", "der"),
    ("east", "west"), ("eastbound", "westbound"), ("port", "starboard"), ("cw", "ccw"),
)  # fmt: skip
_NUMBERS = "zero one two three four five six seven eight nine".split()
_OF_NUMBERS = frozenset(("even", "odd", "prime", "composite"))
# words that may accompany a digit or letter in its class name
_BESIDE = frozenset("digit digits number num letter letters char chars character characters glyph class cls sample "
                    "upper lower uppercase lowercase capital small cap".split())  # fmt: skip
_SHARE = 2 / 3  # least share of character classes: a set of letters may have a class of others
_ALPHABET = 8  # more single-letter classes than this are letters, not sides such as L and R
_SAMPLED = 64
_SIDE = 32
_LEVELS = 4.0  # most difference between the channels of a grey JPEG


class Mirroring(NamedTuple):
    """The probability of mirroring training images, and the reason; ``why`` is empty if it was given."""

    probability: float
    why: str


def choose_mirroring(audit: DataAudit, in_chans: int = 3) -> Mirroring:
    """Return the default mirroring of training images.

    It is 0 if class names are left and right, or if most are digits or letters and the images are grey.

    Args:
        audit: classes and training images.
        in_chans: of the model; with one channel all images are grey.
    """
    words = [_words(name) for name in audit.classes]
    characters = _are_characters(words)
    # L and R of an alphabet are letters, alone they are sides
    letters = characters and sum(_is_character(own) for own in words) > _ALPHABET
    if side := _side([own for own in words if not (letters and _is_character(own))]):
        return Mirroring(0.0, f"a class name has {side}")
    if characters and _are_grey(audit, in_chans):
        return Mirroring(0.0, "the classes are digits or letters and the images grey")
    return Mirroring(USUAL, "")


def _words(name: str) -> list[str]:
    """Return the words of a class name, lower case: of turn_left, TurnLeft and turn-left alike."""
    text = unicodedata.normalize("NFKC", name)
    text = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])", " ", text)
    return [word.lower() for word in re.split(r"[\W_]+", text) if word]


def _side(names: Sequence[Sequence[str]]) -> str:
    """Return the first word that means a side; empty if there is none."""
    found = {word: None for words in names for word in words}
    for word in found:
        if word in _SIDES or re.search(r"[左右]", word):
            return word
    # pairs that differ only by the side, such as lefteye and righteye, knee L and knee R
    joined = {"".join(words) for words in names}
    if any("left" in name and name.replace("left", "right") in joined for name in joined):
        return "left and another right"
    whole = {tuple(words) for words in names}
    for one, other in _PAIRS:
        for words in whole:
            if one in words and tuple(other if word == one else word for word in words) in whole:
                return f"{one} and another {other}"
    return ""


def _are_characters(names: Sequence[Sequence[str]]) -> bool:
    count = sum(_is_character(words) for words in names)
    return count >= 2 and count >= _SHARE * len(names)


def _is_character(words: Sequence[str]) -> bool:
    own = [word for word in words if word not in _BESIDE]
    if len(own) == 2 and own[0].isdigit() and own[1] in _NUMBERS:  # 0 - zero, as torchvision calls them
        return int(own[0]) == _NUMBERS.index(own[1])
    return len(own) == 1 and (
        own[0].isdigit() or own[0] in (*_NUMBERS, *_OF_NUMBERS) or (len(own[0]) == 1 and own[0].isalpha())
    )


def _are_grey(audit: DataAudit, in_chans: int) -> bool:
    if in_chans != 3:
        return in_chans in (1, 2)  # luminance, and that with opacity
    samples = audit.train or audit.val
    count = min(_SAMPLED, len(samples))
    seen = grey = 0
    for i in range(count):
        try:
            image = read_image(samples[i * len(samples) // count].path, 3, audit.max_pixels, audit.decoding)
        except DataError:  # deleted since the scan: an error when it is used
            continue
        assert isinstance(image, Image.Image)
        pixels = np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX)).astype(np.float32)
        seen += 1
        grey += bool(np.ptp(pixels, axis=2).mean() <= _LEVELS)
    return seen > 0 and grey >= 0.9 * seen

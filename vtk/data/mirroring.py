"""Decides whether images may be mirrored: of digits, letters, and of left and right, they may not."""

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
"""Probability of mirroring where nothing speaks against it."""

_SIDES = frozenset("left right leftward rightward leftwards rightwards lefthand righthand clockwise anticlockwise "
                   "counterclockwise ccw".split())  # fmt: skip
# words of other languages, and short ones, mean a side only where both are there
_PAIRS = (
    ("links", "rechts"), ("linke", "rechte"), ("gauche", "droite"), ("izquierda", "derecha"), ("izquierdo", "derecho"),
    ("sinistra", "destra"), ("sinistro", "destro"), ("esquerda", "direita"), ("esquerdo", "direito"),
    ("слева", "справа"), ("налево", "направо"), ("左", "右"), ("l", "r"), ("lt", "rt"), ("lh", "rh"), ("lhs", "rhs"),
    ("os", "od"), ("sx", "dx"), ("izq", "der"),
    ("east", "west"), ("eastbound", "westbound"), ("port", "starboard"), ("cw", "ccw"),
)  # fmt: skip
_NUMBERS = "zero one two three four five six seven eight nine".split()
_OF_NUMBERS = frozenset(("even", "odd", "prime", "composite"))
# what may stand beside a digit or a letter in the name of its class
_BESIDE = frozenset("digit digits number num letter letters char chars character characters glyph class cls sample "
                    "upper lower uppercase lowercase capital small cap".split())  # fmt: skip
_SHARE = 2 / 3  # of the classes that must be characters: a set of letters may have a class for what is none
_ALPHABET = 8  # classes called by one letter; as many are no views from left and right, front, back, above, below
_SAMPLED = 64
_SIDE = 32
_LEVELS = 4.0  # by which the channels of a grey JPEG may differ


class Mirroring(NamedTuple):
    """The probability with which training images are mirrored, and why; ``why`` is empty where it was given."""

    probability: float
    why: str


def choose_mirroring(audit: DataAudit, in_chans: int = 3) -> Mirroring:
    """Return whether training images are mirrored where nobody says it.

    They are not where class names are left and right, or where most are digits or letters and the images are grey.

    Args:
        audit: classes, and training images that are looked at.
        in_chans: of the model; of one channel everything is grey.
    """
    words = [_words(name) for name in audit.classes]
    characters = _are_characters(words)
    # L and R of an alphabet are letters, alone they are sides
    letters = characters and sum(_is_character(own) for own in words) > _ALPHABET
    if side := _side([own for own in words if not (letters and _is_character(own))]):
        return Mirroring(0.0, f"a class is called {side}")
    if characters and _are_grey(audit, in_chans):
        return Mirroring(0.0, "the classes are digits or letters and the images grey")
    return Mirroring(USUAL, "")


def _words(name: str) -> list[str]:
    """Return the words of a class name, lower case: of turn_left, TurnLeft and turn-left alike."""
    text = unicodedata.normalize("NFKC", name)
    text = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])", " ", text)
    return [word.lower() for word in re.split(r"[\W_]+", text) if word]


def _side(names: Sequence[Sequence[str]]) -> str:
    """Return the first word that means a side; empty where there is none."""
    found = {word: None for words in names for word in words}
    for word in found:
        if word in _SIDES or re.search(r"[左右]", word):
            return word
    # with a partner that differs by the side alone, such as lefteye and righteye, knee L and knee R
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
        except DataError:  # gone since the scan: it is said where it is used
            continue
        assert isinstance(image, Image.Image)
        pixels = np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX)).astype(np.float32)
        seen += 1
        grey += bool(np.ptp(pixels, axis=2).mean() <= _LEVELS)
    return seen > 0 and grey >= 0.9 * seen

"""Which sets are not mirrored: those where a mirrored image shows another class."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.data.audit.folder_scan import scan
from vtk.data.mirroring import choose_mirroring


def write(root: Path, names: list[str], *, colour: bool = False, mode: str = "L", suffix: str = "png") -> Path:
    rng = np.random.default_rng(0)
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 255, (16, 16, 3 if colour else 1), dtype=np.uint8)
            image = Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (16, 16, 3))))
            image.convert("RGB" if colour else mode).save(root / name / f"{i}.{suffix}")
    return root


SIDES = [
    ["turn_left", "turn_right", "stop"], ["TurnLeft", "straight"], ["left-hand", "right-hand"], ["LEFT", "RIGHT"],
    ["knee L", "knee R"], ["links", "rechts"], ["gauche", "droite"], ["左", "右"], ["clockwise", "counterclockwise"],
    ["arrow east", "arrow west"], ["eye_OD", "eye_OS"], ["lefteye", "righteye"], ["L", "R", "C"],
]  # fmt: skip
CHARACTERS = [
    list("0123456789"), list("ABC"), ["digit_3", "digit_8"], ["three", "eight", "two"], ["upper_a", "lower_b"],
    ["a", "b", "c", "other"], ["00", "01", "17"], ["Sample001", "Sample002"], ["even", "odd"], ["д", "ж"],
    ["0 - zero", "1 - one", "2 - two"], list("ABCDEFGHIJKLMNOPQR"),
]  # fmt: skip
OTHERS = [
    ["cat", "dog"], ["bright", "copyright"], ["leftover", "soup"], ["links golf", "course"], ["1st floor", "attic"],
    ["a", "cat", "dog"], ["L shape", "T shape"], ["one way", "no entry"],
]  # fmt: skip


@pytest.mark.parametrize("names", SIDES, ids=" ".join)
def test_left_and_right_are_not_mirrored_in_any_colour(names: list[str], tmp_path: Path) -> None:
    for colour in (True, False):
        found = choose_mirroring(scan(write(tmp_path / str(colour), names, colour=colour), val_split=0.5))
        assert found.probability == 0 and "a class name has" in found.why


@pytest.mark.parametrize("names", CHARACTERS, ids=" ".join)
def test_characters_are_not_mirrored_where_images_are_grey(names: list[str], tmp_path: Path) -> None:
    grey, rgb = write(tmp_path / "grey", names), write(tmp_path / "rgb", names, mode="RGB", suffix="jpg")
    colour = write(tmp_path / "colour", names, colour=True)
    assert choose_mirroring(scan(grey)).probability == choose_mirroring(scan(rgb)).probability == 0
    assert choose_mirroring(scan(colour)) == (0.5, "")
    assert choose_mirroring(scan(colour), in_chans=1).probability == 0  # the model sees no colour
    assert choose_mirroring(scan(grey, in_chans=2), in_chans=2).probability == 0


@pytest.mark.parametrize("names", OTHERS, ids=" ".join)
def test_other_classes_are_mirrored(names: list[str], tmp_path: Path) -> None:
    assert choose_mirroring(scan(write(tmp_path, names))) == (0.5, "")

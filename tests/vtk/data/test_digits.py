from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from vtk.data import scan, write_digits
from vtk.errors import UsageError


def test_digits_and_parity_hold_out_the_same_images(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", limit=20)
    write_digits(tmp_path / "parity", "parity", limit=20)
    digits, parity = (scan(tmp_path / name, show_progress=False) for name in ("digits", "parity"))
    assert digits.classes == tuple("0123456789") and digits.counts("val") == [4] * 10
    assert parity.classes == ("even", "odd") and parity.counts("train") == [80, 80]
    assert {s.path.name for s in digits.val} == {s.path.name for s in parity.val}
    assert all(int(s.path.name[0]) % 2 == s.label for s in parity.samples)


def test_pixels_are_those_of_scikit_learn(tmp_path: Path) -> None:
    path = next(write_digits(tmp_path, limit=2).rglob("7_*.png"))
    original = load_digits().images[int(path.stem.split("_")[1])]
    np.testing.assert_allclose(np.asarray(Image.open(path)) / 255, original / 16, atol=0.5 / 255)


def test_an_unknown_task(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give digits or parity"):
        write_digits(tmp_path, "letters")

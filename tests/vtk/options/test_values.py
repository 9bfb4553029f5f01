"""Values of options: converted from Python, YAML and a command line, and refused where they do not fit."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from vtk.options.values import coerce, from_words, placeholder

SIZE = int | tuple[int, int] | None


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (float, 1, 1.0),
        (int, 3.0, 3),
        (int, 2**60 + 1, 2**60 + 1),  # no float holds it
        (int, np.int64(5), 5),
        (float, np.float32(0.5), 0.5),
        (bool, np.bool_(True), True),
        (Path, "a/b", Path("a/b")),
        (Path | None, None, None),
        (str, Path("a"), "a"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[float, ...], 3, (3.0,)),
        (tuple[str, ...], "upper", ("upper",)),
        (tuple[Path, ...], ["a", Path("b")], (Path("a"), Path("b"))),
        (SIZE, 48, 48),
        (SIZE, [48, 64], (48, 64)),
        (float | Literal["auto"] | None, "auto", "auto"),
        (float | Literal["auto"] | None, 1, 1.0),
        (int | Literal["auto"], 8, 8),
    ],
)
def test_what_is_meant_is_converted(hint: Any, value: Any, expected: Any) -> None:
    found = coerce(hint, value)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, 2.5, "a whole number"),
        (int, float("inf"), "a whole number"),
        (int, float("nan"), "a whole number"),
        (int, True, "a whole number"),
        (int, "8", "a whole number"),
        (float, "1e-3", "a number"),
        (float, 10**400, "a number"),
        (float, None, "a number"),
        (float, 1j, "a number"),
        (bool, 1, "true or false"),
        (bool, "yes", "true or false"),
        (str, 3, "text"),
        (str, None, "text"),
        (Path, 3, "a path"),
        (Path, "", "a path"),
        (Path, " ", "a path"),
        (Literal["a", "b"], "c", "a or b"),
        (Literal["a", "b"], ["a"], "a or b"),
        (tuple[int, ...], [1, "x"], "a list of whole numbers"),
        (tuple[int, ...], None, "a list of whole numbers"),
        (tuple[int, ...], {"a": 1}, "a list of whole numbers"),
        (tuple[str, str], ["a"], "2 texts"),
        (SIZE, "48", "one side in pixels, or height and width"),
        (SIZE, (1, 2, 3), "one side in pixels, or height and width"),
        (int | Literal["auto"], "many", "a whole number or auto"),
    ],
)
def test_what_does_not_fit_is_refused(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        coerce(hint, value)


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [(float, "1e-3", 1e-3), (int, "8", 8), (int, str(2**60 + 1), 2**60 + 1), (str, 5, "5"), (Path, 2024, Path("2024"))],
)
def test_a_file_may_write_numbers_as_text_and_names_as_numbers(hint: Any, value: Any, expected: Any) -> None:
    assert coerce(hint, value, text=True) == expected


@pytest.mark.parametrize("value", ["many", "1e999", "2.5", "0x10"])
def test_text_that_is_no_whole_number_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="a whole number"):
        coerce(int, value, text=True)


@pytest.mark.parametrize(
    ("hint", "words", "expected"),
    [
        (SIZE, ["48x64"], (48, 64)),
        (SIZE, ["48", "64"], (48, 64)),
        (SIZE, ["None"], None),
        (tuple[int, ...], ["1,2", "4"], (1, 2, 4)),
        (tuple[str, ...], ["betas=[0.9,0.95],eps=1"], ("betas=[0.9,0.95]", "eps=1")),
        (bool | None, ["no"], False),
        (int | Literal["auto"], ["auto"], "auto"),
        (tuple[float, ...] | None, ["None"], None),
    ],
)
def test_words_of_a_command_line(hint: Any, words: list[str], expected: Any) -> None:
    assert from_words(hint, words) == expected


def test_placeholders() -> None:
    hints = (SIZE, tuple[float, ...], Literal["a", "b"], int | Literal["auto"], tuple[str, str] | None, Path | None)
    assert [placeholder(h) for h in hints] == ["PIXELS", "FLOAT,…", "{a,b}", "INT|auto", "TEXT TEXT", "PATH"]

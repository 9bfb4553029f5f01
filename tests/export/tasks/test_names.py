"""What tasks may be called."""

from pathlib import Path

import pytest

from vtk.errors import DataError, UsageError
from vtk_export.tasks.names import named_packs


def test_a_pack_is_called_as_its_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pets" / "task").mkdir(parents=True)
    assert list(named_packs([tmp_path / "pets", tmp_path / "cars" / "task"])) == ["pets", "cars"]
    monkeypatch.chdir(tmp_path / "pets")
    assert list(named_packs(["task"])) == list(named_packs(["."])) == ["pets"]
    assert named_packs(["a.b-C_1=runs/x"]) == {"a.b-C_1": Path("runs/x")}
    assert named_packs({"a": "runs/x", "b": Path("y")}) == {"a": Path("runs/x"), "b": Path("y")}


def test_a_folder_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    assert named_packs([f"x={tmp_path / 'lr=0.1'}"]) == {"x": tmp_path / "lr=0.1"}
    with pytest.raises(UsageError, match=r"'lr=0\.1'"):
        named_packs([tmp_path / "lr=0.1"])


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../up", "a/b", "a\\b", "a b", "a\nb", "a\n", "'a'", '"a"', "a\0b", ".hidden", "-rf", "trailing.",
     "ä", "٣", "tasks", "Gathered", "shared", "nul", "COM1", "con.x", "a:b", "a*", "$(a)", "x" * 65, "x" * 300],
    ids=lambda name: ascii(name)[:20],
)  # fmt: skip
def test_names_that_are_no_good_as_file_names_are_refused(name: str) -> None:
    for given in ({name: "runs/x"}, [f"{name}=runs/x"]):
        with pytest.raises(UsageError) as caught:
            named_packs(given)
        assert "\n" not in str(caught.value)
        assert "NAME=PACK" in str(caught.value)


@pytest.mark.parametrize("second", ["a", "A"])
def test_names_that_clash_are_refused(second: str) -> None:
    with pytest.raises(UsageError, match="are both the task"):
        named_packs(["a=runs/x", f"{second}=runs/y"])


def test_a_pattern_that_nothing_matched_is_no_path_rather_than_a_bad_name(tmp_path: Path) -> None:
    for given in ("*", "*/task", "*.d/x"):
        for name in ("", "pets="):
            with pytest.raises(DataError, match="no such folder"):
                named_packs([f"{name}{tmp_path / given}"])
    (tmp_path / "a*b").mkdir()
    assert named_packs([f"pets={tmp_path / 'a*b'}"]) == {"pets": tmp_path / "a*b"}

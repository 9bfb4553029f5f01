import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vtk.data.audit.split import split
from vtk.data.sources import listing
from vtk.data.sources.image_set import list_images
from vtk.data.sources.layout import list_part
from vtk.errors import DataError, UsageError


def test_names_sort_as_a_person_would() -> None:
    names = ["class10", "class2", "Class1", "zebra", "Ant"]
    assert listing.natural(names) == ["Ant", "Class1", "class2", "class10", "zebra"]


def test_walk_finds_nested_images_and_leaves_junk(tmp_path: Path, picture: Callable[..., Path]) -> None:
    for name in ("a.PNG", "deep/er/b.jpg", ".git/c.png", "__MACOSX/d.png", "._e.png", ".ipynb_checkpoints/f.png"):
        picture(tmp_path / name)
    for name in ("notes.txt", "Thumbs.db", ".DS_Store"):
        (tmp_path / name).write_text("x")
    found = list(listing.walk(tmp_path))
    assert [file.name for file in found] == ["a.PNG", "deep/er/b.jpg"]
    assert found[0].bytes == (tmp_path / "a.PNG").stat().st_size
    assert found[0].mtime_ns == (tmp_path / "a.PNG").stat().st_mtime_ns


def test_links_are_followed_but_not_in_circles(tmp_path: Path, picture: Callable[..., Path]) -> None:
    picture(tmp_path / "real" / "a.png")
    os.symlink(tmp_path / "real", tmp_path / "link")
    os.symlink(tmp_path, tmp_path / "real" / "loop")
    os.symlink(tmp_path / "gone.png", tmp_path / "dangling.png")
    assert [file.name for file in listing.walk(tmp_path)] == ["dangling.png", "link/a.png", "real/a.png"]


def test_list_images(tmp_path: Path, picture: Callable[..., Path]) -> None:
    for name in ("img10.png", "img9.png", "sub/img1.png"):
        picture(tmp_path / name)
    found = [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)]
    assert found == ["img9.png", "img10.png", "sub/img1.png"]
    assert list_images(tmp_path / "img9.png") == [tmp_path / "img9.png"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no images"):
        list_images(tmp_path / "empty")
    with pytest.raises(DataError, match="does not exist"):
        list_images(tmp_path / "absent")


@pytest.mark.parametrize(
    ("n", "fraction", "held_out"), [(10, 0.2, 2), (1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (7, 0.0, 0), (5, 0.5, 3)]
)
def test_split_counts(n: int, fraction: float, held_out: int) -> None:
    names = [f"{i}.png" for i in range(n)]
    train, val = split(names, names, fraction, 0)
    assert len(val) == held_out and sorted(train + val) == sorted(names)


def test_split_depends_on_seed_and_names_only() -> None:
    names = [f"cat/{i}.png" for i in range(200)]
    _, val = split(names, names, 0.25, 0)
    _, shuffled = split(names[::-1], names[::-1], 0.25, 0)
    assert set(val) == set(shuffled)
    _, other = split(names, names, 0.25, 1)
    assert len(set(val) & set(other)) < 25  # 12.5 expected by chance
    grown = [*names, *(f"cat/new{i}.png" for i in range(4))]
    _, after = split(grown, grown, 0.25, 0)
    assert len(set(after) - set(val)) <= 4
    with pytest.raises(UsageError, match="held-out fraction is 1"):
        split(names, names, 1, 0)


def test_a_link_to_itself_is_passed_by(tmp_path: Path, picture: Callable[..., Path]) -> None:
    picture(tmp_path / "a" / "0.png")
    for name in ("a/loop", "loop", "loop.png"):
        os.symlink(Path(name).name, tmp_path / name)
    assert listing.folders(tmp_path) == ["a"]
    assert listing.loose_images(tmp_path) == 0
    # one that is called an image is an image that cannot be read, so that the audit names it
    assert [file.name for file in listing.walk(tmp_path)] == ["a/0.png", "loop.png"]


def test_a_class_folder_whose_name_is_no_text_is_refused(tmp_path: Path, picture: Callable[..., Path]) -> None:
    name = os.fsdecode(b"caf\xe9")
    picture(tmp_path / name / "0.png")
    picture(tmp_path / "café" / "0.png")
    with pytest.raises(DataError, match=r"not UTF-8 text \('caf\\udce9'\); rename it") as caught:
        list_part(tmp_path, tmp_path)
    str(caught.value).encode()  # the message itself can be printed

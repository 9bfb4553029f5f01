"""The audit accounts for every file of a folder: used, unreadable, or left out for a reason that is said."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vtk.__main__ import main
from vtk.data import scan
from vtk.data.audit.multilabel_scan import scan_multi
from vtk.data.audit.page import page
from vtk.data.decoding.thin_images import NOMINAL
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.images import read_images

Tree = Callable[..., Path]
OTHERS = {"a.tga": 2, "b.jxl": 1, "c.dcm": 1, "d.npy": 1, "e.txt": 3, "f.zip": 1, "nothing": 1}


def quiet(root: Path, **options: object) -> object:
    return scan(root, show_progress=False, workers=0, **options)


def strew(folder: Path) -> None:
    """Put files of all kinds into a folder: 10 that are not called images, 5 hidden ones."""
    for name, count in OTHERS.items():
        for i in range(count):
            (folder / f"{i}{name}").write_bytes(b"1234")
    (folder / ".hidden.png").write_bytes(b"1")
    (folder / "Thumbs.db").write_bytes(b"1")
    for sub in (".git/objects", "__MACOSX"):
        (folder / sub).mkdir(parents=True)
        (folder / sub / "x.png").write_bytes(b"1")
    (folder / ".git/config").write_bytes(b"1")


def files_of(root: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(root, followlinks=True))


@pytest.mark.parametrize("layout", ["split", "val empty", "flat", "train only"])
def test_used_and_left_out_add_up_to_every_file(tree: Tree, layout: str) -> None:
    counts = {
        "split": {"train/a": 3, "train/b/deep": 2, "val/a": 1, "val/b": 1, "extra/x": 4, "test/a": 2},
        "val empty": {"train/a": 3, "train/b": 3, "val/a": 0, "extra": 2},
        "flat": {"a": 4, "b/deep/er": 3, "empty": 0},
        "train only": {"train/a": 3, "train/b": 3, "extra": 1},
    }[layout]
    root = tree(counts)
    train = root / "train" if "train/a" in counts else root
    for folder in (train / "a", train / "b", root):
        strew(folder)
    strew(train) if train != root else None
    (train / "a/broken.png").write_bytes(b"no image")
    os.symlink(root / "nowhere.png", train / "b/dangling.png")
    os.mkfifo(train / "b/pipe.png")
    shutil.copy(train / "a/0.png", train / "loose.png")
    shutil.copy(train / "a/1.png", train / "a/picture")
    audit = quiet(root)
    left = audit.left
    assert audit.seen == files_of(root) == len(audit.samples) + len(audit.bad) + left.total
    assert len(audit.bad) == 2 and left.special == (f"{(train / 'b').relative_to(root).as_posix()}/pipe.png",)
    places = 4 if train != root else 3
    assert left.hidden == 5 * places and left.loose == 1 and sum(left.suffixes.values()) == 10 * places + 1
    assert left.suffixes[".tga"] == 2 * places and left.suffixes["no suffix"] == places + 1
    assert sum(left.unused.values()) == {"split": 6, "val empty": 2, "flat": 0, "train only": 1}[layout]
    assert sum(left.reasons().values()) == left.total
    told = audit.to_dict()["files"]
    assert told["seen"] == told["used"] + told["bad"] + told["left_out"]["total"]
    assert audit.account().startswith(f"files: {audit.seen} = {len(audit.samples)} used")


def test_other_readers_account_for_every_file_too(tree: Tree) -> None:
    root = tree({"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 1, "extra": 2})
    for folder in (root, root / "train", root / "train/b"):
        strew(folder)
    shutil.copy(root / "train/a/0.png", root / "train/b/same.png")
    shutil.copy(root / "train/a/0.png", root / "train/a/same.png")
    multi = scan_multi(root, show_progress=False, workers=0)
    assert multi.left.merged == 1  # train/a/same.png is train/b/same.png, and has both labels
    found = read_images(PretrainConfig(data=root), NOMINAL, labelled=False, show_progress=False)
    for audit in (multi, found, quiet(root)):
        assert audit.seen == files_of(root)
    shutil.rmtree(root / "val")
    found = read_images(PretrainConfig(data=root), NOMINAL, labelled=False, show_progress=False)
    assert found.seen == files_of(root) and len(found.samples) == 3 + 3 + 2 + 2


@pytest.mark.parametrize("name", ["x", "x.jpg_large", "x.jpg?w=300", "x.image", "x.dat", "x.txt"])
def test_images_under_another_name_are_found_by_content_and_not_used(tree: Tree, name: str) -> None:
    root = tree({"a": 3, "b": 3})
    shutil.copy(root / "a/0.png", root / "a" / name)
    audit = quiet(root)
    assert len(audit.samples) == 6 and audit.left.pictures == {f"a/{name}": "PNG"}
    (warning,) = audit.warnings
    assert f"for example a/{name} (PNG)" in warning and warning.startswith("1 file is unused although")


def test_text_that_starts_like_an_image_is_none(tree: Tree) -> None:
    root = tree({"a": 2, "b": 2})
    (root / "a/x").write_bytes(b"BMW and GIF8")
    (root / "a/y").write_bytes(b"\xff\xd8\xff nothing more")
    audit = quiet(root)
    assert audit.left.pictures == {} and audit.notes[-1] == "unused, without an image suffix: no suffix 2"


def test_many_files_of_a_suffix_are_looked_at_only_if_some_are_images(tree: Tree) -> None:
    root = tree({"a": 2, "b": 2})
    for i in range(50):
        (root / f"a/{i:03}.txt").write_text("a label")
        shutil.copy(root / "a/0.png", root / f"b/{i:03}.jpg_large")
    audit = quiet(root)
    assert len(audit.left.pictures) == 50 and audit.left.suffixes == {".txt": 50, ".jpg_large": 50}


def test_what_cannot_be_read_is_a_warning_and_what_is_no_image_a_note(tree: Tree) -> None:
    root = tree({"a": 2, "b": 2})
    strew(root / "a")
    audit = quiet(root)
    unread = "images of unsupported formats: .tga 2, .jxl 1, .dcm 1, .npy 1; convert them to PNG or TIFF"
    assert audit.warnings == (unread,)
    assert audit.notes[1:] == (
        "unused, without an image suffix: .txt 3, .zip 1, no suffix 1", "archives are not read: .zip 1",
    )  # fmt: skip


def test_a_clean_folder_says_nothing(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree({"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1})
    audit = quiet(root)
    assert audit.left.total == 0 and audit.notes == audit.warnings == () and audit.seen == 6
    audit.print()
    assert "files:" not in capsys.readouterr().out


def test_the_page_and_the_command_list_what_is_left_out(
    tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree({"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1, "extra <x>": 2})
    strew(root / "train/a")
    text = page(quiet(root))
    for says in ("0a.tga", ".txt: 3, no image suffix", "extra &lt;x&gt;/ (2 files)", "23 = 6 used"):
        assert says in text, says
    assert main(["data", "audit", str(root), "--out", str(tmp_path / "a.html")]) == 0
    assert (
        "files: 23 = 6 used + 10 without an image suffix + 2 in unused folders + 5 hidden or system files"
        in capsys.readouterr().out.replace("\n", " ")
    )

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.data import Sample, scan
from vtk.data.probing import cache as memory
from vtk.errors import DataError, UsageError

Tree = Callable[..., Path]


def quiet(root: Path, **options: object) -> object:
    return scan(root, show_progress=False, **options)


def test_train_and_val_folders(tree: Tree) -> None:
    root = tree({"train/class10": 2, "train/class2": 3, "val/class2": 1, "val/class10": 2})
    audit = quiet(root)
    assert (audit.layout, audit.classes) == ("split", ("class2", "class10"))
    assert audit.train[0] == Sample(root / "train/class2/0.png", 0)
    assert Counter(s.label for s in audit.train) == {0: 3, 1: 2} and audit.counts("val") == [1, 2]
    assert all(s.path.parent.name == audit.classes[s.label] for s in audit.samples)
    assert audit.notes == () and audit.bad == ()


@pytest.mark.parametrize("name", ["val", "validation", "valid", "test", "Val"])
def test_every_name_of_the_held_out_folder(tree: Tree, name: str) -> None:
    audit = quiet(tree({"train/a": 1, "train/b": 1, f"{name}/a": 1}))
    assert audit.layout == "split" and len(audit.val) == 1
    assert audit.notes == ("classes without held-out images: b",)


def test_val_wins_over_test_and_that_is_said(tree: Tree) -> None:
    audit = quiet(tree({"train/a": 1, "train/b": 1, "val/a": 1, "val/b": 1, "test/a": 2, "extra/x": 1}))
    assert len(audit.val) == 2
    assert audit.notes == ("unused folders: extra/, test/ beside train/, val/",)


def test_flat_folders_are_split_class_by_class(tree: Tree) -> None:
    root = tree({"a": 10, "b": 5, "c": 1})
    audit = quiet(root, val_split=0.2, seed=3)
    assert (audit.layout, audit.classes) == ("flat", ("a", "b", "c"))
    assert audit.counts("train") == [8, 4, 1] and audit.counts("val") == [2, 1, 0]
    assert "--val-split 0.2, seed 3" in audit.notes[0]
    assert len(set(audit.samples)) == 16
    assert quiet(root, val_split=0.2, seed=3).val == audit.val
    assert quiet(root, val_split=0.2, seed=4).val != audit.val
    assert quiet(root, val_split=0).val == ()


def test_train_without_val_is_split_not_taken_for_a_class(tree: Tree) -> None:
    root = tree({"train/a": 10, "train/b": 10})
    audit = quiet(root)
    assert (audit.layout, audit.classes, audit.counts("val")) == ("flat", ("a", "b"), [2, 2])
    inside = quiet(root / "train")
    assert inside.val == audit.val  # the same images, whichever folder is named


def test_a_class_of_trains(tree: Tree) -> None:
    assert quiet(tree({"train": 3, "bus": 3})).classes == ("bus", "train")


def test_hidden_and_junk_folders_and_nested_files(tree: Tree) -> None:
    root = tree({"a/x": 2, "a/y/z": 1, "b": 3, ".git": 1, "__MACOSX/a": 1, "b/.ipynb_checkpoints": 2, "docs": 0})
    (root / "a" / ".DS_Store").write_text("x")
    (root / "b" / "._0.png").write_text("x")
    audit = quiet(root, val_split=0)
    assert audit.classes == ("a", "b") and audit.counts("train") == [3, 3] and not audit.bad
    assert audit.warnings[0].startswith("docs/ in data/ has no image files")


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({}, "is empty; expected train/ and val/"),
        ({".": 2}, "has 2 images but no folders"),
        ({"docs": 0, "more": 0}, "no image files"),
        ({"train": 2, "val": 2}, "has no class folders"),
        ({"val/a": 1, "val/b": 1}, "has val/ but no train/"),
        ({"dataset/train/a": 2}, "contains only dataset/"),
        ({"a": 2}, "only one class"),
        ({"train/a": 1, "train/b": 1, "val/a": 1, "val/c": 1, "val/d": 1}, "train: c, d;"),
    ],
)
def test_layouts_that_cannot_be_used(tree: Tree, counts: dict[str, int], says: str) -> None:
    with pytest.raises(DataError, match=says) as error:
        quiet(tree(counts))
    assert "\n" not in str(error.value)


def test_wrong_arguments(tmp_path: Path, picture: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="does not exist"):
        quiet(tmp_path / "absent")
    with pytest.raises(DataError, match="is a file"):
        quiet(picture(tmp_path / "a.png"))
    with pytest.raises(UsageError, match="--val-split"):
        quiet(tmp_path, val_split=1.0)


def test_known_classes_keep_their_order(tree: Tree) -> None:
    root = tree({"val/b": 1, "val/a": 2})
    audit = quiet(root, classes=["b", "x", "a"])
    assert audit.classes == ("b", "x", "a") and audit.counts("val") == [1, 0, 2] and audit.train == ()
    flat = quiet(root / "val", classes=["b", "x", "a"], val_split=0)
    assert flat.counts("train") == [1, 0, 2]
    with pytest.raises(DataError, match=r"not classes of the model: a; its classes are b, x"):
        quiet(root, classes=["b", "x"])


def test_bad_files_are_named_skipped_and_counted(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree({"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 1})
    (root / "train/a/empty.jpg").write_bytes(b"")
    (root / "val/b/0.png").write_bytes((root / "val/b/0.png").read_bytes()[:90])
    audit = quiet(root)
    assert {bad.path.name: bad.reason for bad in audit.bad}.keys() == {"empty.jpg", "0.png"}
    assert audit.counts("train") == [3, 3] and audit.counts("val") == [1, 0]
    audit.print()
    out = capsys.readouterr().out
    assert "empty.jpg: the file is empty" in out and "2 unreadable files skipped" in out
    value = json.loads(json.dumps(audit.to_dict()))
    assert value["train"] == {"count": 6, "per_class": [3, 3]} and len(value["bad"]) == 2


def test_a_class_whose_images_are_all_bad_is_refused(tree: Tree) -> None:
    root = tree({"a": 2, "b": 1})
    (root / "b/0.png").write_bytes(b"nothing")
    says = r"no image of the class b can be read \(1 files, for example b/0.png: not an image.*\); repair"
    with pytest.raises(DataError, match=says):
        quiet(root)


def test_statistics(tmp_path: Path) -> None:
    for i, (height, width) in enumerate([(10, 20), (30, 40), (50, 7)]):
        for name in ("a", "b"):
            (tmp_path / name).mkdir(exist_ok=True)
            image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
            exif = Image.Exif()
            exif[0x0112] = 6 if i == 0 else 1
            (image.convert("L") if i == 2 else image).save(tmp_path / name / f"{i}.jpg", exif=exif)
    audit = quiet(tmp_path)
    assert audit.sizes == {  # the first one stands upright as 20×10
        "min_height": 20, "median_height": 30, "max_height": 50, "min_width": 7, "median_width": 10, "max_width": 40,
    }  # fmt: skip
    assert audit.modes == {"RGB": 4, "L": 2} and audit.exif_rotated == 2


def test_many_classes_print_a_short_table(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(tree({f"c{i}": 1 + 2 * (i == 40) for i in range(60)})).print()
    out = capsys.readouterr().out
    assert "36 more" in out and len(out.splitlines()) < 40 and "c40" in out


def test_a_second_scan_decodes_only_what_changed(tree: Tree, vtk_home: Path) -> None:
    root = tree({"a": 4, "b": 4})
    (root / "b/bad.png").write_bytes(b"x")
    first = quiet(root)
    again = quiet(root)
    assert (first.cached, again.cached) == (0, 8)  # the bad one is tried again
    assert again.to_dict() | {"seconds": 0, "cached": 0} == first.to_dict() | {"seconds": 0}
    info = (root / "a/0.png").stat()
    os.utime(root / "a/0.png", ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    (root / "a/1.png").write_bytes((root / "a/1.png").read_bytes()[:80])
    third = quiet(root)
    assert third.cached == 6 and {bad.path.name for bad in third.bad} == {"bad.png", "1.png"}
    assert memory.cache_path(root).parent == vtk_home / "scan"
    assert quiet(root, cache=False).cached == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format":1,"pillow":"?","files":{}}'])
def test_a_damaged_memory_is_ignored(tree: Tree, content: str) -> None:
    root = tree({"a": 2, "b": 2})
    quiet(root)
    memory.cache_path(root).write_text(content)
    assert quiet(root).cached == 0
    assert quiet(root).cached == 4


def test_a_home_that_cannot_be_written_only_warns(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree({"a": 1, "b": 1})
    (root / "file").write_text("x")
    monkeypatch.setenv("VTK_HOME", str(root / "file"))
    assert len(quiet(root).samples) == 2
    assert "scan cannot be cached" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="file names of arbitrary bytes")
def test_names_that_are_not_unicode(tree: Tree) -> None:
    root = tree({"a": 1, "b": 1})
    os.rename(root / "a/0.png", os.fsencode(root / "a") + b"/\xff\xe9.png")
    assert len(quiet(root, workers=1).samples) == 2
    assert quiet(root).cached == 2


def test_scanning_does_not_import_torch(tree: Tree) -> None:
    root = str(tree({"a": 1, "b": 1}))
    code = (
        f"import sys, pathlib; from vtk.data import scan; scan(pathlib.Path({root!r})); print('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split()[-1] == "False", done.stderr


@pytest.mark.assets
def test_real_photographs(assets: Path) -> None:
    audit = quiet(assets / "cifar10-mini")
    assert len(audit.classes) == 10 and len(audit.train) == 3000 and len(audit.val) == 1000 and not audit.bad
    assert audit.sizes["max_height"] == 32

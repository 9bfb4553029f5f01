"""Sets whose images have any number of labels: tables and folders, and how they are divided."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.data.audit.multilabel_scan import scan_multi
from vtk.errors import DataError


def picture(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(path)


def read(root: Path, **options: object) -> dict[str, tuple[str, str]]:
    """Return the part and labels of every image, by path below the root."""
    audit = scan_multi(root, show_progress=False, cache=False, workers=0, **options)  # type: ignore[arg-type]
    base = root if root.is_dir() else root.parent
    return {
        sample.path.relative_to(base).as_posix(): (part, "".join(np.asarray(audit.classes)[sample.label > 0]))
        for part in ("train", "val")
        for sample in getattr(audit, part)
    }


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for i in range(5):
        picture(tmp_path / f"{i}.png", 40 * i)
    return tmp_path


@pytest.mark.parametrize("head", ["path,labels,split\n", "", "\ufeffImage,tags,part\n"])
def test_a_table_with_parts(images: Path, head: str) -> None:
    text = head + "0.png,b;a,train\n1.png,,train\n2.png, c ; a ,TRAIN\n\n3.png,b,val\n0.png,c,train\n"
    (images / "labels.csv").write_text(text, encoding="utf-8")
    expected = {"0.png": ("train", "abc"), "1.png": ("train", ""), "2.png": ("train", "ac"), "3.png": ("val", "b")}
    assert read(images / "labels.csv") == read(images) == expected


def test_files_that_are_not_there_are_bad_ones(images: Path) -> None:
    (images / "t.csv").write_text("0.png,a\n1.png,a;b\nnone.png,b\n2.png,b\n")
    audit = scan_multi(images / "t.csv", show_progress=False, cache=False, workers=0)
    assert [bad.path.name for bad in audit.bad] == ["none.png"] and len(audit.samples) == 3
    with pytest.raises(DataError, match="1 of 4 image files cannot be read"):
        scan_multi(images / "t.csv", on_bad_image="fail", show_progress=False, cache=False, workers=0)


@pytest.mark.parametrize("line", ["0.png", "0.png,a,b,c", "0.png,a,sometimes", ",a"])
def test_a_line_of_another_form_is_named(images: Path, line: str) -> None:
    (images / "t.csv").write_text(f"1.png,a\n{line}\n")
    with pytest.raises(DataError, match=r"line 2 is .*; write path,label1;label2"):
        read(images / "t.csv")


def test_folders_name_labels_at_any_depth_and_copies_are_one_image(tmp_path: Path) -> None:
    root = tmp_path / "set"
    picture(root / "train/beach/dog/1.png", 10)
    picture(root / "train/beach/2.png", 20)
    picture(root / "train/dog/3.png", 30)
    picture(root / "train/4.png", 40)
    shutil.copy(root / "train/dog/3.png", root / "train/beach/3.png")
    picture(root / "train/cat/2.png", 21)  # of the same name and size, but another picture
    picture(root / "val/cat/5.png", 50)
    found = read(root)
    assert found == {
        "train/beach/2.png": ("train", "beach"), "train/beach/3.png": ("train", "beachdog"),
        "train/beach/dog/1.png": ("train", "beachdog"), "train/cat/2.png": ("train", "cat"),
        "train/4.png": ("train", ""), "val/cat/5.png": ("val", "cat"),
    }  # fmt: skip


def test_every_label_is_divided_and_the_seed_says_how(tmp_path: Path) -> None:
    lines = []
    for i in range(60):
        picture(tmp_path / f"{i}.png", i)
        labels = ["all"] * (i < 50) + ["half"] * (i % 2) + ["rare"] * (i in (7, 8))
        lines.append(f"{i}.png,{';'.join(labels)}\n")
    (tmp_path / "labels.csv").write_text("".join(lines))
    parts = [read(tmp_path, val_split=0.2, seed=seed) for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]
    for label, count in (("all", 50), ("half", 30), ("rare", 2)):
        held = sum(part == "val" and label in labels for part, labels in parts[0].values())
        assert abs(held - 0.2 * count) <= (1 if count == 2 else 3), label
    audit = scan_multi(tmp_path, show_progress=False, cache=False, workers=0)
    assert sum(audit.counts("train")) + sum(audit.counts("val")) == 50 + 30 + 2
    assert audit.to_dict()["train"]["per_class"] == audit.counts("train")


def test_labels_that_a_model_does_not_know_are_refused(images: Path) -> None:
    (images / "t.csv").write_text("0.png,a\n1.png,b\n")
    assert scan_multi(images / "t.csv", classes=("b", "a", "z"), show_progress=False, cache=False).classes[2] == "z"
    with pytest.raises(DataError, match="labels that are not labels of the model: b"):
        scan_multi(images / "t.csv", classes=("a",), show_progress=False, cache=False)
    (images / "u.csv").write_text("0.png,\n")
    with pytest.raises(DataError, match="has no labels"):
        scan_multi(images / "u.csv", show_progress=False, cache=False)

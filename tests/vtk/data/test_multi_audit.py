"""``vtk data audit --multi-label``, and sets of several labels that nobody cleaned."""

import base64
import json
import os
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.__main__ import main
from vtk.data.audit.multilabel_scan import MultiAudit, scan_multi
from vtk.data.audit.page import page
from vtk.errors import DataError, UsageError


def picture(path: Path, value: int, mode: str = "RGB", size: tuple[int, int] = (40, 40)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (value,) * len(mode) if len(mode) > 1 else value).save(path)


def look(root: Path, **options: object) -> MultiAudit:
    return scan_multi(root, show_progress=False, cache=False, workers=0, **options)  # type: ignore[arg-type]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six images, of which one has opacity, one is thin and one is text; the label `rare` is on the last alone."""
    root = tmp_path / "scenes"
    for i in range(4):
        picture(root / f"{i}.png", 40 * i)
    picture(root / "glass.png", 90, "RGBA")
    picture(root / "thin.png", 90, size=(200, 20))
    (root / "text.jpg").write_text("no image")
    lines = ["0.png,dog;beach", "1.png,dog", "2.png,beach", "3.png,", "glass.png,dog;beach", "thin.png,beach"]
    (root / "labels.csv").write_text("\n".join([*lines, "text.jpg,rare", "gone.jpg,dog", ""]))
    return root / "labels.csv"


def test_the_command_shows_odd_images_with_their_labels(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    argv = ["data", "audit", str(table), "--out", str(out), "--workers", "0", "--no-cache"]
    assert main(argv) == 3 and "'dog;beach' looks like several labels; give --multi-label" in capsys.readouterr().err
    argv.append("--multi-label")
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["classes"] == ["beach", "dog", "rare"] and len(told["bad"]) == 2
    parts = np.add(told["train"]["per_class"], told["val"]["per_class"])
    assert list(parts) == [4, 3, 0] and told["train"]["count"] + told["val"]["count"] == 6
    odd = {each["kind"]: [(e["name"], e["of_class"]) for e in each["examples"]] for each in told["odd"]}
    assert odd["transparent"] == [("glass.png", "beach; dog")] and odd["long"] == [("thin.png", "beach")]
    assert sorted(odd["bad"]) == [("gone.jpg", "dog"), ("text.jpg", "rare")]
    assert told["warnings"] == ["no training image has label rare"] and told["seconds"] > 0
    text = out.read_text("utf-8")
    assert "<h2>Labels</h2>" in text and "<th>label</th>" in text and "no training image has label rare" in text
    shown = re.findall(r"base64,([^\"]+)", text)
    assert len(shown) == 3 and all(base64.b64decode(data)[:2] == b"\xff\xd8" for data in shown)  # thin is small, too
    assert main(argv) == 0
    said = capsys.readouterr()
    assert (
        re.search(r"label +train +held out", said.out) and "3 labels" in said.out and "warning: no training" in said.err
    )
    assert main([*argv, "--on-bad-image", "fail"]) == 3 and "2 files of" in capsys.readouterr().err
    assert main([*argv, "--keep-empty-classes"]) == 2


def test_folders_have_a_page_as_well(tmp_path: Path) -> None:
    picture(tmp_path / "set/train/beach/dog/1.png", 10, "RGBA")
    picture(tmp_path / "set/train/beach/2.png", 10)
    picture(tmp_path / "set/val/cat/3.png", 20)
    audit = look(tmp_path / "set")
    assert audit.odd[0].examples[0][:2] == ("train/beach/dog/1.png", "beach; dog")
    assert audit.warnings == ("no training image has label cat",)
    assert "no held-out image has labels beach, dog" in audit.notes
    assert page(audit).count("data:image/jpeg;base64,") == sum(len(kind.examples) for kind in audit.odd)


def test_one_image_is_in_one_part_whatever_its_spelling(table: Path) -> None:
    table.write_text("0.png,a,train\n./0.png,b\n1.png,a,val\n2.png,b\n")
    audit = look(table)
    assert [s.path.name for s in audit.train] == ["0.png", "2.png"] and list(audit.train[0].label) == [1, 1]  # type: ignore[call-overload]
    assert "images of labels.csv without a part, used as train: 1" in audit.notes
    table.write_text("0.png,a,train\n0.png,b,val\n")
    with pytest.raises(DataError, match=r"line 2 puts 0.png into val, but an earlier line does not"):
        look(table)


def test_two_spellings_of_one_letter_are_one_label(table: Path) -> None:
    one, two = (unicodedata.normalize(form, "Café") for form in ("NFC", "NFD"))
    table.write_text(f"0.png,{one}\n1.png,{two};b\n", encoding="utf-8")
    assert look(table).classes == ("b", one)
    picture(table.parent / "f" / two / "9.png", 3)
    picture(table.parent / "f" / one / "8.png", 4)
    assert look(table.parent / "f").classes == (one,)


def test_pipes_and_names_that_cannot_be_are_bad_files(table: Path) -> None:
    os.mkfifo(table.parent / "pipe.png")
    long = "x" * 5000 + ".png"
    table.write_text(f"0.png,a\npipe.png,a\n.,a\n{long},b\n1.png,b\n")
    audit = look(table)
    reasons = {bad.path.name: bad.reason for bad in audit.bad}
    assert reasons["pipe.png"] == "not a regular file" and len(reasons) == 3 and len(audit.samples) == 2
    table.write_bytes(b"0.png,a\na\0b.png,a\n")
    with pytest.raises(DataError, match=r"line 2|cannot read"):
        look(table)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("val/dog/1.png", "cat/2.png"), "has val/ but no train/"),
        (("set/train/dog/1.png", "set/val/dog/2.png"), "contains only set/, which contains train/; give"),
    ],
)
def test_parts_never_become_labels(tmp_path: Path, files: tuple[str, ...], says: str) -> None:
    for i, name in enumerate(files):
        picture(tmp_path / "root" / name, i)
    with pytest.raises(DataError, match=says):
        look(tmp_path / "root")


def test_parts_inside_of_labels_are_warned_of_and_an_empty_part_is_none(tmp_path: Path) -> None:
    for i, name in enumerate(("dog/train/1.png", "dog/val/2.png", "cat/3.png")):
        picture(tmp_path / "inside" / name, i)
    assert "folders named train, val are inside" in look(tmp_path / "inside").warnings[0]
    for i in range(6):
        picture(tmp_path / "empty/train/dog" / f"{i}.png", i)
    (tmp_path / "empty/val/dog").mkdir(parents=True)
    audit = look(tmp_path / "empty")
    assert audit.layout == "flat" and len(audit.val) == 1 and "val/ in" in audit.warnings[0]


def test_sets_by_name_have_one_label() -> None:
    with pytest.raises(UsageError, match="leave out --multi-label"):
        look(Path("torch/cifar10"))


def test_tables_from_elsewhere(table: Path) -> None:
    picture(table.parent / "dogs/5.png", 7)
    table.write_text("dogs\\5.png,a\n.\\1.png,b\n2.png,b\n")
    assert {s.path.name for s in look(table).samples} == {"5.png", "1.png", "2.png"}
    table.write_text("0.png,é\n", encoding="utf-16")
    with pytest.raises(DataError, match=r"labels.csv is not UTF-8 text \(byte 0\); save the table as UTF-8"):
        look(table)


def test_a_table_without_one_of_the_parts(table: Path) -> None:
    table.write_text("0.png,a,train\n1.png,a,train\n2.png,b,train\n3.png,b,train\n")
    audit = look(table)
    assert audit.layout == "flat" and len(audit.val) == 2
    assert "labels.csv has no val images: a part of train is held out" in audit.notes
    table.write_text("0.png,a,val\n1.png,b,val\n")
    with pytest.raises(DataError, match="all 2 images are held out; put some into train"):
        look(table)
    assert len(look(table, classes=("a", "b")).val) == 2  # as an evaluation reads it

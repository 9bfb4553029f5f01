"""Tables of labels: which columns are what, what separates them, and what is refused with the line quoted."""

import builtins
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.__main__ import main
from vtk.data import list_images, scan
from vtk.data.audit.multilabel_scan import scan_multi
from vtk.data.audit.page import page
from vtk.errors import DataError, UnavailableError, UsageError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write twelve images, i.png and deep/i.png, and a table of the text."""
    for i in range(6):
        for folder in ("", "deep"):
            (tmp_path / folder).mkdir(exist_ok=True)
            pixels = np.random.default_rng(len(folder) * 10 + i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{i}.png")

    def table(text: str, name: str = "t.csv") -> Path:
        (tmp_path / name).write_bytes(text.encode("utf-8"))
        return tmp_path / name

    return table


def single(table: Path, **options: object) -> object:
    return scan(table, show_progress=False, cache=False, workers=0, **options)


def multi(table: Path, **options: object) -> object:
    return scan_multi(table, show_progress=False, cache=False, workers=0, **options)


def told(audit: object) -> dict[str, tuple[str, str]]:
    """Return part and labels of every image, by path below the table's folder."""
    names = np.asarray(audit.classes)
    return {
        os.path.relpath(s.path, audit.folder).replace(os.sep, "/"): (part, "+".join(np.atleast_1d(
            names[s.label] if np.isscalar(s.label) else names[s.label > 0])))
        for part in ("train", "val") for s in getattr(audit, part)
    }  # fmt: skip


LINES = ("0.png,cat,train", "1.png,dog,train", "deep/0.png,cat,val", "2.png,cat,train")
EXPECTED = {
    "0.png": ("train", "cat"), "1.png": ("train", "dog"), "deep/0.png": ("val", "cat"), "2.png": ("train", "cat"),
}  # fmt: skip


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("head", ["", "path,label,split", "Image,Class,Subset", "file name,category,PART"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_a_table_of_one_label_an_image(write: Write, separator: str, head: str, end: str, bom: str) -> None:
    lines = [line.replace(",", separator) for line in (*filter(None, [head]), *LINES)]
    lines.insert(2, "")  # a blank line
    name = "t.tsv" if separator == "\t" else "t.csv"
    audit = single(write(bom + end.join(lines) + end, name))
    assert told(audit) == EXPECTED and audit.classes == ("cat", "dog") and audit.layout == "split"
    assert audit.seen == 4 and audit.warnings == ()


@pytest.mark.parametrize(
    "text",
    [
        "split,label,path\ntrain,cat,0.png\ntrain,dog,1.png\nval,cat,deep/0.png\ntrain,cat,2.png\n",
        'label,width,path,split\ncat,8,0.png,train\ndog,8,1.png,train\ncat,8,"deep/0.png",valid\ncat,8,2.png,TRAIN\n',
        "path,label,split\n./0.png,cat,train\n1.png,dog,\ndeep\\0.png,cat,validation\n.\\2.png,cat,training\n",
        "id,breed\tx,split\n0.png,cat,train\n1.png,dog,train\ndeep/0.png,cat,test\n2.png,cat,train\n",
        "path,label,split,,\n0.png,cat,train,,\n1.png,dog,train,,\ndeep/0.png,cat,val,,\n2.png,cat,train,,\n",
        "path,cat,dog,split\n0.png,1,0,train\n1.png,0,1,train\ndeep/0.png,1,0,val\n2.png,1.0,0.0,train\n",
    ],
    ids=["order", "other columns", "backslashes", "places", "empty columns", "one-hot"],
)
def test_columns_go_by_their_names(write: Write, text: str) -> None:
    assert told(single(write(text))) == EXPECTED


def test_a_flat_table_is_divided_as_a_folder_is(write: Write, tmp_path: Path) -> None:
    lines = "".join(f"{folder}{i}.png,{label}\n" for folder, label in (("", "a"), ("deep/", "b")) for i in range(6))
    table = write(lines)
    audits = [single(table, seed=seed) for seed in (0, 0, 1)]
    parts = [{name: part for name, (part, _) in told(audit).items()} for audit in audits]
    assert parts[0] == parts[1] != parts[2] and audits[0].counts("val") == [1, 1] and audits[0].layout == "flat"
    assert "--val-split 0.2, seed 0" in audits[0].notes[0]
    absolute = write("".join(f"{tmp_path}/{line}\n" for line in lines.split()), "abs.csv")
    assert told(single(absolute)) == told(audits[0])  # the same images, the same division


def test_absolute_paths_outside_of_the_folder(write: Write, tmp_path: Path) -> None:
    inner = tmp_path / "tables"
    inner.mkdir()
    write("")
    (inner / "t.csv").write_text("".join(f"{tmp_path}/{i}.png,{'abb'[i]}\n" for i in range(3)))
    audit = single(inner / "t.csv", val_split=0)
    assert {s.path.resolve() for s in audit.train} == {tmp_path / f"{i}.png" for i in range(3)}
    assert any("with an absolute path outside its folder: 3" in note for note in audit.notes)
    assert "data:image" not in page(audit)


@pytest.mark.parametrize("row", ["../1.png", "deep/../../1.png", "..\\1.png", "./../1.png", "../tables/../1.png"])
def test_a_row_that_leads_out_of_the_folder_is_refused(write: Write, tmp_path: Path, row: str) -> None:
    inner = tmp_path / "tables"
    (inner / "deep").mkdir(parents=True)
    write("")
    (inner / "t.csv").write_text(f"{tmp_path}/0.png,a\n{row},b\n")
    for read in (single, multi, list_images):
        with pytest.raises(DataError, match=r"line 2 names .*outside the table's folder"):
            read(inner / "t.csv")


def test_a_row_that_comes_back_into_the_folder_is_read(write: Write, tmp_path: Path) -> None:
    audit = single(write(f"../{tmp_path.name}/0.png,a\n1.png,b\n"), val_split=0)
    assert sorted(s.path for s in audit.train) == [tmp_path / "0.png", tmp_path / "1.png"]


def test_numbers_are_names_in_natural_order(write: Write) -> None:
    text = "path,label\n" + "".join(f"{i % 6}.png,{n}\n" if i < 6 else f"deep/{i % 6}.png,{n}\n"
                                    for i, n in enumerate((10, 9, 2, 1, 0, 10, 9, 2, 1, 0)))  # fmt: skip
    assert single(write(text)).classes == ("0", "1", "2", "9", "10")
    two = "path,label\n0.png,0\n1.png,1\n2.png,0\n3.png,1\n"  # not one-hot: the column is called label
    assert single(write(two)).classes == ("0", "1")


# ---- what is left out is counted, what contradicts is refused


def test_missing_images_and_lines_said_twice_are_counted(write: Write) -> None:
    audit = single(write("0.png,a\n./0.png,a\nnone.png,a\n1.png,b\n2.png,a\n3.png,b\n"))
    assert [bad.path.name for bad in audit.bad] == ["none.png"] and len(audit.samples) == 4
    assert audit.seen == 6 and audit.left.lines == {"lines of an image named before": 1}
    assert "repeated lines of t.csv: 1" in audit.notes
    with pytest.raises(DataError, match=r"none of its|no image of the class"):
        single(write("x.png,a\ny.png,b\n"))


def test_val_is_held_out_and_test_is_not_used(write: Write) -> None:
    text = "0.png,a,train\n1.png,b,train\n2.png,a,val\n3.png,b,test\n4.png,a,test\n"
    audit = single(write(text))
    assert [s.path.name for s in audit.val] == ["2.png"] and audit.seen == 5 == len(audit.samples) + audit.left.total
    assert "unused: 2 test images of t.csv, since val is held out" in audit.notes
    assert [s.path.name for s in multi(write(text)).val] == ["2.png"]
    only = single(write(text.replace("val", "train")))
    assert {s.path.name for s in only.val} == {"3.png", "4.png"}
    assert "the test images of t.csv are held out, since it has no val" in only.notes


REFUSED = [
    ("img_nr,klass\n0.png,a\n1.png,b\n", r"line 1 is 'img_nr,klass': neither an image"),
    ("path,x,y\n0.png,a,b\n", r"line 1 is 'path,x,y': no column is named label"),
    ("cat,0.png\ndog,1.png\n", r"line 1 is 'cat,0.png': neither"),
    ("0.png,a\n1.png,b\n0.png,b\n", r"line 3 labels 0.png 'b', line 1 labels it 'a'"),
    ("0.png,a,train\n1.png,b,train\n0.png,a,val\n", r"line 3 puts 0.png into val, but an earlier line does not"),
    ("0.png,a\n1.png,\n", r"line 2 is '1.png,': it has no label"),
    ("0.png,a\n1.png,b;c\n", r"line 2 is '1.png,b;c': 'b;c' looks like several labels; give --multi-label"),
    ("0.png,a\n1.png,b|c\n", r"line 2 is '1.png,b\|c': 'b\|c' looks like several"),
    ("0.png,a\n1.png\n", r"line 2 is '1.png'; write path,label or path,label,val"),
    ("0.png,a\n1.png,b,c,d\n", r"line 2 is '1.png,b,c,d'; write path,label"),
    ("0.png,a,sometimes\n", r"line 1 is '0.png,a,sometimes'"),
    ("path,a,b\n0.png,1,0\n1.png,1,1\n", r"line 3 is '1.png,1,1': it has 2 labels"),
    ("path,a,b\n0.png,1,0\n1.png,0,0\n", r"line 3 is '1.png,0,0': it has no label"),
    ("path,a,a\n0.png,1,0\n", r"two columns have the same name"),
    ("0.png,a\n1.png,a\n", r"images of only one class \(a\); give images of two or more"),
    ("0.png,a,train\n1.png,b,train\n2.png,c,val\n", r"has held-out images of classes without training images: c"),
    ("0.png,a,val\n1.png,b,val\n", r"all 2 images are held out"),
    ("path,label\n", "names no images"),
    ("", "names no images"),
    ("\n\n", "names no images"),
]


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_what_is_refused_is_quoted(write: Write, text: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as refused:
        single(write(text))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_table(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none.csv as a table of labels: No such file"):
        single(tmp_path / "none.csv")
    (tmp_path / "t.csv").write_bytes("0.png,Käse\n".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8 text"):
        single(tmp_path / "t.csv")
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat/labels.csv").write_text("x.png,a\n")
    with pytest.raises(DataError, match=r"to use a table of labels give its file, such as .*labels.csv"):
        single(tmp_path / "flat")


def test_separators_can_be_given(write: Write) -> None:
    odd = write("path#label\n0.png#a,b\n1.png#c\n2.png#c\n3.png#a,b\n")
    assert single(odd, field_separator="#").classes == ("a,b", "c")
    assert single(write("0.png;a, b\n1.png;c\n2.png;c\n", "u.csv"), field_separator="semicolon").classes == (
        "a, b",
        "c",
    )
    plus = multi(write("0.png,a+b\n1.png,b\n"), label_separator="+", val_split=0)
    assert told(plus) == {"0.png": ("train", "a+b"), "1.png": ("train", "b")} and plus.classes == ("a", "b")
    kept = multi(write("0.png,polar bear\n1.png,bear\n2.png,otter\n"), label_separator="semicolon")
    assert kept.classes == ("bear", "otter", "polar bear")


def test_labels_made_of_other_labels_are_mentioned(write: Write) -> None:
    notes = single(write('0.png,"cat,dog"\n1.png,cat\n2.png,dog\n3.png,"cat,dog"\n')).notes
    assert any("'cat,dog': if they are several labels, give --multi-label" in note for note in notes)
    assert not any("several" in n for n in single(write('0.png,"tench, Tinca"\n1.png,shark\n2.png,shark\n')).notes)


# ---- several labels


@pytest.mark.parametrize("joined", [";", "|", ",", " ", " ; ", ", ", " | "])
@pytest.mark.parametrize("columns", [",", ";", "\t"])
def test_what_joins_labels_is_found(write: Write, joined: str, columns: str) -> None:
    cells = ("a b", "b c", "a", "c", "a b c", "")
    lines = [f'{i}.png{columns}"{cell.replace(" ", joined)}"\n' for i, cell in enumerate(cells)]
    audit = multi(
        write(f"path{columns}labels\n" + "".join(lines), "t.tsv" if columns == "\t" else "t.csv"), val_split=0
    )
    assert audit.classes == ("a", "b", "c")
    assert {name: labels for name, (_, labels) in told(audit).items()} == {
        f"{i}.png": cell.replace(" ", "+") for i, cell in enumerate(cells)
    }
    said = [note for note in audit.notes if "--label-separator sets another" in note]
    assert len(said) == (joined.strip() != ";")


def test_names_with_blanks_are_kept_whole(write: Write) -> None:
    audit = multi(write("0.png,polar bear\n1.png,guinea pig\n2.png,polar bear\n"), val_split=0)
    assert audit.classes == ("guinea pig", "polar bear")
    assert any(w.startswith("no image has two labels; leave out --multi-label") for w in audit.warnings)
    audit = multi(write("0.png,polar bear;otter\n1.png,guinea pig\n2.png,polar bear\n"), val_split=0)
    assert audit.classes == ("guinea pig", "otter", "polar bear") and audit.warnings == ()


def test_blanks_that_could_be_either_are_asked_about(write: Write) -> None:
    table = write("0.png,polar bear\n1.png,bear\n2.png,otter\n3.png,sea\n")
    with pytest.raises(DataError, match=r"is 'polar bear' one label or several\? Give --label-separator"):
        multi(table)
    assert multi(table, label_separator="space").classes == ("bear", "otter", "polar", "sea")
    # a trained model knows
    assert multi(table, classes=("bear", "otter", "polar bear", "sea")).classes[2] == "polar bear"
    assert told(multi(table, classes=("bear", "otter", "polar", "sea"), val_split=0))["0.png"][1] == "bear+polar"


def test_a_one_hot_table_of_several_labels(write: Write) -> None:
    audit = multi(write("image;sea;sky;sand\n0.png;1;1;0\n1.png;0;true;0\n2.png;0;0;0\n"), val_split=0)
    assert audit.classes == ("sand", "sea", "sky")
    assert told(audit) == {"0.png": ("train", "sea+sky"), "1.png": ("train", "sky"), "2.png": ("train", "")}
    assert audit.warnings == ("no training image has label sand",)
    with pytest.raises(DataError, match=r"line 3 is '1.png,2,0': '2' is neither 0 nor 1|no column is named label"):
        multi(write("path,a,b\n0.png,1,0\n1.png,2,0\n"))


def test_a_class_of_a_one_hot_table_without_images(write: Write) -> None:
    table = write("path,a,b,c\n0.png,1,0,0\n1.png,0,1,0\n2.png,1,0,0\n3.png,0,1,0\n")
    audit = single(table)
    assert audit.classes == ("a", "b") and audit.warnings[0].startswith(
        "c in t.csv has no images; empty classes are dropped"
    )
    assert single(table, keep_empty_classes=True).classes == ("a", "b", "c")


# ---- parquet


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_of_one_and_of_several_labels(write: Write, tmp_path: Path) -> None:
    write("")
    names = ["0.png", "1.png", "deep/0.png", "2.png"]
    parts = ["train", "train", "val", "train"]
    table = write_parquet(
        tmp_path / "t.parquet", {"split": parts, "label": ["cat", "dog", "cat", "cat"], "path": names}
    )
    assert told(single(table)) == EXPECTED
    for labels in ([3, 10, 3, 3], [3.0, 10.0, 3.0, 3.0]):  # whole numbers, as a column with gaps has them
        assert single(write_parquet(table, {"path": names, "label": labels})).classes == ("3", "10")
    lists = [["sea", "a;b"], [], ["sky"], ["sea", "sky"]]
    audit = multi(write_parquet(table, {"path": names, "labels": lists}), val_split=0)
    assert audit.classes == ("a;b", "sea", "sky")
    assert [labels for _, labels in told(audit).values()] == ["a;b+sea", "", "sky", "sea+sky"]
    with pytest.raises(DataError, match=r"line 2 is '1.png,': it has no label"):
        single(write_parquet(table, {"path": names, "label": ["a", None, "b", "b"]}))
    with pytest.raises(DataError, match="its column image has neither text nor numbers"):
        single(write_parquet(table, {"image": [b"x"] * 4, "label": ["a"] * 4}))
    table.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="as a Parquet file"):
        single(table)


def test_parquet_without_pyarrow_is_one_line(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, load = importlib.util.find_spec, builtins.__import__

    def absent(name: str, *rest: object, **more: object) -> object:
        assert name.partition(".")[0] not in ("pyarrow", "pandas")
        return load(name, *rest, **more)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pyarrow" else find(name, *a))
    monkeypatch.setattr(builtins, "__import__", absent)
    assert told(single(write("\n".join(LINES)))) == EXPECTED  # other tables do not ask for it
    with pytest.raises(
        UnavailableError, match=r"`pyarrow` is not installed; it is needed for tables .*pip install pyarrow"
    ):
        single(tmp_path / "t.parquet")


# ---- everywhere


def test_the_images_of_a_table_are_listed(write: Write, tmp_path: Path) -> None:
    table = write("10.png,a\n2.png,b\ndeep/1.png,a\n2.png,b\n")
    assert list_images(table) == [tmp_path / "2.png", tmp_path / "10.png", tmp_path / "deep/1.png"]


def test_the_audit_of_a_table(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write("\n".join(LINES))
    out = tmp_path / "a.html"
    assert main(["data", "audit", str(table), "--out", str(out), "--workers", "0"]) == 0
    assert "2 classes" in capsys.readouterr().out and "Audit of t.csv" in out.read_text()
    assert main(["data", "audit", str(table), "--field-separator", "tabs"]) == 2
    assert "comma, semicolon, tab" in capsys.readouterr().err
    assert main(["data", "audit", str(table), "--label-separator", "|"]) == 2
    assert "`--label-separator` needs --multi-label; give both" in capsys.readouterr().err
    with pytest.raises(UsageError, match="one character"):
        single(table, field_separator="ab")


# ---- as version 0.1 read them


@pytest.mark.parametrize("head", ["path,what,where", "image,tags,which", "file,label,x"])
def test_columns_by_their_places_under_other_names(write: Write, head: str) -> None:
    text = f"{head}\n0.png,b;a,train\n1.png,,train\n2.png, c ; a ,TRAIN\n3.png,b,val\n0.png,c,train\n"
    audit = multi(write(text))
    assert told(audit) == {
        "0.png": ("train", "a+b+c"), "1.png": ("train", ""), "2.png": ("train", "a+c"), "3.png": ("val", "b"),
    }  # fmt: skip


def test_names_that_are_hard_for_tables(write: Write, tmp_path: Path) -> None:
    write("")
    for name in ("a,b.png", 'quo"te.png', "line\u2028sep.png", "sem;i.png", "path"):
        (tmp_path / name).write_bytes((tmp_path / "0.png").read_bytes() + name.encode())
    text = 'path,label\n"a,b.png",x\n"quo""te.png",y\nline\u2028sep.png,x\nsem;i.png,y\n'
    audit = single(write(text), val_split=0)
    assert {s.path.name for s in audit.train} == {"a,b.png", 'quo"te.png', "line\u2028sep.png", "sem;i.png"}
    assert not audit.bad


def test_labels_that_differ_in_case_only_are_mentioned(write: Write) -> None:
    notes = single(write("0.png,Cat\n1.png,cat\n2.png,dog\n"), val_split=0).notes
    assert any(note.endswith("that differ only in case: Cat, cat") for note in notes)

"""Folders as people have them: parts and classes that are missing, empty, nested or left by programs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vtk.data import DataAudit, scan
from vtk.data.sources.layout import refuse_inside
from vtk.errors import DataError, UsageError

Tree = Callable[..., Path]


def quiet(root: Path, **options: object) -> DataAudit:
    return scan(root, show_progress=False, workers=0, **options)


def labelled(audit: DataAudit) -> bool:
    """Whether every image has the label of the folder below train/ or val/ (or the root) that it lies in."""
    return all(audit.classes[s.label] in s.path.relative_to(audit.root).parts[:2] for s in (*audit.train, *audit.val))


def test_labels_do_not_shift_where_val_lacks_a_class(tree: Tree) -> None:
    audit = quiet(tree({"train/a": 2, "train/b": 2, "train/c": 2, "val/a": 1, "val/c": 1}))
    assert audit.classes == ("a", "b", "c") and audit.counts("val") == [1, 0, 1] and labelled(audit)
    assert audit.notes == ("classes without held-out images: b",) and audit.warnings == ()


def test_labels_do_not_shift_where_a_class_of_val_is_empty(tree: Tree) -> None:
    audit = quiet(tree({"train/a": 2, "train/b": 2, "train/c": 2, "val/a": 0, "val/b": 1, "val/c": 1}))
    assert audit.classes == ("a", "b", "c") and audit.counts("val") == [0, 1, 1] and labelled(audit)
    assert audit.notes == ("classes without held-out images: a",) and audit.warnings == ()


@pytest.mark.parametrize("val", [{"val": 0}, {"val/a": 0, "val/b": 0}, {"validation/a/deep": 0}])
def test_an_empty_val_is_split_off_train_with_a_warning(tree: Tree, val: dict[str, int]) -> None:
    audit = quiet(tree({"train/a": 5, "train/b": 5, **val}))
    assert audit.layout == "flat" and audit.counts("val") == [1, 1] and labelled(audit)
    name = next(iter(val)).partition("/")[0]
    assert len(audit.warnings) == 1 and f"{name}/ in" in audit.warnings[0] and "held out instead" in audit.warnings[0]


def test_an_empty_val_beside_a_test_part_takes_the_test_part(tree: Tree) -> None:
    audit = quiet(tree({"train/a": 5, "train/b": 5, "val/a": 0, "test/a": 1, "test/b": 2}))
    assert audit.layout == "split" and audit.counts("val") == [1, 2]
    assert audit.notes == ("unused folders: val/ beside train/, test/",)


def test_unlabelled_test_images_are_not_used(tree: Tree) -> None:
    audit = quiet(tree({"train/a": 5, "train/b": 5, "test": 3}))
    assert (
        audit.layout == "flat"
        and audit.classes == ("a", "b")
        and audit.notes[1] == "unused folders: test/ beside train/"
    )


def test_empty_classes_are_dropped_with_a_warning(tree: Tree) -> None:
    audit = quiet(tree({"a": 5, "b": 0, "c/deep": 0, "d": 5}))
    assert audit.classes == ("a", "d") and labelled(audit)
    assert "b/, c/ in data/ have no image files" in audit.warnings[0] and "--keep-empty-classes" in audit.warnings[0]


def test_empty_classes_are_kept_when_asked(tree: Tree) -> None:
    root = tree({"train/a": 2, "train/b": 0, "train/c": 2, "val/a": 1, "val/b": 2})
    with pytest.raises(DataError, match=r"has classes that are not in .*train: b; fill .* --keep-empty-classes"):
        quiet(root)
    audit = quiet(root, keep_empty_classes=True)
    assert audit.classes == ("a", "b", "c") and labelled(audit)
    assert audit.counts("train") == [2, 0, 2] and audit.counts("val") == [1, 2, 0]
    assert "b/ in train/ has no image files" in audit.warnings[0]


def test_a_class_of_bad_files_only_may_be_kept_too(tree: Tree) -> None:
    root = tree({"a": 2, "b": 0, "c": 2})
    (root / "b" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="no image of the class b can be read"):
        quiet(root)
    audit = quiet(root, keep_empty_classes=True, val_split=0)
    assert audit.classes == ("a", "b", "c") and audit.counts("train") == [2, 0, 2] and len(audit.bad) == 1


JUNK = (".ipynb_checkpoints", ".git", "__MACOSX", "@eaDir", "__pycache__", ".thumbnails", "$RECYCLE.BIN", "lost+found")


def test_what_programs_leave_is_neither_class_nor_image(tree: Tree) -> None:
    counts = {f"{part}{name}/x": 1 for name in JUNK for part in ("", "train/", "train/a/", "val/")}
    root = tree({"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1, **counts})
    for name in (
        ".DS_Store",
        "Thumbs.db",
        "desktop.ini",
        "._0.png",
        "._x.jpg",
        ".hidden.png",
        "labels.csv",
        "a.jpg.txt",
    ):
        for folder in ("", "train", "train/a", "val/b"):
            (root / folder / name).write_bytes(b"\0\1")
    audit = quiet(root)
    assert audit.classes == ("a", "b") and audit.counts("train") == [2, 2] and audit.counts("val") == [1, 1]
    assert not audit.bad and not audit.warnings
    assert audit.notes == ("unused, without an image suffix: .txt 4, .csv 4",)


@pytest.mark.parametrize(
    "counts",
    [
        {"train": 2, "val": 2},
        {"train": 2, "validation": 2, "test": 2},
        {"Train": 2, "Val": 2},
        {"training": 1, "testing": 1},
        {"train/a": 2, "val/a": 1},
        {"train/a": 0, "val/a": 1},
    ],
)
def test_parts_are_never_classes(tree: Tree, counts: dict[str, int]) -> None:
    with pytest.raises(DataError) as error:
        quiet(tree(counts))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("train", ["train", "Train", "TRAIN", "training"])
@pytest.mark.parametrize("val", ["val", "Validation", "valid", "test", ""])
def test_parts_are_found_by_every_name(tree: Tree, train: str, val: str) -> None:
    counts = {f"{train}/a": 5, f"{train}/b": 5} | ({f"{val}/a": 1, f"{val}/b": 1} if val else {})
    assert quiet(tree(counts)).classes == ("a", "b")


def test_a_folder_around_the_folder_is_named(tree: Tree) -> None:
    for counts in ({"pets/train/a": 1, "pets/train/b": 1}, {"pets/a": 1, "pets/b": 1}):
        root = tree(counts)
        with pytest.raises(DataError, match=r"contains only pets/, which contains .*; give .*data/pets$"):
            quiet(root)
        assert len(quiet(root / "pets").classes) == 2


def test_class_folders_that_hold_folders(tree: Tree) -> None:
    audit = quiet(tree({"cat/2024/may": 3, "cat/2025": 2, "cat": 1, "dog/a/b/c/d": 4}), val_split=0)
    assert audit.classes == ("cat", "dog") and audit.counts("train") == [6, 4]


def test_a_split_inside_of_each_class_is_warned_of(tree: Tree) -> None:
    audit = quiet(tree({"cat/train": 3, "cat/val": 3, "dog/train": 3, "dog/val": 3}))
    assert audit.classes == ("cat", "dog") and "not CLASS/train" in audit.warnings[0]


def test_wrong_words(tree: Tree) -> None:
    root = tree({"a": 1, "b": 1})
    with pytest.raises(UsageError, match=r"--on-bad-image.* skip or fail"):
        quiet(root, on_bad_image="ignore")
    with pytest.raises(UsageError, match="--max-pixels"):
        quiet(root, max_pixels=0)


def test_results_are_not_written_among_the_images(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look would take them for a class, and every label behind it would shift."""
    flat, split = tree({"a": 2, "b": 2}), tree({"train/a": 2, "train/b": 2, "val/a": 1}, "split")
    monkeypatch.chdir(flat)
    for out, root in (
        (Path("runs/x"), Path(".")), (flat / "run", flat), (flat, flat), (flat / "a/run", flat),
        (split / "val/run", split), (split / "Train/run", split),
    ):  # fmt: skip
        with pytest.raises(DataError, match=r"`--out` .* is among the images of .*; give a folder outside"):
            refuse_inside(out, root)
    for out, root in (
        (tmp_path / "runs/x", flat), (flat / ".vtk/run", flat), (split / "run", split), (flat / "run", flat / "a.csv"),
        (flat / "x", Path("torch/cifar10")),
    ):  # fmt: skip
        refuse_inside(out, root)

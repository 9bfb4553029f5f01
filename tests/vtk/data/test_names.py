"""Links, and names that are hard on programs."""

import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from vtk.card import InputSpec
from vtk.data import eval_transform, list_images, make_loader, scan
from vtk.data.loading.loader import ImageDataset
from vtk.errors import DataError

Tree = Callable[..., Path]
HARD = (
    "two words", " lead", "hash#1", "it's", 'say "hi"', "a,b;c", "100%", "new\nline", "tab\there", "back\\slash",
    "[red]", "<b>&amp;", "--json", "名前", "🐈", "Ünïcödé", "e\u0301tude", "\u202eright", "$HOME", "*?", "a" * 120,
)  # fmt: skip
POSIX = pytest.mark.skipif(os.name == "nt", reason="names that Windows forbids")


def quiet(root: Path, **options: object) -> object:
    return scan(root, show_progress=False, **options)


@POSIX
def test_hard_names_of_classes_and_files(
    tree: Tree, picture: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree({"data set #1/\nx": 0}) / "data set #1" / "\nx"
    for name in HARD:
        for i in range(2):
            picture(root / name / f"{i} {name[:60]}.png", seed=i)
    for _ in range(2):  # decoded, and from memory
        audit = quiet(root, workers=2)
        assert set(audit.classes) == {unicodedata.normalize("NFC", name) for name in HARD}
        assert audit.counts("train") == audit.counts("val") == [1] * len(HARD) and not audit.bad
        for sample in audit.samples:
            assert unicodedata.normalize("NFC", sample.path.parent.name) == audit.classes[sample.label]
    assert audit.cached == 2 * len(HARD)
    audit.print()
    assert "new\\nline" in capsys.readouterr().out
    json.loads(json.dumps(audit.to_dict()))
    images, labels = next(
        iter(make_loader(audit.val, eval_transform(InputSpec(4, 4)), batch_size=99, shuffle=False, seed=0, workers=0))
    )
    assert len(images) == len(HARD) and labels.tolist() == list(range(len(HARD)))


def test_both_spellings_of_unicode_are_one_class(tree: Tree) -> None:
    composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    audit = quiet(tree({f"train/{composed}": 2, "train/tea": 2, f"val/{apart}": 1, "val/tea": 1}))
    assert audit.classes == (composed, "tea") and audit.counts("val") == [1, 1] and not audit.warnings
    if os.path.exists(tree({composed: 0}, "probe") / apart):
        pytest.skip("this file system takes both spellings for one name")
    both = quiet(tree({composed: 2, apart: 3, "tea": 2}, "both"), val_split=0)
    assert both.classes == (composed, "tea") and both.counts("train") == [5, 2]
    assert "two Unicode normal forms" in both.warnings[0]


@POSIX
def test_errors_stay_one_line_whatever_the_file_is_called(tmp_path: Path, picture: Callable[..., Path]) -> None:
    path = tmp_path / "new\nline\x1b[31m.png"
    path.write_bytes(b"")
    samples = [(path, 0)]
    with pytest.raises(DataError) as error:
        ImageDataset(samples, eval_transform(InputSpec(4, 4)))[0]
    assert str(error.value).endswith("new\\nline\\x1b[31m.png: the file is empty")
    for workers in (0, 1):
        loader = make_loader(
            samples, eval_transform(InputSpec(4, 4)), batch_size=1, shuffle=False, seed=0, workers=workers
        )
        with pytest.raises(DataError) as error:
            list(loader)
        assert str(error.value).endswith("new\\nline\\x1b[31m.png: the file is empty")


_SCRIPT = """
import json, sys
from pathlib import Path
from vtk.data import scan
sys.stdout.reconfigure(errors="backslashreplace")  # as the command does
audit = scan(Path(sys.argv[1]), show_progress=False, workers=2)
audit.print()
print(json.dumps({"classes": audit.classes, "count": len(audit.samples), "bad": len(audit.bad)}))
"""


@POSIX
@pytest.mark.parametrize("utf8", ["", "0"], ids=["as Python does", "ASCII"])
def test_the_c_locale(tree: Tree, picture: Callable[..., Path], utf8: str) -> None:
    root = tree({})
    for name in ("café", "名前", "🐈 #1"):
        for i in range(2):
            picture(root / name / f"{i} ü.png")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    env |= {"LC_ALL": "C", "PYTHONPATH": os.pathsep.join(sys.path)} | (
        {"PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": utf8} if utf8 else {}
    )
    run = subprocess.run([sys.executable, "-c", _SCRIPT, os.fsencode(root)], capture_output=True, env=env, check=True)
    told = json.loads(run.stdout.decode("utf-8").splitlines()[-1])
    assert told == {"classes": ["café", "名前", "🐈 #1"], "count": 6, "bad": 0}, run.stderr.decode()


def test_links_count_by_their_own_names(tmp_path: Path, picture: Callable[..., Path]) -> None:
    store = tmp_path / "store"
    for i in range(4):
        picture(store / "blobs" / f"{i}.png", seed=i)
    root = tmp_path / "data"
    for name in ("dog", "cat"):
        (root / name).mkdir(parents=True)
    for i in range(4):  # links to files: the class is the folder of the link, whatever the target is called
        os.symlink(store / "blobs" / f"{i}.png", root / ("dog", "cat")[i % 2] / f"photo{i}.png")
    os.symlink(store / "blobs", root / "bird")  # a link to a folder: a class of the link's name
    audit = quiet(root, val_split=0)
    assert audit.classes == ("bird", "cat", "dog") and audit.counts("train") == [4, 2, 2]
    assert {s.path.parent.name for s in audit.samples} == {"bird", "cat", "dog"}
    assert {s.path.name for s in audit.samples if s.label == 2} == {"photo0.png", "photo2.png"}


def test_links_to_parts(tmp_path: Path, tree: Tree) -> None:
    store = tree({"one/a": 2, "one/b": 2, "two/a": 1, "two/b": 1}, "store")
    root = tmp_path / "linked"
    root.mkdir()
    os.symlink(store / "one", root / "train")
    os.symlink(store / "two", root / "val")
    os.symlink(root, tmp_path / "again")
    audit = quiet(tmp_path / "again")
    assert audit.layout == "split" and audit.classes == ("a", "b") and audit.counts("train") == [2, 2]


def test_a_file_named_by_its_hash_counts_by_the_name_of_the_link(tmp_path: Path, picture: Callable[..., Path]) -> None:
    picture(tmp_path / "blob.png").rename(tmp_path / "blob")  # as download caches store them
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        os.symlink(tmp_path / "blob", tmp_path / "data" / name / "cat.PNG")
    assert quiet(tmp_path / "data", val_split=0).counts("train") == [1, 1]


@pytest.mark.parametrize("where", ["a/up", "a/deep/up", "b/self"])
def test_circles_end(tree: Tree, where: str) -> None:
    root = tree({"a/deep": 2, "b": 2})
    os.symlink(root, root / where, target_is_directory=True)
    audit = quiet(root, val_split=0)
    assert audit.classes == ("a", "b")
    assert all(path.exists() for path in list_images(root))


def test_two_folders_that_link_to_each_other(tree: Tree) -> None:
    root = tree({"a": 2, "b": 3})
    os.symlink(root / "b", root / "a" / "to b")
    os.symlink(root / "a", root / "b" / "to a")
    audit = quiet(root, val_split=0)
    assert audit.counts("train") == [5, 5]  # what is reached through a link belongs to the folder it was reached from

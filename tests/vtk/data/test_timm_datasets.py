"""Data sets by timm's names: read once, then a folder like any other."""

import importlib.util
import io
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image

from vtk.data import load_image, scan
from vtk.data.sources import timm_datasets as named
from vtk.errors import DataError, UnavailableError, UsageError

RNG = np.random.default_rng(0)


def pixels(label: int) -> np.ndarray:
    return (RNG.integers(0, 50, (6, 8, 3)) + 40 * label).astype(np.uint8)


def encoded(label: int, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels(label)).save(out, kind)
    return out.getvalue()


class ByteReader:
    """What timm's reader of hfds is: random access, files not decoded."""

    def __init__(self, items: list[tuple[bytes, Any]], names: list[str]) -> None:
        self.items, self.class_to_idx = items, {name: i for i, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[io.BytesIO, Any]:
        return io.BytesIO(self.items[i][0]), self.items[i][1]


class Mapped:
    def __init__(self, reader: ByteReader) -> None:
        self.reader = reader


class StreamReader:
    """What timm's readers of wds and tfds are: decoded images, one after another."""

    def __init__(self, items: list[tuple[Image.Image, Any]]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[tuple[Image.Image, Any]]:
        return iter(self.items)


class Streamed:
    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[tuple[Image.Image, Any]]:
        return iter(self.reader)

    def __len__(self) -> int:
        return 0  # unknown


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Stand in for timm's factory; returns what it was asked for."""
    asked: list[tuple[str, Any]] = []
    items = [(encoded(i % 3, "PNG" if i % 2 else "JPEG"), i % 3) for i in range(9)]

    def create(name: str, root: str, *, split: str, **options: Any) -> Any:
        asked.append((name, split))
        kind = name.partition("/")[0]
        if split in ("validation", "valid", "val") and kind == "hfds":
            raise ValueError(f'Unknown split "{split}". Should be one of [train, test].')
        if split == "test" and "whole" in name:
            raise ValueError("no such split")
        if kind == "hfds":
            few = items if split == "train" else items[:3]
            return Mapped(ByteReader(few, ["zebra", "ant/bee", ".hidden"]))
        return Streamed(StreamReader([(Image.fromarray(pixels(i % 2)), np.int64(i % 2)) for i in range(6)]))

    monkeypatch.setattr(timm.data, "create_dataset", create)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return asked


def test_bytes_are_kept_and_classes_named(opened: list[tuple[str, Any]], vtk_home: Path) -> None:
    audit = scan(Path("hfds/someone/animals"), workers=0, show_progress=False)
    assert audit.classes == ("_.hidden", "ant_bee", "zebra") and audit.root.name == "animals"
    assert audit.layout == "split" and audit.counts("train") == [3, 3, 3] and audit.counts("val") == [1, 1, 1]
    assert opened[0] == ("hfds/someone/animals", "train") and opened[-1][1] == "test"
    assert {s.path.suffix for s in audit.samples} == {".jpg", ".png"} and audit.root.is_relative_to(vtk_home)
    first = next(s for s in audit.train if audit.classes[s.label] == "zebra")
    assert load_image(first.path).size == (8, 6)
    count = len(opened)
    assert scan(Path("hfds/someone/animals"), workers=0, show_progress=False).train == audit.train
    assert len(opened) == count  # not read again


def test_streams_become_files_without_loss(opened: list[tuple[str, Any]]) -> None:
    global RNG
    RNG = np.random.default_rng(7)
    audit = scan(Path("tfds/whole"), workers=0, show_progress=False)
    assert audit.classes == ("0", "1") and audit.counts("train") == [3, 3]
    RNG = np.random.default_rng(7)
    expected = [pixels(i % 2) for i in range(6)]
    stored = sorted((audit.root / "train").rglob("*.png"), key=lambda path: path.stem)
    assert all(np.array_equal(np.asarray(Image.open(p)), e) for p, e in zip(stored, expected, strict=True))


def test_a_set_without_held_out_part_is_split(
    opened: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    audit = scan(Path("hfds/whole"), workers=0, show_progress=False)
    assert audit.layout == "flat" and len(audit.val) == 3
    assert "no held-out part" in capsys.readouterr().out


def test_shards_are_found_by_their_names(opened: list[tuple[str, Any]], tmp_path: Path) -> None:
    for name in ("pets-train-000.tar", "pets-train-001.tar", "pets-val-000.tar", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    audit = scan(Path(f"wds@{tmp_path}"), workers=0, show_progress=False)
    assert [split for _, split in opened] == ["pets-train-000.tar", "pets-train-001.tar", "pets-val-000.tar"]
    assert len(audit.train) == 12 and len(audit.val) == 6 and audit.root.name == tmp_path.name


@pytest.mark.parametrize("name", ["hfds/beans", "WDS@shards", "tfds/mnist", "torch/cifar10"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"which is not installed: pip install [a-z-]+$"):
        scan(Path(name))


def test_a_package_that_a_reader_needs_is_named_and_stdout_stays_clean(
    opened: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create(*_: Any, **__: Any) -> None:
        print("Please install something")
        raise ImportError("No module named 'tensorflow'")

    monkeypatch.setattr(timm.data, "create_dataset", create)
    with pytest.raises(UnavailableError, match="No module named 'tensorflow'; install what tensorflow_datasets needs"):
        scan(Path("tfds/mnist"))
    assert capsys.readouterr().out == ""


def test_a_run_of_several_processes_reads_the_whole_set(
    opened: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of streams ask torch.distributed, and give a process its share."""
    whole = timm.data.create_dataset

    class Share(StreamReader):
        def __iter__(self) -> Iterator[tuple[Image.Image, Any]]:
            return iter(self.items[:: 2 if torch.distributed.is_initialized() else 1])

    def create(*args: Any, **kwargs: Any) -> Any:
        found = whole(*args, **kwargs)
        items = found.reader.items
        return Streamed(Share(items[:: 2 if torch.distributed.is_initialized() else 1]))

    monkeypatch.setattr(timm.data, "create_dataset", create)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    audit = scan(Path("tfds/x"), workers=0, show_progress=False)
    assert audit.counts("train") == audit.counts("val") == [3, 3]
    assert torch.distributed.is_initialized()


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path("torch/own", name).mkdir(parents=True)
        Image.fromarray(pixels(1)).save(f"torch/own/{name}/0.png")
    assert not named.is_named(Path("torch/own")) and named.is_named(Path("torch/other"))
    assert scan(Path("torch/own"), workers=0).classes == ("a", "b")


def test_what_cannot_be(opened: list[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, says in (
        ("hfds", "is not the name of a dataset"),
        ("wds", "give wds@FOLDER"),
        ("torch/image_folder", "that folder"),
    ):
        with pytest.raises(UsageError, match=says):
            scan(Path(name))
    with pytest.raises(DataError, match=r"no .tar files of train among 0"):
        scan(Path(f"wds@{tmp_path}"))
    for label, says in ((-1, "without a label"), ([0, 1], "no class number"), (None, "no class number")):
        reader = ByteReader([(encoded(0), label if not isinstance(label, list) else tuple(label))], [])
        monkeypatch.setattr(timm.data, "create_dataset", lambda *_, reader=reader, **__: Mapped(reader))
        with pytest.raises(DataError, match=says):
            scan(Path("hfds/x"))

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(timm.data, "create_dataset", fail)
    with pytest.raises(DataError, match=r"`hfds/x` cannot be opened \(train\): no network; check the name"):
        scan(Path("hfds/x"))


def test_bytes_that_are_no_image_are_bad_files(opened: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    items = [(encoded(i % 2), i % 2) for i in range(4)]
    reader = ByteReader([*items, (b"<html>", 1)], ["a", "b"])
    monkeypatch.setattr(timm.data, "create_dataset", lambda *_, **__: Mapped(reader))
    audit = scan(Path("hfds/x"), workers=0, show_progress=False)
    assert len(audit.bad) == 2 and audit.counts("train") == [2, 2]  # one in each part


def test_a_set_of_torchvision(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 20), ("t10k", 10)):
        images, labels = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())
    audit = scan(Path(f"torch/mnist@{tmp_path}"), workers=0, show_progress=False)
    assert audit.counts("train") == [2] * 10 and audit.counts("val") == [1] * 10
    assert audit.classes[7] == "7 - seven" and audit.modes == {"L": 30}
    assert np.array_equal(np.asarray(Image.open(sorted((audit.root / "val").rglob("*.png"))[0])), images[0])


def test_real_shards(tmp_path: Path) -> None:
    for shard, count in (("pets-train-0.tar", 6), ("pets-train-1.tar", 4), ("pets-test-0.tar", 4)):
        with tarfile.open(tmp_path / shard, "w") as archive:
            for i in range(count):
                for suffix, data in (("png", encoded(i % 2, "PNG")), ("cls", str(i % 2).encode())):
                    info = tarfile.TarInfo(f"{shard[:-4]}_{i:04d}.{suffix}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    audit = scan(Path(f"wds@{tmp_path}"), workers=0, show_progress=False)
    assert audit.classes == ("0", "1") and audit.counts("train") == [5, 5] and audit.counts("val") == [2, 2]


def test_a_real_set_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, count in (("train", 4), ("test", 2)):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / "pets" / part / name).mkdir(parents=True)
            for i in range(count):
                (tmp_path / "pets" / part / name / f"{i}.jpg").write_bytes(encoded(label))
    monkeypatch.chdir(tmp_path)
    audit = scan(Path(f"hfds/pets@{tmp_path / 'cache'}"), workers=0, show_progress=False)
    assert audit.classes == ("cat", "dog") and audit.counts("train") == [4, 4] and audit.counts("val") == [2, 2]
    kept = sorted(path.read_bytes() for path in (audit.root / "val").rglob("*.jpg"))
    assert kept == sorted(path.read_bytes() for path in (tmp_path / "pets" / "test").rglob("*.jpg"))

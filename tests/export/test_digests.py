"""Weights are those that were exported: a file with other bytes is refused wherever it is opened."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from vtk.__main__ import main
from vtk.errors import DataError
from vtk.runtime import weight_digests as digests
from vtk.runtime.onnx_file import open_onnx
from vtk.runtime.weight_digests import check_archive, content_digest, file_digest

Export = Callable[..., Path]


@pytest.fixture
def export(calm: Any, fake_calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    """Export the calm pack, its weights in the file or beside it."""

    def run(name: str, *flags: str, beside: bool = True) -> Path:
        monkeypatch.setattr("vtk_export.output_folder.INLINE_LIMIT", 1000 if beside else 1 << 40)
        fake_calm()
        argv = ["export", "onnx", str(calm.path), "--out", str(tmp_path / name), "--threads", "1", *flags]
        assert main(argv) == 0
        return tmp_path / name / "model.onnx"

    return run


def zero_a_third(path: Path, at: int) -> None:
    """Set a third of a file to zero in place, its length and times aside."""
    data = bytearray(path.read_bytes())
    count = len(data) // 3
    data[at : at + count] = bytes(count)
    path.write_bytes(data)


COMMANDS = (
    pytest.param(("eval", "PHOTOS", "--backend", "ort-cpu"), marks=pytest.mark.slow),
    ("predict", "PHOTOS", "--backend", "ort-cpu"),
    ("profile", "--batch-sizes", "1"),
)


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0])
def test_zeros_in_the_data_file_are_one_line_and_exit_3(
    calm: Any, export: Export, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    path = export("out")
    zero_a_third(path.with_name("model.onnx.data"), 4096)
    capsys.readouterr()
    words = [str(calm.photos) if word == "PHOTOS" else word for word in argv[1:]]
    assert main([argv[0], str(path), *words]) == 3
    said = capsys.readouterr().err
    assert "model.onnx.data is damaged" in said and said.count("\n") == 1


@pytest.mark.parametrize("flags", [(), ("--dtype", "fp16"), ("--int8", "dynamic"), ("--with-preproc",)], ids=str)
def test_zeros_among_the_weights_in_the_file_are_found(export: Export, flags: tuple[str, ...]) -> None:
    path = export("out", *flags, beside=False)
    open_onnx(path)
    data = bytearray(path.read_bytes())
    largest = max(onnx.load(path).graph.initializer, key=lambda tensor: len(tensor.raw_data)).raw_data
    at = data.find(largest)
    data[at : at + len(largest) // 3] = bytes(len(largest) // 3)
    path.write_bytes(data)
    onnx.checker.check_model(str(path), full_check=True)  # stock tools see nothing
    with pytest.raises(DataError, match="the weights in it are not those that were exported"):
        open_onnx(path)


def test_the_data_file_of_another_export_is_refused(export: Export) -> None:
    here, there = export("here"), export("there")
    other = there.with_name("model.onnx.data")
    data = np.frombuffer(other.read_bytes(), np.float32) * np.float32(1.5)
    other.write_bytes(data.tobytes())
    open_onnx(here)
    shutil.copyfile(other, here.with_name("model.onnx.data"))
    with pytest.raises(DataError, match="of another export: its bytes are not those that"):
        open_onnx(here)


def test_a_file_is_hashed_again_when_it_changed_and_not_before(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export("out")
    monkeypatch.setattr("vtk.runtime.weight_digests._RACY_NS", 0)
    open_onnx(path)
    read: list[str] = []
    inside = digests._inside
    monkeypatch.setattr(digests, "_inside", lambda proto: (read.append("inside"), inside(proto))[1])
    monkeypatch.setattr(digests, "_digest", lambda path: read.append(path.name) or "x")
    open_onnx(path)
    assert read == []
    data = path.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes())
    with pytest.raises(DataError, match="damaged"):
        open_onnx(path)
    assert read == ["inside", "model.onnx.data"]


def test_files_of_0_1_have_no_digest_and_are_opened(export: Export) -> None:
    path = export("out")
    proto = onnx.load(path, load_external_data=False)
    kept = [entry for entry in proto.metadata_props if entry.key != "vtk.weights"]
    assert len(kept) == len(proto.metadata_props) - 1
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    path.write_bytes(proto.SerializeToString())
    assert open_onnx(path).notes == ()


def test_a_graph_that_another_tool_wrote_is_opened_and_that_is_said(export: Export) -> None:
    path = export("out", beside=False)
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:  # other weights, and one node more
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).copy(), tensor.name))
    proto.graph.node.append(onnx.helper.make_node("Identity", [proto.graph.output[0].name], ["again"]))
    onnx.save(proto, path)
    (note,) = open_onnx(path).notes
    assert "another tool has changed the graph" in note


def test_a_damaged_record_of_digests_is_one_line(export: Export) -> None:
    path = export("out", beside=False)
    for text in ("[", "[]", '{"graph": 1}', "[" * 5000):
        proto = onnx.load(path)
        next(entry for entry in proto.metadata_props if entry.key == "vtk.weights").value = text
        onnx.save(proto, path)
        with pytest.raises(DataError, match=r"vtk\.weights") as caught:
            open_onnx(path)
        assert "\n" not in str(caught.value)


def test_content_digests_tell_weights_beside_a_file_apart(export: Export) -> None:
    path = export("out")
    before = content_digest(path)
    zero_a_third(path.with_name("model.onnx.data"), 0)
    assert content_digest(path) != before


def test_a_damaged_entry_of_an_archive_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/weights", b"weights" * 1000)
        archive.writestr("model/version", b"1")
    check_archive(path)
    path.write_bytes(path.read_bytes().replace(b"weights" * 300, bytes(2100), 1))
    with pytest.raises(DataError, match="the bytes of model/data/weights are not those that were written"):
        check_archive(path)
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match="is not a readable archive"):
        check_archive(path)


def test_served_tasks_know_their_files(calm: Any, fake_calm: Any, tmp_path: Path) -> None:
    fake_calm()
    argv = ["export", "triton", f"pets={calm.path}", "--backend", "python", "--out", str(tmp_path), "--threads", "1"]
    assert main(argv) == 0
    version = tmp_path / "pets" / "1"
    index = json.loads((version / "tasks.json").read_text())
    assert index["sha256"] == {"model.onnx": file_digest(version / "model.onnx")}

"""The folder: nothing stale, nothing lost, nothing changed by a failure; and packs that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from vtk.__main__ import main


def _content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def _fails(code: int, message: str, capsys: pytest.CaptureFixture[str], *argv: object) -> None:
    assert main(["export", "tasks", *map(str, argv)]) == code
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("vtk export: error: ")]
    assert message in line


def test_an_export_over_an_old_one_leaves_nothing_stale(packs: dict[str, Path], tools: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tools.run_export(packs["pets"], packs["cars"], "--form", "both", "--out", out)
    done = tools.run_export(f"renamed={packs['pets']}", packs["cb"], packs["wide"], "--out", out)
    names = {"renamed.onnx", "renamed.json", "cb.onnx", "cb.json", "wide.onnx", "wide.json", "tasks.json", "README.md"}
    assert {p.name for p in out.iterdir()} == names | {done.index["shared"]["file"]}
    again = _content(out)
    tools.run_export(f"renamed={packs['pets']}", packs["cb"], packs["wide"], "--out", out)
    assert _content(out) == again


def test_a_failed_export_leaves_the_folder_as_it_was(
    packs: dict[str, Path], tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    tools.run_export(packs["pets"], packs["cars"], "--out", out)
    before = _content(out)

    def convert(model: Any, *args: Any, **kwargs: Any) -> onnx.ModelProto:
        proto = tools.convert(model, *args, **kwargs)
        tensor = next(t for t in proto.graph.initializer if t.name.endswith("head.bias"))
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.5), tensor.name))
        return proto

    monkeypatch.setattr("vtk_export.tasks.build.convert", convert)
    _fails(
        4, "pets.onnx, task `pets` against torch: batch 1: max error", capsys, packs["pets"], packs["cb"], "--out", out
    )
    assert _content(out) == before


def test_graphs_that_share_less_than_their_packs_are_refused(
    packs: dict[str, Path], tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    made = iter(range(9))

    def convert(model: Any, *args: Any, **kwargs: Any) -> onnx.ModelProto:
        proto, step = tools.convert(model, *args, **kwargs), next(made)
        for tensor in proto.graph.initializer:
            if list(tensor.dims) == [32, 128]:  # too little for the gate's values to see
                value = numpy_helper.to_array(tensor) * np.float32(1 + step * 2e-7)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        return proto

    monkeypatch.setattr("vtk_export.tasks.build.convert", convert)
    _fails(
        4, "of matrices in common, their graphs only", capsys, packs["pets"], packs["cars"], "--out", tmp_path / "out"
    )
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_kept_and_need_overwrite(
    packs: dict[str, Path], tools: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "notes").mkdir(parents=True)
    (out / "thesis.txt").write_text("mine")
    (out / "tasks.json").write_text(json.dumps({"format": 1, "files": ["thesis.txt", "../x.onnx", 3]}))
    argv = (packs["pets"], packs["cars"], "--out", out)
    _fails(3, "holds files that are not from an export (notes)", capsys, *argv)
    tools.run_export(*argv, "--overwrite")
    assert (out / "thesis.txt").read_text() == "mine"
    assert (out / "notes").is_dir()
    assert (out / "pets.onnx").is_file()
    (out / "cb.onnx").mkdir()
    before = {p.name for p in out.iterdir()}
    argv = packs["pets"], packs["cb"], "--out", out, "--overwrite"
    _fails(3, "holds cb.onnx, a folder that `vtk export tasks` did not write", capsys, *argv)
    assert {p.name for p in out.iterdir()} == before


def test_an_export_that_is_stopped_while_files_move_leaves_the_old_one(
    packs: dict[str, Path], tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, moved = tmp_path / "out", []
    tools.run_export(packs["pets"], packs["cars"], "--out", out)
    before = _content(out)

    def replace(source: Path, target: Path) -> None:
        moved.append(target)
        if len(moved) == 9:
            raise KeyboardInterrupt
        shutil.move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("vtk.filesets.exchange", lambda a, b: False)
        patch.setattr("vtk.filesets.os.replace", replace)
        assert main(["export", "tasks", str(packs["wide"]), str(packs["cb"]), "--out", str(out)]) == 130
    assert len(moved) > 9 and _content(out) == before


def test_what_a_killed_export_of_version_0_1_left_is_cleared_up(
    packs: dict[str, Path], tools: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tools.run_export(packs["wide"], packs["cb"], "--out", out)
    names = [name for name in _content(out) if name != "tasks.json"]
    (out / "tasks.json").write_text(json.dumps({"format": 1, "files": sorted([*names, "cars.onnx"])}))
    (out / ".export-tmp-999999999").mkdir()
    done = tools.run_export(packs["pets"], packs["cars"], "--out", out)  # without --overwrite
    assert {p.name for p in out.iterdir()} == {*done.index["files"], "tasks.json"}


Make = Callable[[Any, dict[str, Path], Path], list[object]]

REFUSED: dict[str, tuple[int, str, Make]] = {
    "one": (2, "1 pack was given", lambda lab, packs, tmp: [packs["pets"]]),
    "none": (2, "0 packs were given", lambda lab, packs, tmp: []),
    "clash": (2, "are both the task `pets`", lambda lab, packs, tmp: [packs["pets"], packs["pets"] / "task"]),
    "absent": (3, "does not exist", lambda lab, packs, tmp: [packs["pets"], tmp / "absent"]),
    "no-pack": (2, "is not a task pack but a onnx", lambda lab, packs, tmp: [packs["pets"], f"x={_onnx(tmp)}"]),
    "damaged": (3, "safetensors", lambda lab, packs, tmp: [packs["pets"], _cut(packs["cars"], tmp / "cut")]),
    "base": (3, "are of the bases", lambda lab, packs, tmp: [
        packs["pets"], lab.pack("other", 2, base=lab.base("base-b", seed=5))]),
    "architecture": (2, "are a vit_tiny_patch16_224", lambda lab, packs, tmp: [
        packs["pets"], lab.pack("heads4", 2, base=lab.base(), num_heads=4)]),
    "changed-ffn": (2, "changed `blocks.0.mlp.fc", lambda lab, packs, tmp: [
        packs["pets"], lab.pack("full", 2, train=lambda key: True)]),
    "sizes": (2, "take images of 3×32×32 and 3×32×48", lambda lab, packs, tmp: [
        packs["pets"], packs["wide"], "--form", "gathered"]),
    "cb-and-not": (2, "use --form files", lambda lab, packs, tmp: [packs["pets"], packs["cb"], "--form", "both"]),
    "fuse": (2, "`--fuse` is for --form files", lambda lab, packs, tmp: [
        packs["pets"], packs["cars"], "--form", "gathered", "--fuse"]),
    "opset": (2, "`--opset` is 17", lambda lab, packs, tmp: [packs["pets"], packs["cars"], "--opset", "17"]),
}  # fmt: skip


def _onnx(tmp: Path) -> Path:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ReduceMean", ["pixel_values"], ["logits"], axes=[2, 3], keepdims=0)], "g",
        [onnx.helper.make_tensor_value_info("pixel_values", 1, ["batch", 3, 8, 8])],
        [onnx.helper.make_tensor_value_info("logits", 1, ["batch", 3])],
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), tmp / "m.onnx")
    return tmp / "m.onnx"


def _cut(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    file = to / "task" / "task.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return to


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, lab: Any, packs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message, make = REFUSED[case]
    (tmp_path / "in").mkdir()
    _fails(code, message, capsys, *make(lab, packs, tmp_path / "in"), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()

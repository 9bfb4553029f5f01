import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

from vtk.__main__ import main
from vtk.errors import UsageError
from vtk_export.onnx.config import OnnxCommand
from vtk_export.output_folder import INLINE_LIMIT

Fault = Callable[[onnx.ModelProto], None]
FILES = ["README.md", "model.json", "model.onnx"]


def _run(path: Path, images: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"pixel_values": images.numpy()})[0]


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 16])
def test_file_gives_timms_logits_at_any_batch(exported: Any, packed: Any, batch: int) -> None:
    images = torch.randn(batch, 3, 32, 48, generator=torch.Generator().manual_seed(batch))
    with torch.no_grad():
        expected = packed.model()(images)
    np.testing.assert_allclose(_run(exported.out, images), expected.numpy(), atol=1e-4 * expected.abs().max().item())


def test_protobuf_is_what_was_asked_for(exported: Any, packed: Any) -> None:
    proto = exported.proto
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 18)]
    (image,), (logits,) = proto.graph.input, proto.graph.output
    assert (image.name, logits.name) == ("pixel_values", "logits")
    assert [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim] == ["batch", 3, 32, 48]
    assert [d.dim_param or d.dim_value for d in logits.type.tensor_type.shape.dim] == ["batch", 5]
    assert image.type.tensor_type.elem_type == logits.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    onnx.checker.check_model(proto, full_check=True)
    assert all(not tensor.external_data for tensor in proto.graph.initializer)


def test_card_travels_inside_and_beside(exported: Any, packed: Any) -> None:
    inside = json.loads({p.key: p.value for p in exported.proto.metadata_props}["vtk"])
    assert inside == json.loads((exported.out / "model.json").read_text(encoding="utf-8"))
    assert inside["classes"] == ["a", "b", "c", "d", "é"]
    assert inside["input"] == json.loads(packed.card.to_json())["input"]
    assert inside["base"] is None


def test_file_keeps_no_paths_of_this_machine(exported: Any) -> None:
    data = (exported.out / "model.onnx").read_bytes()
    assert b"site-packages" not in data
    assert b".py" not in data


def test_gate_ran_on_different_images_at_every_batch(exported: Any) -> None:
    rows = exported.result["verified"]
    assert [row["batch"] for row in rows] == [1, 2, 3, 7, 16]
    assert all(row["passed"] and row["compared"] + row["excluded"] == row["batch"] for row in rows)
    assert all(0 < row["error_plain"] <= row["bound"] for row in rows)
    assert exported.result["size_bytes"] == (exported.out / "model.onnx").stat().st_size
    assert exported.result["images"].startswith("6 images of ")
    assert exported.result["images"].endswith("23 smoothed random images (seed 0)")


def test_stdout_is_one_json_object_and_the_exporter_is_silent(exported: Any) -> None:
    assert exported.stdout.count("\n") == 1
    assert "argmax agreed" in exported.stderr
    assert "[torch.onnx]" not in exported.stderr
    assert "Warning" not in exported.stderr
    assert _names(exported.out) == FILES


def test_static_batch_and_opset(exported_static: Any, packed: Any) -> None:
    proto = exported_static.proto
    assert proto.opset_import[0].version == exported_static.result["opset"] == 20
    for value in (proto.graph.input[0], proto.graph.output[0]):
        assert value.type.tensor_type.shape.dim[0].dim_value == 2
    assert [row["batch"] for row in exported_static.result["verified"]] == [2]
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        expected = packed.model()(images)
    np.testing.assert_allclose(_run(exported_static.out, images), expected.numpy(), atol=1e-3)


def _wrong_weights(proto: onnx.ModelProto) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == "head.weight")
    value = numpy_helper.to_array(tensor).copy()
    value[0, 0] += 0.5
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def _other_opset(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].version = 19


def _after_logits(proto: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    """Rename the output of the graph to `raw` and let ``nodes`` make `logits` of it."""
    for node in proto.graph.node:
        node.output[:] = ["raw" if name == "logits" else name for name in node.output]
    proto.graph.node.extend(nodes)


def _rows_reversed(proto: onnx.ModelProto) -> None:
    for name, value in (("start", -1), ("end", -(2**31)), ("axis", 0), ("step", -1)):
        proto.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    _after_logits(proto, helper.make_node("Slice", ["raw", "start", "end", "axis", "step"], ["logits"]))


def _first_row_repeated(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes"))
    nodes = [helper.make_node("Gather", ["raw", "zero"], ["first"], axis=0),
             helper.make_node("Unsqueeze", ["first", "axes"], ["row"]),
             helper.make_node("Shape", ["raw"], ["shape"]),
             helper.make_node("Expand", ["row", "shape"], ["logits"])]  # fmt: skip
    _after_logits(proto, *nodes)


def _not_a_number(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(np.array(np.nan, np.float32), "nan"))
    _after_logits(proto, helper.make_node("Add", ["raw", "nan"], ["logits"]))


def _axis_without_a_name(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].type.tensor_type.shape.dim[0].Clear()


def _other_name(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.output[:] = ["scores" if name == "logits" else name for name in node.output]
    proto.graph.output[0].name = "scores"


def _not_a_graph(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].input[0] = "nowhere"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_wrong_weights, "batch 1: max error"),
        (_other_opset, "opset 18 was asked for"),
        (_rows_reversed, "batch 2: max error"),
        (_first_row_repeated, "batch 2: max error"),
        (_not_a_number, "max error nan"),
        (_axis_without_a_name, "`logits` has the shape ['?', 5]"),
        (_other_name, "expected `logits` alone"),
        (_not_a_graph, "onnx.checker refuses"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_wrong_file_is_exit_4_and_not_kept(
    packed: Any, fake_exporter: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: Fault, message: str
) -> None:
    fake_exporter(fault)
    assert main(["export", "onnx", str(packed.path), "--out", str(tmp_path / "new")]) == 4
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_batch_baked_into_the_graph_is_found(
    packed: Any, exported_static: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    proto = exported_static.proto
    proto.graph.ClearField("value_info")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"  # what the graph says is not what it does
    monkeypatch.setattr("vtk_export.onnx.build.convert", lambda *args, **kwargs: proto)
    assert main(["export", "onnx", str(packed.path), "--out", str(tmp_path / "new"), "--opset", "20"]) == 4
    assert "batch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_the_earlier_one_as_it_was(packed: Any, fake_exporter: Any, tmp_path: Path) -> None:
    fake_exporter()
    out = tmp_path / "out"
    argv = ["export", "onnx", str(packed.path), "--out", str(out)]
    assert main(argv) == 0
    before = {name: (out / name).read_bytes() for name in _names(out)}
    fake_exporter(_wrong_weights)
    assert main(argv) == 4
    assert {name: (out / name).read_bytes() for name in _names(out)} == before


def test_an_exporter_that_fails_is_exit_4(
    packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        print("chatter")
        raise RuntimeError("no decomposition for aten.strange\nmore")

    monkeypatch.setattr(torch.onnx, "export", fail)
    assert main(["export", "onnx", str(packed.path), "--out", str(tmp_path / "new")]) == 4
    printed = capsys.readouterr()
    assert "cannot convert FusedViT: no decomposition for aten.strange" in printed.err
    assert "chatter" not in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []


def test_large_weights_go_beside_and_leave_nothing_stale(
    packed: Any, fake_exporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_exporter()
    out = tmp_path / "out"
    argv = ["export", "onnx", str(packed.path), "--out", str(out)]
    monkeypatch.setattr("vtk_export.output_folder.INLINE_LIMIT", 1000)
    for _ in range(2):
        assert main(argv) == 0
        assert _names(out) == ["README.md", "model.json", "model.onnx", "model.onnx.data"]
        images = torch.randn(3, 3, 32, 48)
        with torch.no_grad():
            np.testing.assert_allclose(_run(out, images), packed.model()(images).numpy(), atol=1e-3)
    monkeypatch.setattr("vtk_export.output_folder.INLINE_LIMIT", INLINE_LIMIT)
    assert main(argv) == 0
    assert _names(out) == FILES


@pytest.mark.parametrize(
    "argv", [("--dtype", "fp16"), ("--int8", "dynamic"), ("--with-preproc",)], ids=["fp16", "int8", "preproc"]
)
def test_large_weights_of_every_kind_go_beside_and_the_folder_can_be_moved(
    calm: Any, fake_calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    fake_calm()
    monkeypatch.setattr("vtk_export.output_folder.INLINE_LIMIT", 1000)
    out = tmp_path / "out"
    assert main(["export", "onnx", str(calm.path), "--out", str(out), "--threads", "1", *argv]) == 0
    assert _names(out) == ["README.md", "model.json", "model.onnx", "model.onnx.data"]
    proto = onnx.load(out / "model.onnx", load_external_data=False)
    places = {e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"}
    assert places == {"model.onnx.data"}
    moved = tmp_path / "elsewhere" / "model"
    moved.parent.mkdir()
    out.rename(moved)
    session = onnxruntime.InferenceSession(moved / "model.onnx", providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    shape = (2, 40, 50, 3) if entry.name == "images" else (2, 3, 32, 48)
    kind = {"tensor(uint8)": np.uint8, "tensor(float16)": np.float16}.get(entry.type, np.float32)
    (logits,) = session.run(["logits"], {entry.name: np.ones(shape, kind)})
    assert logits.shape == (2, 5)
    assert np.isfinite(logits).all()


def test_foreign_files_are_never_touched(
    packed: Any, fake_exporter: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_exporter()
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    argv = ["export", "onnx", str(packed.path), "--out", str(out)]
    assert main(argv) == 3
    assert "holds files that are not from an export (thesis.txt)" in capsys.readouterr().err
    assert _names(out) == ["thesis.txt"]
    (out / ".export-tmp-999999999").mkdir()  # of an export that was killed
    assert main([*argv, "--overwrite"]) == 0
    assert _names(out) == [*FILES, "thesis.txt"]
    assert main(["export", "onnx", str(packed.path), "--out", str(out / "thesis.txt")]) == 3


def test_eval_of_a_pack_on_onnx_runtime_agrees_with_torch(
    packed: Any, fake_exporter: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_exporter()
    argv = ["eval", str(packed.path), str(packed.photos), "--backend", "ort-cpu", "--json"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["provider"], result["agreement"]) == ("CPUExecutionProvider", 1.0)
    assert "exported to ONNX and verified" in printed.err


def test_an_onnx_is_not_exported_again(exported: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "onnx", str(exported.out), "--out", str(tmp_path / "x")]) == 2
    assert "is already an ONNX file" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"opset": 17}, {"opset": 23}, {"static_batch": 0}, {"num_classes": 0}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(options)).replace("_", "-")):
        OnnxCommand(source="x", out=Path("y"), **options)


def test_targets_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "onx"]) == 2
    assert "did you mean `vtk export onnx`" in capsys.readouterr().err
    assert main(["export", "--help"]) == 0
    assert "onnx" in capsys.readouterr().out

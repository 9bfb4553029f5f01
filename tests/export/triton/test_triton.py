"""Model repositories of Triton: configs parsed back, names, versions, and what a polling server may see."""

import dataclasses
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2

from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import DataError, UsageError, VerificationError
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.config_checks import check_name
from vtk_export.triton.files import label_lines, write_model_files
from vtk_export.triton.pbtxt import build, graph_slots, task_slots, write_text
from vtk_export.triton.publish import draft

NASTY = ('a"b', "a'b", "a\\b", "a\nb", "a/b", "a b", 'x" }\nbackend: "evil', "é\u2028ü", "\t", "a.b", "\udcff", "#")


def config(backend: str = "onnxruntime", **options: Any) -> TritonCommand:
    return TritonCommand(out=Path("models"), sources=("pack",), backend=backend, **options)  # type: ignore[arg-type]


def parse(text: str) -> Any:
    """Parse as a server does, with protobuf's own parser."""
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def graph(path: Path, kind: int = TensorProto.FLOAT, batch: int | str = "batch", side: int | str = 8) -> Path:
    image = helper.make_tensor_value_info("pixel_values", kind, [batch, 3, side, 8])
    logits = helper.make_tensor_value_info("logits", kind, [batch, 3])
    node = helper.make_node("ReduceMean", ["pixel_values"], ["logits"], axes=[2, 3], keepdims=0)
    onnx.save(helper.make_model(helper.make_graph([node], "g", [image], [logits])), path)
    return path


def made(path: Path, **options: Any) -> Any:
    inputs, outputs, batched = graph_slots(path, labels="logits")
    return parse(write_text(build("m", config(**options), inputs, outputs, batched=batched)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("FLOAT", "TYPE_FP32"), ("FLOAT16", "TYPE_FP16"), ("BFLOAT16", "TYPE_BF16"), ("UINT8", "TYPE_UINT8")],
)
def test_the_type_is_the_graph_s(tmp_path: Path, kind: str, name: str) -> None:
    found = made(graph(tmp_path / "m.onnx", TensorProto.DataType.Value(kind)))
    assert [model_config_pb2.DataType.Name(e.data_type) for e in (*found.input, *found.output)] == [name, name]


def test_a_symbolic_batch_is_left_out_of_the_dims(tmp_path: Path) -> None:
    found = made(graph(tmp_path / "m.onnx"), max_batch_size=8, max_queue_delay_us=250, instances=2)
    assert list(found.input[0].dims) == [3, 8, 8] and list(found.output[0].dims) == [3]
    assert found.max_batch_size == 8 and found.backend == "onnxruntime"
    assert found.dynamic_batching.max_queue_delay_microseconds == 250
    assert list(found.dynamic_batching.preferred_batch_size) == []
    assert [(g.count, g.kind) for g in found.instance_group] == [(2, model_config_pb2.ModelInstanceGroup.KIND_AUTO)]
    assert found.output[0].label_filename == "labels.txt" and found.version_policy.latest.num_versions == 1


def test_a_fixed_batch_is_in_the_dims_and_max_batch_size_is_an_explicit_zero(tmp_path: Path) -> None:
    path = graph(tmp_path / "m.onnx", batch=4)
    inputs, outputs, batched = graph_slots(path, labels="logits")
    text = write_text(build("m", config(static_batch=4, warmup=True), inputs, outputs, batched=batched))
    found = parse(text)
    assert list(found.input[0].dims) == [4, 3, 8, 8] and list(found.output[0].dims) == [4, 3]
    assert re.findall(r"^max_batch_size: 0$", text, re.M) and not found.HasField("dynamic_batching")
    assert [w.batch_size for w in found.model_warmup] == [1]


def test_a_free_axis_besides_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="pixel_values"):
        graph_slots(graph(tmp_path / "m.onnx", side="any"), labels=None)


def test_warm_up_is_of_one_and_of_the_most(tmp_path: Path) -> None:
    found = made(graph(tmp_path / "m.onnx"), warmup=True, max_batch_size=6)
    assert [w.batch_size for w in found.model_warmup] == [1, 6]
    assert [list(w.inputs["pixel_values"].dims) for w in found.model_warmup] == [[3, 8, 8]] * 2


def test_one_image_at_a_time_needs_no_batcher(tmp_path: Path) -> None:
    found = made(graph(tmp_path / "m.onnx"), max_batch_size=1)
    assert found.max_batch_size == 1 and not found.HasField("dynamic_batching")


@pytest.mark.parametrize(
    ("sizes", "dims"), [([(3, 8, 8), (3, 8, 8)], [3, 8, 8]), ([(3, 8, 8), (3, 8, 16)], [3, 8, -1])], ids=["one", "two"]
)
def test_tasks_of_several_sizes_leave_those_axes_free(sizes: list[tuple[int, int, int]], dims: list[int]) -> None:
    options = config("python", warmup=True)
    found = parse(write_text(build("m", options, *task_slots(sizes, 7), warm=(3, 8, 8))))
    kinds = {e.name: model_config_pb2.DataType.Name(e.data_type) for e in (*found.input, *found.output)}
    assert kinds == {"pixel_values": "TYPE_FP32", "task": "TYPE_STRING", "logits": "TYPE_FP32", "label": "TYPE_STRING",
                     "score": "TYPE_FP32"}  # fmt: skip
    assert list(found.input[0].dims) == dims and list(found.input[1].dims) == [1]
    assert found.backend == "python"
    assert list(found.model_warmup[0].inputs["pixel_values"].dims) == [3, 8, 8]
    assert found.model_warmup[0].inputs["task"].input_data_file == "task"


@pytest.mark.parametrize("name", [*NASTY[:-3], "..", ".hidden", "a" * 65, "", "-"])
def test_a_model_name_that_could_be_anything_else_is_refused(name: str) -> None:
    if name == "a.b":
        assert check_name(name) == name
        return
    with pytest.raises(UsageError, match="--name NAME"):
        check_name(name)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=6))
def test_the_i_th_line_of_the_labels_is_the_i_th_class(classes: list[str]) -> None:
    text = label_lines(tuple(classes)).encode("utf-8", "surrogatepass")
    assert text.endswith(b"\n") and text.count(b"\n") == len(classes)
    for line, name in zip(text[:-1].split(b"\n"), classes, strict=True):
        if name.isprintable() and name.isascii():
            assert line.decode() == name


def test_class_names_reach_labels_and_client_and_never_the_config(tmp_path: Path) -> None:
    card = Card(ModelSpec("m"), InputSpec(8, 8), NASTY)
    inputs, outputs, _ = graph_slots(graph(tmp_path / "m.onnx"), labels="logits")
    message = build("m", config(), inputs, outputs)
    write_model_files(tmp_path, message, {"m": card}, ["logits"])
    assert parse((tmp_path / "config.pbtxt").read_text()) == message
    assert message.backend == "onnxruntime" and "evil" not in (tmp_path / "config.pbtxt").read_text()
    lines = (tmp_path / "labels.txt").read_bytes().split(b"\n")
    assert len(lines) == len(NASTY) + 1 and lines[3] == b"a\\nb" and lines[-3] == b"\xff"
    assert tuple(json.loads((tmp_path / "client.json").read_text())["tasks"]["m"]["classes"]) == NASTY
    compile((tmp_path / "client.py").read_text(), "client.py", "exec")
    several = dataclasses.replace(card, multi_label=True)
    (tmp_path / "2").mkdir()
    write_model_files(tmp_path / "2", message, {"m": several}, ["logits"])
    assert json.loads((tmp_path / "2" / "client.json").read_text())["tasks"]["m"]["multi_label"] is True


def put(repo: Path, text: str = "weights", **options: Any) -> int:
    """Publish a model of one small file."""
    with draft(repo, "m") as found:
        found.at.mkdir()
        (found.at / "model.onnx").write_text(text)
        message = build("m", config(**options), *task_slots([(3, 8, 8)], 2))
        (found.folder / "config.pbtxt").write_text(write_text(message))
        return found.version


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_another_export_is_the_next_version_and_earlier_ones_stay(tmp_path: Path) -> None:
    repo = tmp_path / "models"
    assert [put(repo, "one"), put(repo, "two"), put(repo, "three", instances=2)] == [1, 2, 3]
    assert tree(repo) == ["m", "m/1", "m/1/model.onnx", "m/2", "m/2/model.onnx", "m/3", "m/3/model.onnx",
                          "m/config.pbtxt"]  # fmt: skip
    assert [(repo / "m" / v / "model.onnx").read_text() for v in "123"] == ["one", "two", "three"]
    assert parse((repo / "m" / "config.pbtxt").read_text()).instance_group[0].count == 2
    assert os.listdir(tmp_path) == ["models"]


def test_a_failure_leaves_the_repository_as_it_was(tmp_path: Path) -> None:
    repo = tmp_path / "models"
    with pytest.raises(ZeroDivisionError), draft(repo, "m") as found:
        found.at.mkdir()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    put(repo)
    before = tree(repo)
    with pytest.raises(ZeroDivisionError), draft(repo, "m") as found:
        (found.folder / "config.pbtxt").write_text("half")
        raise ZeroDivisionError
    assert tree(repo) == before and os.listdir(tmp_path) == ["models"]


def test_a_server_that_looks_all_the_time_never_sees_half_a_model(tmp_path: Path) -> None:
    repo = tmp_path / "models"
    put(repo)
    wrong: list[str] = []
    seen: set[int] = set()
    done = threading.Event()

    def which() -> tuple[int, int]:
        found = os.stat(repo / "m")
        return found.st_ino, found.st_ctime_ns

    def look() -> None:
        while not done.is_set():
            if (names := os.listdir(repo)) != ["m"]:
                wrong.append(f"{names}")
            before = which()
            versions = [name for name in os.listdir(repo / "m") if name.isdecimal()]
            count = parse((repo / "m" / "config.pbtxt").read_text()).instance_group[0].count
            if which() != before:
                continue  # looked at two models, each of them whole
            if len(versions) != count:
                wrong.append(f"{versions} with a config of {count}")
            seen.add(count)

    thread = threading.Thread(target=look)
    thread.start()
    for version in range(2, 12):
        assert put(repo, instances=version) == version
        time.sleep(0.02)
    done.set()
    thread.join()
    assert not wrong and len(seen) > 1


def test_two_exports_at_once_do_not_overwrite_each_other(tmp_path: Path) -> None:
    repo = tmp_path / "models"
    put(repo)
    with pytest.raises(DataError, match="meanwhile"), draft(repo, "m") as slow:
        slow.at.mkdir()
        (repo / "m" / "2").mkdir()  # another process was quicker
    assert tree(repo / "m") == ["1", "1/model.onnx", "2", "config.pbtxt"]


@pytest.mark.parametrize("content", ["", 'name: "m"', "no config {", None], ids=["empty", "other", "broken", "none"])
def test_a_model_of_somebody_else_stays(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "m").mkdir()
    if content is not None:
        (tmp_path / "m" / "config.pbtxt").write_text(content)
    before = tree(tmp_path)
    with pytest.raises(DataError), draft(tmp_path, "m"):
        pass
    assert tree(tmp_path) == before


def test_folders_of_exports_that_were_killed_go(tmp_path: Path) -> None:
    (tmp_path / ".models.staging-999999999" / "m").mkdir(parents=True)
    put(tmp_path / "models")
    assert os.listdir(tmp_path) == ["models"]


def test_a_version_can_take_the_place_of_the_last(tmp_path: Path) -> None:
    repo = tmp_path / "models"
    put(repo, "one")
    put(repo, "two")
    with draft(repo, "m") as found:
        found.at.mkdir()
        (found.at / "model.onnx").write_text("new")
        (found.folder / "config.pbtxt").write_text((repo / "m" / "config.pbtxt").read_text())
        found.reuse()
    assert [(repo / "m" / v / "model.onnx").read_text() for v in "12"] == ["one", "new"]
    assert tree(repo / "m") == ["1", "1/model.onnx", "2", "2/model.onnx", "config.pbtxt"]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--out", "r"], 2, "no sources"),
        (["p", "--out", "r", "--backend", "tensorrt", "--dtype", "bf16"], 2, "--dtype bf16"),
        (["p", "--out", "r", "--backend", "tensorrt", "--server-device", "cpu"], 2, "--server-device cpu"),
        (["p", "q", "--out", "r", "--backend", "onnxruntime", "--name", "x"], 2, "NAME=SOURCE"),
        (["p", "--out", "r", "--max-batch-size", "0"], 2, "--max-batch-size"),
        (["p", "--out", "r", "--backend", "vtk", "--static-batch", "2"], 2, "--static-batch"),
        (["p", "--out", "r", "--backend", "python", "--dtype", "fp16"], 2, "--dtype"),
        (["p", "--out", "r", "--keep-io-types"], 2, "--keep-io-types"),
        (["p", "--out", "r", "--backend", "vtk", "--fuse"], 2, "--fuse"),
        (["p", "q", "--out", "r", "--img-size", "64"], 2, "--img-size"),
        (["vit_tiny_patch16_224", "--out", "r", "--name", "../up"], 2, "--name"),
        (["vit_tiny_patch16_224", "--out", "r", "--name", 'a" }'], 2, "--name"),
        (["a/b=vit_tiny_patch16_224", "--out", "r"], 2, "NAME=PACK"),
        (["nowhere/pack", "--out", "r"], 3, "does not exist"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "triton", *argv]) == code
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("most", "preferred", "shapes"), [(16, [8, 16], ("1", "8", "16")), (4, [4], ("1", "4", "4")), (1, [], "111")]
)
def test_tensorrt_gets_a_profile_of_the_batches_that_the_server_makes(
    tmp_path: Path, most: int, preferred: list[int], shapes: tuple[str, ...]
) -> None:
    path = graph(tmp_path / "m.onnx", TensorProto.FLOAT16)
    found = made(path, backend="tensorrt", dtype="fp16", max_batch_size=most, engine_cache='/e "x"')
    (engine,) = found.optimization.execution_accelerators.gpu_execution_accelerator
    assert engine.name == "tensorrt" and engine.parameters["precision_mode"] == "FP16"
    told = tuple(engine.parameters[f"trt_profile_{name}_shapes"] for name in ("min", "opt", "max"))
    assert told == tuple(f"pixel_values:{batch}x3x8x8" for batch in shapes)
    assert engine.parameters["trt_engine_cache_enable"] == "1"
    assert Path(engine.parameters["trt_engine_cache_path"]).parent == Path('/e "x"')
    assert list(found.dynamic_batching.preferred_batch_size) == preferred
    assert found.backend == "onnxruntime" and found.instance_group[0].kind == 1  # KIND_GPU


def test_an_onnx_model_in_a_repository(packed: Any, exported: Any, fake_exporter: Any, tmp_path: Path) -> None:
    fake_exporter()
    repo = tmp_path / "models"
    for _ in range(2):
        assert main(["export", "triton", f"pets={packed.path}", "--out", str(repo), "--warmup"]) == 0
    found = parse((repo / "pets" / "config.pbtxt").read_text())
    assert (found.name, list(found.input[0].dims), list(found.output[0].dims)) == ("pets", [3, 32, 48], [5])
    assert (repo / "pets" / "labels.txt").read_text() == "a\nb\nc\nd\né\n"
    proto = onnx.load(repo / "pets" / "2" / "model.onnx")
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for tensor in exported.proto.graph.initializer:
        assert np.array_equal(weights[tensor.name], onnx.numpy_helper.to_array(tensor))
    assert tree(repo / "pets" / "1") == ["model.json", "model.onnx"]

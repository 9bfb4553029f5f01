"""``--input-name`` and ``--output-name``: what other programs find in the files, and what reads the files again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.export._fake_server import Load, Tensor
from vtk.__main__ import main
from vtk.errors import DataError, UsageError
from vtk.profiling.memory_count import count_memory
from vtk.profiling.onnx_work import work_of_onnx
from vtk.runtime.backends.base import load_backend
from vtk.runtime.export_facts import Facts, read_facts
from vtk.runtime.opening import open_source
from vtk_export.graph.rename import rename_ends
from vtk_export.onnx.config import OnnxConfig
from vtk_export.tasks.config import TasksConfig
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton
from vtk_export.triton.pbtxt import read_text


@pytest.fixture(scope="session")
def renamed(packed: Any, exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names that the graph itself has: the input is called as a weight, the output as the input is here."""
    out = tmp_path_factory.mktemp("renamed") / "onnx"
    words = ["--input-name", "norm.weight", "--output-name", "pixel_values"]
    with pytest.MonkeyPatch.context() as patch:  # torch's exporter has done this once
        patch.setattr("vtk_export.onnx.build.convert", lambda *args, **kwargs: exported.proto)
        assert main(["export", "onnx", str(packed.path), "--out", str(out), "--no-fuse", *words]) == 0
    return out


def test_a_plain_session_finds_the_names_and_gives_torch_s_values(renamed: Path, packed: Any) -> None:
    session = ort.InferenceSession(renamed / "model.onnx", providers=["CPUExecutionProvider"])
    assert [v.name for v in session.get_inputs()] == ["norm.weight"]
    assert [v.name for v in session.get_outputs()] == ["pixel_values"]
    images = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    (logits,) = session.run(None, {"norm.weight": images.numpy()})
    with torch.no_grad():
        wanted = packed.model()(images)
    np.testing.assert_allclose(logits, wanted.numpy(), atol=1e-4 * float(wanted.abs().max()))
    page = (renamed / "README.md").read_text()
    assert 'session.run(names, {"norm.weight": prepare(path)})' in page and "names = ['pixel_values']" in page
    onnx.checker.check_model(renamed / "model.onnx", full_check=True)


@pytest.mark.slow
def test_logits_and_features_have_a_name_each(packed: Any, tmp_path: Path) -> None:
    words = ["--output", "both", "--input-name", "x", "--output-name", "images", "--output-name", "features=embedding"]
    assert main(["export", "onnx", str(packed.path), "--out", str(tmp_path / "x"), "--no-fuse", *words]) == 0
    session = ort.InferenceSession(tmp_path / "x" / "model.onnx", providers=["CPUExecutionProvider"])
    images, model = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(1)), packed.model()
    logits, features = session.run(["images", "embedding"], {"x": images.numpy()})
    with torch.no_grad():
        wanted = model(images), model.forward_head(model.forward_features(images), pre_logits=True)
    np.testing.assert_allclose(logits, wanted[0].numpy(), atol=1e-4 * float(wanted[0].abs().max()))
    np.testing.assert_allclose(features, wanted[1].numpy(), atol=1e-4 * float(wanted[1].abs().max()))


@pytest.mark.parametrize("name", ["ort-cpu", "openvino"])
def test_back_ends_run_renamed_files_by_this_toolkit_s_names(renamed: Path, packed: Any, name: str) -> None:
    if name == "openvino":
        pytest.importorskip("openvino")
    source = open_source(renamed)
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(2))
    backend = load_backend(name, source, dtype="fp32", threads=1, **({"cache": False} if name == "openvino" else {}))
    found = backend.run({"pixel_values": images})
    with torch.no_grad():
        wanted = packed.model()(images)
    assert list(found) == ["logits"]
    torch.testing.assert_close(found["logits"], wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    counted = [count_memory(backend, lambda: None, {"pixel_values": images[:n]}, source.path) for n in (1, 2)]
    assert counted[0].weights == counted[1].weights and counted[1].activations > 1.9 * counted[0].activations
    backend.close()


def test_preprocessing_takes_the_name_of_the_raw_images(
    packed: Any, exported: Any, fake_exporter: Callable[[], None], tmp_path: Path
) -> None:
    fake_exporter(None)  # type: ignore[call-arg]
    words = ["--with-preproc", "--softmax", "--input-name", "pixel_values", "--output-name", "shares"]
    assert main(["export", "onnx", str(packed.path), "--out", str(tmp_path / "x"), "--no-fuse", *words]) == 0
    session = ort.InferenceSession(tmp_path / "x" / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].name == "pixel_values" and session.get_inputs()[0].type == "tensor(uint8)"
    (shares,) = session.run(["shares"], {"pixel_values": np.zeros((1, 40, 60, 3), np.uint8)})
    assert abs(shares.sum() - 1) < 1e-5
    profile = ["profile", str(tmp_path / "x" / "model.onnx"), "--backends", "ort-cpu", "--batch-sizes", "1"]
    assert main([*profile, "--duration", "0.01"]) == 0
    # of what is multiplied, not of resizing, whatever the graph calls the images between the two
    assert work_of_onnx(tmp_path / "x" / "model.onnx", (3, 32, 48)) == work_of_onnx(exported.out / "model.onnx")


def test_what_has_a_new_name_already_makes_room_also_inside_of_branches() -> None:
    floats = [TensorProto.FLOAT, [2]]
    branch = helper.make_graph(
        [helper.make_node("Add", ["a", "w"], ["inner"])], "then", [], [helper.make_tensor_value_info("inner", *floats)]
    )
    other = helper.make_graph(
        [helper.make_node("Mul", ["a", "b"], ["inner2"])], "else", [],
        [helper.make_tensor_value_info("inner2", *floats)],
    )  # fmt: skip
    nodes = [helper.make_node("If", ["flag"], ["hidden"], then_branch=branch, else_branch=other),
             helper.make_node("Neg", ["hidden"], ["y"])]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
                     *(helper.make_tensor_value_info(name, *floats) for name in "ab")],
        [helper.make_tensor_value_info("y", *floats)], [numpy_helper.from_array(np.float32([10, 20]), "w")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    rename_ends(proto, {"a": "b", "b": "a", "y": "w", "flag": "inner", "absent": "hidden"})
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [v.name for v in session.get_inputs()] == ["inner", "b", "a"]
    feeds = {"b": np.float32([1, 2]), "a": np.float32([3, 4])}
    for flag, wanted in ((True, [-11, -22]), (False, [-3, -8])):
        assert session.run(["w"], {"inner": np.array(flag), **feeds})[0].tolist() == wanted


def foreign(path: Path, image: list[Any], outputs: dict[str, list[Any]], kind: int = TensorProto.FLOAT) -> Path:
    """A file of another program, whose weights are among its inputs, as old ones have it."""
    shape = [3, *image[1:]]
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    nodes = [helper.make_node("Cast", ["input.1"], ["floats"], to=TensorProto.FLOAT),
             helper.make_node("Conv", ["floats", "w"], ["maps"]),
             *(helper.make_node("Flatten", ["maps"], [name]) for name in outputs)]  # fmt: skip
    inputs = [helper.make_tensor_value_info("w", TensorProto.FLOAT, shape),
              helper.make_tensor_value_info("input.1", kind, image)]  # fmt: skip
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    graph = helper.make_graph(nodes, "g", inputs, ends, [numpy_helper.from_array(weight, "w")])
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


def test_a_file_of_another_program_runs_whatever_its_one_input_and_output_are_called(tmp_path: Path) -> None:
    path = foreign(tmp_path / "m.onnx", ["N", 3, 8, 8], {"191": ["N", 3]})
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    (wanted,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"input.1": images.numpy()})
    source = open_source(path)
    assert source.facts.names == {"pixel_values": "input.1", "logits": "191"} and not source.described
    backend = load_backend("ort-cpu", source, threads=1)
    assert backend.run({"pixel_values": images})["logits"].numpy().tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("image", "outputs", "kind", "said"),
    [
        (["N", 3, 8, 8], {"a": ["N", 3], "b": ["N", 3]}, TensorProto.FLOAT, "one output"),
        (["N", 8, 8, 3], {"a": ["N", 3]}, TensorProto.FLOAT, "channels, height, width"),
        (["N", 3, 8, 8], {"a": ["N", 3]}, TensorProto.UINT8, "one input of images"),
    ],
)
def test_a_file_whose_ends_are_not_clear_is_refused(
    tmp_path: Path, image: list[Any], outputs: dict[str, list[Any]], kind: int, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        open_source(foreign(tmp_path / "m.onnx", image, outputs, kind))


def test_facts_without_names_are_written_as_before_and_doubled_names_refused(tmp_path: Path) -> None:
    assert Facts(names={}).props() == {} and "names" not in json.loads(Facts(precision="fp16").props()["vtk.export"])
    written = Facts(names={"logits": "y"}).props()
    assert read_facts(written, tmp_path).name("logits") == "y" and read_facts(written, tmp_path).term("y") == "logits"
    with pytest.raises(DataError, match="one name for two"):
        read_facts(Facts(names={"logits": "y", "features": "y"}).props(), tmp_path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda out: OnnxConfig(out=out, input_name="1x"), "begins with a letter"),
        (lambda out: OnnxConfig(out=out, input_name="a b"), "begins with a letter"),
        (lambda out: OnnxConfig(out=out, input_name="x", output_name="x"), "another tensor"),
        (lambda out: OnnxConfig(out=out, input_name=("x", "y")), "one name for each"),
        (lambda out: OnnxConfig(out=out, input_name="logits=x"), "no input"),
        (lambda out: OnnxConfig(out=out, output_name="features=x"), "no `features`"),
        (lambda out: OnnxConfig(out=out, input_name="logits"), "two of the model's"),
        (lambda out: OnnxConfig(out=out, softmax=True, output_name="logits=x"), "`probabilities`"),
        (lambda out: TasksConfig(out=out, input_name="task=t"), "no `task`"),
        (lambda out: TritonConfig(out=out, input_name="a,b"), "begins with a letter"),
    ],
)
def test_names_that_cannot_be_are_refused_in_one_line(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_in_python_has_the_names_of_its_config(
    packed: Any, fake_exporter: Callable[..., None], tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_exporter()
    monkeypatch.setenv("VTK_PREPACKED", str(tmp_path / "packed"))
    config = TritonConfig(
        out=tmp_path / "models", backend="python", fuse=False, name="m", input_name=("x", "task=what"),
        output_name=("scores", "label=kind"),
    )  # fmt: skip
    export_triton(packed.path, config, show=False)
    folder = tmp_path / "models" / "m"
    message = read_text((folder / "config.pbtxt").read_text())
    assert [e.name for e in (*message.input, *message.output)] == ["x", "what", "scores", "kind", "score"]
    about = json.loads((folder / "client.json").read_text())
    assert about["input"] == "pixel_values" and about["outputs"] == ["logits", "label", "score"] and about["has_task"]
    model = load("tasks_model").TritonPythonModel()
    told = {key: {"string_value": message.parameters[key].string_value} for key in message.parameters}
    model.initialize({"model_repository": str(folder), "model_version": "1", "model_name": "m",
                      "model_config": json.dumps({"parameters": told})})  # fmt: skip
    images = torch.randn(1, 3, 32, 48, generator=torch.Generator().manual_seed(3))
    task = np.array([[next(iter(about["tasks"])).encode()]], np.object_)
    (answer,) = model.execute([{"x": Tensor("x", images.numpy()), "what": Tensor("what", task)}])
    assert sorted(answer.found) == ["kind", "score", "scores"], answer.error
    with torch.no_grad():
        wanted = packed.model()(images)
    np.testing.assert_allclose(answer.found["scores"], wanted.numpy(), atol=1e-4 * float(wanted.abs().max()))
    model.finalize()


def test_an_ensemble_keeps_what_lies_between_its_steps_apart_from_the_names() -> None:
    from vtk_export.triton.ensemble_config import build_ensemble
    from vtk_export.triton.pbtxt import Slot, messages

    pb, floats = messages(), messages().DataType.Value("TYPE_FP32")
    first, second = pb.ModelConfig(name="p", max_batch_size=8), pb.ModelConfig(name="c", max_batch_size=8)
    for name in ("encoded", "images"):
        first.input.add(name=name, data_type=floats, dims=[1])
    first.output.add(name="pixel_values", data_type=floats, dims=[1])
    second.input.add(name="pixel_values", data_type=floats, dims=[1])
    second.output.add(name="logits", data_type=floats, dims=[1])
    slots = [Slot("logits", "TYPE_FP32", (1,))]
    whole = build_ensemble("m", first, second, slots, {"images": "pixel_values", "logits": "y"})
    assert [e.name for e in whole.input] == ["encoded", "pixel_values"] and whole.output[0].name == "y"
    prepare, classify = whole.ensemble_scheduling.step
    assert dict(prepare.input_map) == {"encoded": "encoded", "images": "pixel_values"}
    between = prepare.output_map["pixel_values"]
    assert between == classify.input_map["pixel_values"] and between not in ("encoded", "pixel_values", "y")
    assert dict(classify.output_map) == {"logits": "y"}

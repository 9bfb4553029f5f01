"""Models for OpenVINO: our Python code in a stand-in of the server, and configs against what OpenVINO reads."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.export._fake_server import Load, TritonError, request
from vtk.errors import UsageError
from vtk_export.openvino.export import export_openvino
from vtk_export.triton.config import TritonCommand, TritonConfig
from vtk_export.triton.export import export_triton
from vtk_export.triton.pbtxt import read_text

openvino = pytest.importorskip("openvino")


@pytest.fixture(scope="module")
def repo(packed: Any, exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("repo") / "models"
    with pytest.MonkeyPatch.context() as patch:  # torch's exporter has done this once
        patch.setattr("vtk_export.onnx.build.convert", lambda *args, **kwargs: exported.proto)
        write(packed, out)
    yield out


def write(packed: Any, out: Path) -> None:
    common: dict[str, Any] = {"out": out, "fuse": False, "precision": "fp32"}
    results: list[Any] = []

    def first(*args: Any, **options: Any) -> Any:
        results.append(export_openvino(*args, **options))
        return results[0]

    def again(source: Any, config: Any, **options: Any) -> Any:  # the same file for the other server
        shutil.copytree(out / "p" / "1" / "0", config.out)
        (config.out / "README.md").touch()
        return results[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtk_export.triton.openvino_models.export_openvino", first)
        ours = TritonConfig(backend="python", python_runtime="openvino", name="p", **common)
        export_triton(packed.path, ours, show=False)
        patch.setattr("vtk_export.triton.openvino_models.export_openvino", again)
        theirs = TritonConfig(backend="openvino", name="o", instances=2, server_threads=2, **common)
        export_triton(packed.path, theirs, show=False)


def served(load: Load, folder: Path, **told: str) -> Any:
    model = load("openvino_model").TritonPythonModel()
    parameters = {key: {"string_value": value} for key, value in told.items()}
    config = {"parameters": parameters, "instance_group": [{"count": 1}]}
    model.initialize({"model_repository": str(folder), "model_version": "1", "model_name": folder.name,
                      "model_config": json.dumps(config)})  # fmt: skip
    return model


def test_the_code_of_the_python_back_end_gives_torch_s_logits(repo: Path, packed: Any, load: Load) -> None:
    model = served(load, repo / "p", threads="1", precision="fp32")
    (task,) = json.loads((repo / "p" / "client.json").read_text())["tasks"]
    images = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(4))
    sent = [request(images[:1].numpy(), [task]), request(images[1:].numpy(), [task] * 2)]
    answers = model.execute(sent)
    found = np.concatenate([each.found["logits"] for each in answers])
    with torch.no_grad():
        wanted = packed.model()(images).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
    infer = model.requests[task]

    def fails_together(inputs: Any, **options: Any) -> Any:
        if len(inputs[0]) > 2:
            raise RuntimeError("too many")
        return infer.infer(inputs, **options)

    model.requests[task] = SimpleNamespace(infer=fails_together)  # each request then runs alone, before any is answered
    again = np.concatenate([each.found["logits"] for each in model.execute(sent)])
    np.testing.assert_allclose(again, wanted, atol=1e-4 * np.abs(wanted).max())
    bad = images[:1].clone()
    bad[0, 0, 0, 0] = float("inf")
    with pytest.raises(TritonError, match="infinite"):
        raise model.execute([request(bad.numpy(), [task])])[0].error
    model.finalize()


def test_bf16_that_the_processor_lacks_is_fp32_and_said(
    repo: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    real = openvino.Core

    class Core:
        def get_property(self, device: str, name: str) -> list[str]:
            return ["FP32", "INT8"]

        def compile_model(self, path: str, device: str, settings: dict[str, Any]) -> Any:
            asked.append(settings)
            return real().compile_model(path, device, settings)

    monkeypatch.setattr("openvino.Core", Core)
    served(load, repo / "p", threads="2", precision="bf16").finalize()
    said = sys.modules["triton_python_backend_utils"].Logger.said
    assert asked[0]["INFERENCE_PRECISION_HINT"] == "f32" and asked[0]["INFERENCE_NUM_THREADS"] == 2
    assert any("no bf16" in line for line in said) and any("products in fp32, 2 threads" in line for line in said)


def test_a_damaged_file_is_not_compiled(repo: Path, load: Load, tmp_path: Path) -> None:
    shutil.copytree(repo / "p", tmp_path / "p")
    weights = tmp_path / "p" / "1" / "0" / "model.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(RuntimeError, match="damaged"):
        served(load, tmp_path / "p")


def test_the_config_for_the_server_s_back_end_fits_the_file(repo: Path, packed: Any) -> None:
    config = read_text((repo / "o" / "config.pbtxt").read_text())
    assert (config.backend, config.default_model_filename, config.max_batch_size) == ("openvino", "model.xml", 0)
    model = openvino.Core().read_model(repo / "o" / "1" / config.default_model_filename)
    types = {"FP32": 11, "UINT8": 2}  # of the server's DataType
    for entries, values in ((config.input, model.inputs), (config.output, model.outputs)):
        for entry, value in zip(entries, values, strict=True):
            assert entry.name in value.names and entry.data_type == types["FP32"]
            assert value.element_type == openvino.Type.f32
            assert [d.get_length() if d.is_static else -1 for d in value.partial_shape] == list(entry.dims)
    told = {key: value.string_value for key, value in config.parameters.items()}
    # the parameters that the back-end's README lists
    assert {k: told[k] for k in ("NUM_STREAMS", "INFERENCE_NUM_THREADS", "PERFORMANCE_HINT")} == {
        "NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2", "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    assert "HINT_BF16" not in told and config.instance_group[0].count == 2


def test_the_config_for_openvino_model_server_is_one_that_openvino_takes(repo: Path) -> None:
    (entry,) = json.loads((repo / "o" / "ovms.json").read_text())["model_config_list"]
    model = entry["config"]
    assert (model["name"], model["base_path"], model["nireq"]) == ("o", "/models/o", 2)
    settings = model["plugin_config"]
    compiled = openvino.Core().compile_model(repo / "o" / "1" / "model.xml", model["target_device"], settings)
    assert compiled.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32
    assert settings["NUM_STREAMS"] == settings["INFERENCE_NUM_THREADS"] == "2"
    page = (repo / "o" / "README.md").read_text()
    assert "Neither server was run" in page and "--config_path /models/o/ovms.json" in page


@pytest.mark.slow
def test_names_and_raw_images_are_in_the_file_and_the_config(packed: Any, tmp_path: Path) -> None:
    words: dict[str, Any] = {"fuse": False, "precision": "fp32", "with_preproc": True, "softmax": True}
    config = TritonConfig(out=tmp_path, backend="openvino", name="o", input_name="x", output_name="shares", **words)
    export_triton(packed.path, config, show=False)
    message = read_text((tmp_path / "o" / "config.pbtxt").read_text())
    model = openvino.Core().read_model(tmp_path / "o" / "1" / "model.xml")
    assert [entry.name for entry in (*message.input, *message.output)] == ["x", "shares"]
    assert model.inputs[0].names == {"x"} and model.outputs[0].names == {"shares"}
    assert (message.input[0].data_type, list(message.input[0].dims)) == (2, [-1, -1, -1, 3])
    assert str(model.inputs[0].partial_shape) == "[?,?,?,3]" and model.inputs[0].element_type == openvino.Type.u8
    request = openvino.Core().compile_model(model, "CPU").create_infer_request()
    assert abs(request.infer({"x": np.zeros((2, 40, 60, 3), np.uint8)})["shares"].sum() - 2) < 1e-4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"backend": "vtk", "python_runtime": "openvino"}, "--backend python"),
        ({"backend": "onnxruntime", "precision": "bf16"}, "is OpenVINO's"),
        ({"backend": "openvino", "dtype": "fp16"}, "--precision rounds"),
        ({"backend": "openvino", "int8": "dynamic", "max_batch_size": 1}, "static int8"),
        ({"backend": "openvino", "int8": "static"}, "give --data"),
        ({"backend": "openvino", "max_drop": 1.0}, "--int8 static"),
        ({"backend": "openvino", "with_preproc": True, "ensemble": True}, "prepares images itself"),
        ({"backend": "openvino", "server_device": "gpu"}, "runs on the CPU"),
        ({"backend": "python", "python_runtime": "openvino", "form": "factors"}, "no factors"),
        ({"backend": "python", "python_runtime": "openvino", "update": True}, "no packs"),
    ],
)
def test_options_that_do_not_go_with_openvino_are_refused(tmp_path: Path, words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        TritonCommand(sources=("a",), out=tmp_path, **words)
    assert "\n" not in str(caught.value)

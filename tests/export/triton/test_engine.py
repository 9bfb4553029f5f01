"""Engines in a repository: a made-up engine with the real stamp and shapes, its config, and what is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import numpy_helper
from tritonclient.grpc import model_config_pb2

from vtk.__main__ import main
from vtk.formats import write_json
from vtk_export.targets import parse_target
from vtk_export.tensorrt import scripts
from vtk_export.tensorrt.served import build_engine

GPU = {"gpu": 'NVIDIA "X"\n200', "compute_capability": "9.0"}
Make = Callable[..., Path]


@pytest.fixture
def make(exported: Any, tmp_path: Path) -> Make:
    """Return what writes a folder as `vtk export tensorrt --build` leaves it, its engine being no engine."""

    def write(shapes: tuple[int, int, int] = (1, 8, 32), scale: float = 1.0) -> Path:
        folder = tmp_path / "built"
        folder.mkdir()
        proto = exported.proto
        for tensor in proto.graph.initializer:
            if tensor.dims[:1] == [5] and tensor.data_type == onnx.TensorProto.FLOAT:  # the classifier
                values = np.float32(scale) * numpy_helper.to_array(tensor)
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        kept = [entry for entry in proto.metadata_props if entry.key != "vtk.weights"]  # as of version 0.1
        del proto.metadata_props[:]
        proto.metadata_props.extend(kept)
        onnx.save(proto, folder / "model.onnx")
        (folder / "model.json").write_bytes((exported.out / "model.json").read_bytes())
        (folder / scripts.ENGINE).write_bytes(b"\0 no engine" * 100)
        found = scripts.profile(proto, parse_target("trt:10.3"), shapes, precision="fp32", tf32=True, workspace=64)
        write_json(folder / scripts.PROFILE, {**found, "onnx_sha256": build_engine.digest(folder / "model.onnx")})
        build_engine.stamp(folder, "10.3.0", GPU)
        return folder

    return write


def run(packed: Any, engine: Path, repo: Path, *argv: object) -> int:
    options = ("--backend", "tensorrt", "--engine", engine, "--out", repo, *argv)
    return main(["export", "triton", f"pets={packed.path}", *map(str, options)])


def test_an_engine_is_a_model_of_the_server_s_own_back_end(packed: Any, make: Make, tmp_path: Path) -> None:
    folder, repo = make((1, 4, 16)), tmp_path / "models"
    assert run(packed, folder, repo, "--max-batch-size", 8, "--warmup", "--data", packed.photos) == 0
    found = text_format.Parse((repo / "pets" / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert (found.platform, found.backend, found.default_model_filename) == ("tensorrt_plan", "tensorrt", "model.plan")
    assert (found.max_batch_size, list(found.dynamic_batching.preferred_batch_size)) == (8, [4, 8])
    slots = [(e.name, model_config_pb2.DataType.Name(e.data_type), list(e.dims)) for e in (*found.input, *found.output)]
    assert slots == [("pixel_values", "TYPE_FP32", [3, 32, 48]), ("logits", "TYPE_FP32", [5])]
    assert found.output[0].label_filename == "labels.txt" and not found.HasField("optimization")
    assert found.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert found.parameters["gpu"].string_value == GPU["gpu"]
    assert [w.batch_size for w in found.model_warmup] == [1, 8]
    version = repo / "pets" / "1"
    assert sorted(os.listdir(version)) == ["model.json", "model.plan", "model.plan.json"]
    assert (version / "model.plan").read_bytes() == (folder / scripts.ENGINE).read_bytes()
    assert json.loads((version / "model.plan.json").read_text())["tensorrt"] == "10.3.0"


def test_an_engine_in_an_ensemble(packed: Any, make: Make, tmp_path: Path) -> None:
    repo = tmp_path / "models"
    assert run(packed, make() / scripts.ENGINE, repo, "--with-preproc", "--data", packed.photos) == 0
    configs = {p.name: text_format.Parse((p / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
               for p in repo.iterdir()}  # fmt: skip
    assert configs["pets_classifier"].platform == "tensorrt_plan" and configs["pets"].platform == "ensemble"
    assert [e.name for e in configs["pets"].input] == ["encoded", "images"]
    assert configs["pets"].output[0].label_filename == "labels.txt" and (repo / "pets" / "labels.txt").exists()


def _other_engine(folder: Path) -> None:
    (folder / scripts.ENGINE).write_bytes(b"another")


def _other_onnx(folder: Path) -> None:
    proto = onnx.load(folder / "model.onnx")
    proto.producer_version = "another"
    onnx.save(proto, folder / "model.onnx")


def _no_inputs(folder: Path) -> None:
    profile = json.loads((folder / scripts.PROFILE).read_text())
    write_json(folder / scripts.PROFILE, {**profile, "inputs": {}})


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (lambda f: (f / scripts.ENGINE).unlink(), 3, "does not exist"),
        (lambda f: (f / scripts.STAMP).unlink(), 3, "--stamp"),
        (lambda f: (f / scripts.STAMP).write_text("[]"), 3, "no JSON object"),
        (lambda f: (f / scripts.PROFILE).unlink(), 3, "profile.json"),
        (_other_engine, 3, "model.engine does not match"),
        (_other_onnx, 3, "model.onnx does not match"),
        (_no_inputs, 3, "pixel_values"),
    ],
    ids=["engine", "stamp", "list", "profile", "other-engine", "other-onnx", "inputs"],
)
def test_an_engine_whose_files_do_not_belong_together_is_refused(
    packed: Any, make: Make, tmp_path: Path, capsys: Any, spoil: Callable[[Path], Any], code: int, said: str
) -> None:
    folder = make()
    spoil(folder)
    assert run(packed, folder, tmp_path / "models") == code
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1 and not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("shapes", "argv", "code", "said"),
    [
        ((1, 4, 16), (), 2, "--max-batch-size 16|at most 16"),
        ((2, 4, 32), (), 2, "--min 1"),
        ((1, 8, 32), ("--dtype", "fp16"), 2, "--dtype fp16"),
        ((1, 8, 32), ("--softmax",), 2, "--softmax"),
        ((1, 8, 32), ("--profile", "1"), 2, "--profile"),
    ],
)
def test_an_engine_that_does_not_fit_the_options_is_refused(
    packed: Any, make: Make, tmp_path: Path, capsys: Any, shapes: Any, argv: tuple[str, ...], code: int, said: str
) -> None:
    assert run(packed, make(shapes), tmp_path / "models", *argv) == code
    told = capsys.readouterr().err
    assert any(part in told for part in said.split("|")) and told.count("\n") == 1


def test_an_engine_of_other_weights_is_refused(packed: Any, make: Make, tmp_path: Path, capsys: Any) -> None:
    assert run(packed, make(scale=1.01), tmp_path / "models") == 4
    assert "error" in capsys.readouterr().err and not (tmp_path / "models").exists()


def test_an_engine_of_other_classes_is_refused(packed: Any, make: Make, tmp_path: Path, capsys: Any) -> None:
    folder = make()
    whole = f"vit_tiny_patch16_224 --no-pretrained --num-classes 5 --backend tensorrt --engine {folder}".split()
    assert main(["export", "triton", *whole, "--out", str(tmp_path / "models")]) == 3
    assert "was built for other images" in capsys.readouterr().err

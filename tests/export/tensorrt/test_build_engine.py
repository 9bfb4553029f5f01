"""build_engine.py alone in its folder, with a TensorRT and a driver that write down how they are called."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import vtk_export.tensorrt.served
from tests.export.tensorrt._graphs import make_graph
from tests.export.tensorrt.conftest import Scripts
from vtk_export.tensorrt import scripts
from vtk_export.tensorrt.config import parse_version

SCRIPT = Path(vtk_export.tensorrt.served.__file__).with_name("build_engine.py")


def write(folder: Path, *, trt: str = "10.3", batch: Any = "batch", tf32: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    inputs = {"pixel_values": (TensorProto.FLOAT, [batch, 3, 32, 48])}
    proto = make_graph([helper.make_node("Erf", ["pixel_values"], ["logits"])], inputs=inputs)
    onnx.save(proto, folder / "model.onnx")
    found = scripts.profile(proto, parse_version(trt), (1, 4, 16), precision="fp32", tf32=tf32, workspace=2)
    found["onnx_sha256"] = hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest()
    (folder / "profile.json").write_text(json.dumps(found))
    shutil.copy(SCRIPT, folder)


@pytest.fixture
def alone(tmp_path: Path, fake_tensorrt: Path) -> Scripts:
    write(tmp_path / "out")
    return Scripts(tmp_path / "out", fake_tensorrt)


def test_it_builds_with_the_profiles_numbers_and_stamps(alone: Scripts) -> None:
    run = alone.run()
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "model.engine: TensorRT 10.9.0.34, NVIDIA H100 (9.0), tensors pixel_values, logits\n"
    assert alone.calls() == [
        ["network", 2], ["parse", "model.onnx"], ["memory", "workspace", 2 << 20],
        ["set_shape", "pixel_values", [1, 3, 32, 48], [4, 3, 32, 48], [16, 3, 32, 48]], ["add_profile"],
        ["cache", 0], ["load", "engine"],
    ]  # fmt: skip
    stamp = json.loads((alone.folder / "model.engine.json").read_text())
    assert stamp == {
        "tensorrt": "10.9.0.34", "gpu": "NVIDIA H100", "compute_capability": "9.0",
        "engine_sha256": hashlib.sha256(b"engine").hexdigest(),
        "onnx_sha256": hashlib.sha256((alone.folder / "model.onnx").read_bytes()).hexdigest(),
    }  # fmt: skip
    assert (alone.folder / "timing.cache").read_bytes() == b"times"
    assert alone.run("--check").returncode == 0
    assert alone.calls() == [["load", "engine"]]


@pytest.mark.parametrize(
    ("options", "version", "network", "calls"),
    [
        ({"trt": "11.x"}, "11.2.1.2", 2, ["network", "parse", "memory", "set_shape", "add_profile", "cache", "load"]),
        ({"trt": "8.6"}, "8.6.1", 1, ["network", "parse", "memory", "set_shape", "add_profile", "cache", "load"]),
        ({"batch": 4, "tf32": False}, "10.3.0", 2, ["network", "parse", "memory", "clear", "cache", "load"]),
    ],
    ids=["11", "8.6", "fixed batch"],
)
def test_it_follows_version_and_profile(
    alone: Scripts, options: dict[str, Any], version: str, network: int, calls: list[str]
) -> None:
    write(alone.folder, **options)
    assert alone.run(FAKE_VERSION=version).returncode == 0
    assert alone.calls()[0] == ["network", network]
    assert [call[0] for call in alone.calls()] == calls


def test_times_of_another_version_are_dropped(alone: Scripts) -> None:
    (alone.folder / "timing.cache").write_bytes(b"of another version")
    assert alone.run().returncode == 0
    assert [call for call in alone.calls() if call[0] == "cache"] == [["cache", 18], ["cache", 0]]


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ({"FAKE_VERSION": "10.9.0.35"}, "built for tensorrt 10.9.0.34, here is 10.9.0.35; run build_engine.py here"),
        ({"FAKE_GPU": "NVIDIA A100"}, "built for gpu NVIDIA H100, here is NVIDIA A100"),
    ],
    ids=["version", "gpu"],
)
def test_an_engine_is_not_loaded_elsewhere(alone: Scripts, fake: dict[str, str], message: str) -> None:
    assert alone.run().returncode == 0
    run = alone.run("--check", **fake)
    assert run.returncode == 3
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert ["load", "engine"] in alone.calls()  # of the build; the check wrote nothing


def test_another_capability_engine_or_model_is_not_loaded(alone: Scripts) -> None:
    assert alone.run().returncode == 0
    stamp = alone.folder / "model.engine.json"
    text = stamp.read_text()
    stamp.write_text(text.replace('"9.0"', '"8.0"'))
    assert "compute_capability 8.0, here is 9.0" in alone.run("--check").stderr
    stamp.write_text(text)
    (alone.folder / "model.engine").write_bytes(b"changed")
    assert "model.engine is not the file that" in alone.run("--check").stderr
    stamp.write_text("[]")
    assert "no JSON object" in alone.run("--check").stderr
    stamp.unlink()
    assert alone.run("--check").returncode == 3


def test_an_engine_of_an_earlier_model_is_not_stamped(alone: Scripts) -> None:
    engine, model = alone.folder / "model.engine", alone.folder / "model.onnx"
    engine.write_bytes(b"of trtexec")
    os.utime(engine, ns=(1, model.stat().st_mtime_ns - 10**9))
    run = alone.run("--stamp")
    assert (run.returncode, "is older than model.onnx" in run.stderr) == (3, True)
    os.utime(engine)
    model.write_bytes(model.read_bytes() + b"\x1a\x00")
    os.utime(model, ns=(1, 1))
    assert "is not the file that profile.json was written for" in alone.run("--stamp").stderr
    assert not (alone.folder / "model.engine.json").exists()


def test_other_weights_beside_the_model_are_not_built(alone: Scripts) -> None:
    data, profile = alone.folder / "model.onnx.data", alone.folder / "profile.json"
    data.write_bytes(b"weights")
    told = {**json.loads(profile.read_text()), "data_sha256": hashlib.sha256(b"weights").hexdigest()}
    profile.write_text(json.dumps(told))
    assert alone.run().returncode == 0
    data.write_bytes(b"another")
    assert "model.onnx.data is not the file" in alone.run().stderr


def test_an_engine_of_trtexec_can_be_stamped(alone: Scripts) -> None:
    (alone.folder / "model.engine").write_bytes(b"of trtexec")
    assert alone.run("--stamp").returncode == 0
    assert alone.calls() == [["load", "of trtexec"]]


@pytest.mark.parametrize(
    ("fake", "code", "message"),
    [
        ({"FAKE_VERSION": "10.2.0"}, 5, "made for TensorRT 10.3 or newer, 10.2.0 is installed"),
        ({"FAKE_CUDA": "100"}, 5, "gives no GPU (CUDA error 100)"),
        ({"FAKE_ERROR": "node Erf:\nno"}, 4, "does not parse model.onnx: node Erf: no"),
        ({"FAKE_NONE": "1"}, 4, "cannot build an engine"),
        ({"FAKE_INPUTS": '["x"]'}, 4, "has the inputs ['x']"),
    ],
    ids=["old", "no gpu", "parser", "builder", "inputs"],
)
def test_what_cannot_be_built_is_one_line_and_leaves_no_engine(
    alone: Scripts, fake: dict[str, str], code: int, message: str
) -> None:
    run = alone.run(**fake)
    assert run.returncode == code
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert not list(alone.folder.glob("model.engine*"))


def test_a_changed_model_is_not_built(alone: Scripts) -> None:
    with (alone.folder / "model.onnx").open("ab") as file:
        file.write(b"\n")
    run = alone.run()
    assert (run.returncode, "export again" in run.stderr) == (3, True)


def test_without_tensorrt_it_is_exit_5(alone: Scripts) -> None:
    (alone.path / "tensorrt.py").write_text("raise ImportError('no TensorRT')")
    run = alone.run()
    assert run.returncode == 5
    assert "Python package does not load here (no TensorRT)" in run.stderr
    assert run.stderr.count("\n") == 1

"""Other run times, and converters to other formats, on what vtk writes: JavaScript, Core ML, LiteRT, other opsets."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from tests.peers.conftest import interpreter
from vtk.__main__ import main
from vtk.packs import load_task

pytestmark = pytest.mark.peers

KINDS: dict[str, tuple[str, ...]] = {
    "fp32": (), "fp16 inside": ("--dtype", "fp16", "--keep-io-types"), "int8 dynamic": ("--int8", "dynamic"),
    "raw images": ("--with-preproc",), "batch of 1": ("--static-batch", "1"),
}  # fmt: skip
FAR = {"fp16 inside": 2e-2, "int8 dynamic": 2e-2, "raw images": 1e-3}
"""Largest allowed difference from ONNX Runtime in Python, as a share of the largest logit, where it is not 1e-5."""
OPSETS = """
import onnx, onnxruntime
from onnx import version_converter
model = onnx.load("out/model.onnx")
own = next(entry.version for entry in model.opset_import if entry.domain == "")
def run(content):
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: feed})[0]
feed = np.load("feed.npy")
wanted = run(model.SerializeToString())
worst = 0.0
versions = range(lowest, own + 5)
for version in versions:
    made = version_converter.convert_version(model, version)
    assert any(entry.version == version for entry in made.opset_import)
    onnx.checker.check_model(made, full_check=True)
    worst = max(worst, abs(run(made.SerializeToString()) - wanted).max() / abs(wanted).max())
logits = [worst, versions[0], versions[-1]]
"""
TIMM = """
import timm, torch
model = timm.create_model("local-dir:merged", pretrained=True).eval()
batch = torch.from_numpy(images[:1])
"""
CORE_ML = """
import coremltools as ct
traced = torch.jit.trace(model, batch)
made = ct.convert(
    traced, inputs=[ct.TensorType(name="pixel_values", shape=batch.shape)], outputs=[ct.TensorType(name="logits")],
    convert_to="mlprogram", compute_precision=ct.precision.FLOAT32,
)
made.save("model.mlpackage")
spec = ct.models.MLModel("model.mlpackage", skip_model_load=True).get_spec()  # only macOS runs it
assert [entry.name for entry in spec.description.input] == ["pixel_values"]
assert [entry.name for entry in spec.description.output] == ["logits"]
blocks = spec.mlProgram.functions["main"].block_specializations.values()
operators = [op.type for block in blocks for op in block.operations]
assert operators.count("linear") == 2 * 4 + 1, operators  # qkv, proj, fc1 and fc2 of two blocks, and the head
logits = [0.0]
"""
TO_LITERT = """
import litert_torch
litert_torch.convert(model, (batch,)).export("model.tflite")
logits = [0.0]
"""
# the sample images that the tool would download; they only choose between layouts
ONNX2TF = """
samples = np.random.default_rng(0).random((20, 128, 128, 3), "f4")
np.save("calibration_image_sample_data_20x128x128x3_float32.npy", samples)
import onnx2tf
onnx2tf.convert(
    input_onnx_file_path="out/model.onnx", output_folder_path="tf", non_verbose=True,
    replace_to_pseudo_operators=["erf"],  # else it needs TensorFlow's own operators at run time
)
import shutil
shutil.copy("tf/model_float32.tflite", "model.tflite")
logits = [0.0]
"""
LITERT = """
from ai_edge_litert.interpreter import Interpreter
interpreter = Interpreter("model.tflite")
interpreter.allocate_tensors()
entry, = interpreter.get_input_details()
feed = images[:1].transpose(0, 2, 3, 1) if entry["shape"][-1] == 3 else images[:1]
interpreter.set_tensor(entry["index"], np.ascontiguousarray(feed))
interpreter.invoke()
logits = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
"""


def export(pack: Path, out: Path, *flags: str) -> None:
    assert main(["export", "onnx", str(pack), "--out", str(out), "--threads", "1", *flags]) == 0


def feed_of(kind: str, images: np.ndarray) -> np.ndarray:
    if kind == "raw images":
        return (images[:1].transpose(0, 2, 3, 1) * 40 + 128).clip(0, 255).astype(np.uint8)
    return images[:1] if kind == "batch of 1" else images


def off(found: Any, wanted: np.ndarray) -> float:
    return float(abs(np.asarray(found) - wanted).max() / abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
def test_javascript_runs_the_file(kind, record, pack, images, tmp_path):
    export(pack, tmp_path / "out", *KINDS[kind])
    file, feed = tmp_path / "out" / "model.onnx", feed_of(kind, images)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    wanted = session.run(None, {session.get_inputs()[0].name: feed})[0].astype(np.float64)
    values = {"type": str(feed.dtype), "dims": feed.shape, "values": feed.ravel().tolist()}
    (tmp_path / "feed.json").write_text(json.dumps(values))
    folder = interpreter("VTK_NODE")
    for name in ("onnxruntime-node", "onnxruntime-web"):
        argv = [
            "node",
            str(Path(__file__).with_name("run_onnx.mjs")),
            folder,
            name,
            str(file),
            str(tmp_path / "feed.json"),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        found = np.asarray(answer["values"]).reshape(answer["dims"])
        assert off(found, wanted) <= FAR.get(kind, 1e-5), (name, off(found, wanted))
        record(name, f"`export onnx`: {kind}", by="VTK_NODE", difference=off(found, wanted))


@pytest.mark.parametrize("kind", ["fp32", "int8 dynamic", "raw images"])
def test_the_version_converter_moves_the_file_to_other_opsets(kind, foreign, record, pack, images, tmp_path):
    lowest = 18 if kind == "raw images" else 17  # the first with antialiasing, and with LayerNormalization
    export(pack, tmp_path / "out", *KINDS[kind])
    np.save(tmp_path / "feed.npy", feed_of(kind, images))
    worst, first, last = foreign(f"lowest = {lowest}\n{OPSETS}")
    assert worst < 1e-5
    record(
        "ONNX version converter", f"`export onnx`: {kind} (opsets {first:.0f} to {last:.0f})", difference=float(worst)
    )


def test_core_ml_tools_convert_a_merged_model(foreign, record, pack, tmp_path):
    assert main(["tasks", "merge", str(pack), "--format", "timm", "--out", str(tmp_path / "merged")]) == 0
    foreign(TIMM + CORE_ML, "VTK_COREML")
    record("Core ML by coremltools", "folder of `--format timm`, batch of 1", by="VTK_COREML", outcome="converted")


def test_litert_runs_what_litert_torch_makes_of_a_merged_model(foreign, record, pack, images, tmp_path):
    assert main(["tasks", "merge", str(pack), "--format", "timm", "--out", str(tmp_path / "merged")]) == 0
    foreign(TIMM + TO_LITERT, "VTK_LITERT")
    found, wanted = foreign(LITERT, "VTK_LITERT"), logits(pack, images[:1])
    assert off(found, wanted) < 1e-5
    record(
        "LiteRT by litert-torch",
        "folder of `--format timm`, batch of 1",
        by="VTK_LITERT",
        difference=off(found, wanted),
    )


def test_litert_runs_what_onnx2tf_makes_of_an_export(foreign, record, pack, images, tmp_path):
    export(pack, tmp_path / "out", "--static-batch", "1")
    foreign(ONNX2TF, "VTK_ONNX2TF")
    found, wanted = foreign(LITERT, "VTK_LITERT"), logits(pack, images[:1])
    assert off(found, wanted) < 1e-4
    record("LiteRT by onnx2tf", "`export onnx`: batch of 1", by="VTK_ONNX2TF", difference=off(found, wanted))


def logits(pack: Path, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return load_task(pack).model.eval()(torch.from_numpy(images)).numpy()

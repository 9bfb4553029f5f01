"""Stock tools of ONNX on every kind of file that vtk writes: what they make of it still answers as the file does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vtk.__main__ import main

pytestmark = pytest.mark.peers

KINDS: dict[str, tuple[str, ...]] = {
    "fp32": (), "fp16": ("--dtype", "fp16"), "fp16 inside": ("--dtype", "fp16", "--keep-io-types"),
    "int8 dynamic": ("--int8", "dynamic"), "softmax": ("--softmax",), "raw images": ("--with-preproc",),
    "as timm has it": ("--no-fuse",), "both": ("--output", "both"), "batch of 5": ("--static-batch", "5"),
}  # fmt: skip
FEED = """
import onnx, onnxruntime
def run(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    return session.run(None, {entry.name: feed(entry.name, entry.type)})[0].astype(np.float64)
def feed(name, kind):
    if name == "images":
        return (images.transpose(0, 2, 3, 1) * 40 + 128).clip(0, 255).astype(np.uint8)
    return images.astype(np.float16 if "16" in kind else np.float32)
def near(a, b, share):
    assert a.shape == b.shape and np.isfinite(a).all()
    assert abs(a - b).max() <= share * abs(b).max(), abs(a - b).max() / abs(b).max()
plain = run("out/model.onnx")
logits = plain
"""
TOOLS = {
    "checker": """
onnx.checker.check_model("out/model.onnx", full_check=True)
onnx.shape_inference.infer_shapes(onnx.load("out/model.onnx"), check_type=True, strict_mode=True, data_prop=True)
""",
    "quantiser": """
from onnxruntime.quantization import QuantType, quantize_dynamic
quantize_dynamic("out/model.onnx", "new.onnx", weight_type=QuantType.QInt8)
near(run("new.onnx"), plain, 0.2)
""",
    "onnxsim": """
import onnxsim
model, ok = onnxsim.simplify(onnx.load("out/model.onnx"))
assert ok
onnx.save(model, "new.onnx")
near(run("new.onnx"), plain, 2e-2 if half else 1e-4)
""",
    "onnxslim": """
import onnxslim
onnx.save(onnxslim.slim(onnx.load("out/model.onnx")), "new.onnx")
near(run("new.onnx"), plain, 2e-2 if half else 1e-4)
""",
    "OpenVINO": """
import openvino
model = openvino.Core().compile_model("out/model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
entry = model.inputs[0]  # of a cast input it has several names
given = feed("images" if "images" in entry.get_names() else "pixel_values", str(entry.get_element_type()))
# it rounds resized bytes in another way: a value between two levels may be the other one
near(model([given])[0].astype(np.float64), plain, 2e-2 if half or raw else 0.1 if quantised else 1e-3)
""",
    "fp16 converter": """
from onnxconverter_common import float16
onnx.save(float16.convert_float_to_float16(onnx.load("out/model.onnx"), keep_io_types=True), "new.onnx")
near(run("new.onnx"), plain, 5e-2)
""",
    "transformers optimizer": """
from onnxruntime.transformers import optimizer
made = optimizer.optimize_model("out/model.onnx", model_type="vit", num_heads=2, hidden_size=48)
made.save_model_to_file("new.onnx")
assert sum(node.op_type == "Attention" for node in onnx.load("new.onnx").graph.node) >= fused
near(run("new.onnx"), plain, 1e-3)
""",
}
# what a tool does not take by its own rules: the converter halves fp32 graphs, the optimizer fuses them;
# an output that is read inside of the graph, too, the converter leaves in two types
NOT_FOR = {
    "quantiser": {"fp16", "fp16 inside", "int8 dynamic"},
    "fp16 converter": {"fp16", "fp16 inside", "int8 dynamic", "raw images", "both"},
    "transformers optimizer": {"fp16", "fp16 inside", "int8 dynamic"},
}


NAMES = {
    "checker": "ONNX checker", "quantiser": "ONNX Runtime's quantiser",
    "transformers optimizer": "ONNX Runtime's transformers optimizer",
}  # fmt: skip
"""Of the tools in the table of the documents, where these are others."""


@pytest.mark.parametrize("kind", KINDS)
def test_stock_tools_take_the_file(kind: str, foreign: Any, record: Any, pack: Path, tmp_path: Path) -> None:
    assert main(["export", "onnx", str(pack), "--out", str(tmp_path / "out"), "--threads", "1", *KINDS[kind]]) == 0
    told = ("fp16" in kind, "int8" in kind, "raw" in kind, int(kind == "fp32"))
    facts = f"half, quantised, raw, fused = {told}\n"
    tools = {name: code for name, code in TOOLS.items() if kind not in NOT_FOR.get(name, ())}
    said = "import sys\nprint({!r}, file=sys.stderr, flush=True)\n"  # the last one is the one that failed
    foreign(FEED + facts + "".join(said.format(name) + code for name, code in tools.items()))
    for name in tools:
        outcome = "checked" if name == "checker" else "run"
        record(NAMES.get(name, name), f"`export onnx`: {kind}", outcome=outcome)


def test_the_page_of_an_export_runs_where_only_onnx_runtime_is(old: Any, pack: Path, tmp_path: Path) -> None:
    version = ".".join(old("print(onnxruntime.__version__)").strip().split(".")[:2])
    flags = ("--target", f"ort:{version}", "--out", str(tmp_path / "out"), "--threads", "1")
    assert main(["export", "onnx", str(pack), *flags]) == 0
    Image.fromarray(np.full((40, 50, 3), 90, np.uint8)).save(tmp_path / "photo.png")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text("utf-8"), re.DOTALL)
    said = old(f"import os\nos.chdir('out')\n{code}\nprint(len(classify('../photo.png')))")
    assert said.strip() == "3"

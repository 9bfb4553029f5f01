"""``vtk export tasks --target``: opset, IR version and form of every file follow the runtime."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from vtk.errors import UsageError
from vtk_export.lint.linter import lint, load
from vtk_export.targets import parse_target
from vtk_export.tasks.config import TasksConfig


@pytest.mark.parametrize(
    ("target", "opset", "ir"),
    [("ort:1.16", 18, 9), ("triton:24.04", 18, 9), pytest.param("trt:10.9", 18, 10, marks=pytest.mark.slow),
     pytest.param("trt:8.6", 17, 8, marks=pytest.mark.slow)],
)  # fmt: skip
def test_all_files_are_for_the_target(
    packs: dict[str, Path], lab: Any, tools: Any, tmp_path: Path, target: str, opset: int, ir: int
) -> None:
    form = ("--form", "both") if target.startswith("ort") else ()
    found = tools.run_export(packs["pets"], packs["cars"], "--out", tmp_path, "--target", target, *form)
    assert (found.result["opset"], found.result["ir_version"]) == (opset, ir)
    paths = sorted(tmp_path.glob("*.onnx"))
    assert len(paths) == (3 if form else 2)
    for path in paths:
        proto = onnx.load(path, load_external_data=False)
        assert (proto.opset_import[0].version, proto.ir_version) == (opset, ir)
        if target.startswith("trt"):
            assert [finding for finding in lint(load(path), parse_target(target)) if finding.level == "refused"] == []
    props = {entry.key: entry.value for entry in onnx.load(paths[0], load_external_data=False).metadata_props}
    assert form or json.loads(props["vtk.export"])["target"] == target
    images = tools.images(2)
    session = onnxruntime.InferenceSession(tmp_path / "pets.onnx", providers=["CPUExecutionProvider"])
    expected = lab.timm("pets", 3)(images).detach().numpy()
    np.testing.assert_allclose(session.run(["logits"], {"pixel_values": images.numpy()})[0], expected, atol=1e-3)


def test_what_a_target_does_not_take_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`--opset` 20 is more than ort:1\.16 takes; give at most 19"):
        TasksConfig(out=Path("x"), target="ort:1.16", opset=20)
    with pytest.raises(UsageError, match="is not a runtime"):
        TasksConfig(out=Path("x"), target="openvino:2025")

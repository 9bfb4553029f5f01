"""Profiles of the back-end `openvino`: the precision of its row, its bounds, and the memory that is counted."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vtk.profiling.compare import loosest
from vtk.profiling.config import ProfileConfig
from vtk.profiling.onnx_memory import memory_of_onnx
from vtk.profiling.openvino_memory import memory_of_ir
from vtk.profiling.profile import profile
from vtk.profiling.regression import compare_profiles
from vtk.profiling.rows import heading
from vtk.runtime import openvino_runtime as runtime

Write = Callable[..., Path]


def quick(**options: object) -> ProfileConfig:
    return ProfileConfig(**{"batch_sizes": (2,), "duration": 0.02, "backends": ("openvino", "ort-cpu"), **options})  # type: ignore[arg-type]


def test_a_row_of_bf16_says_so_and_is_held_to_its_own_bound(
    write_onnx: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    if runtime.default_precision() != "bf16":
        pytest.skip("this processor has no bf16")
    path = write_onnx()
    found = profile(path, quick(), show_progress=False)
    row, other = found.backends
    assert (row.arithmetic, other.arithmetic, found.precision) == ("bf16", "", "fp32")
    assert row.cells[0].status == "ok" and "cosine ≥ 0.999" in row.cells[0].tolerance
    assert "of the largest" in other.cells[0].tolerance
    assert "floats in bf16" in heading(row) and "OpenVINO" in heading(row)
    assert any("--precision fp32" in text for text in found.warnings)
    assert "multiplies in bf16" in capsys.readouterr().out
    plain = profile(path, quick(precision="fp32"), show_progress=False)
    assert plain.backends[0].arithmetic == "" and "of the largest" in plain.backends[0].cells[0].tolerance
    assert not any("BF16" in text for text in plain.warnings) and "multiplies in bf16" not in capsys.readouterr().out
    assert "products of openvino: bf16 and fp32" in compare_profiles(found, plain).differences
    assert not any("products" in text for text in compare_profiles(found, found).differences)
    alone = profile(path, quick(backends=("openvino",)), show_progress=False)
    assert not any("other rows" in text for text in alone.warnings)


def test_rounding_that_the_bound_of_bf16_allows_is_wrong_in_fp32(
    write_onnx: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime.default_precision() != "bf16":
        pytest.skip("this processor has no bf16")
    real = runtime.settings
    monkeypatch.setattr(runtime, "settings", lambda precision, *rest: real("bf16", *rest))
    (row,) = profile(write_onnx(), quick(precision="fp32", backends=("openvino",)), show_progress=False).backends
    assert row.cells[0].status == "mismatch"


def test_the_looser_of_two_bounds_holds() -> None:
    assert [loosest("fp32"), loosest("fp32", "bf16"), loosest("bf16", "")] == ["fp32", "bf16", "bf16"]
    assert [loosest("int8", "bf16"), loosest("fp32", "tf32"), loosest("fp16", "fp32")] == ["int8", "tf32", "fp16"]


@pytest.mark.parametrize("batch", [1, 7])
def test_memory_of_an_ir_is_that_of_the_onnx_file_it_was_made_from(tmp_path: Path, batch: int) -> None:
    import onnx
    import openvino
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    shapes = {"one": (72, 40), "two": (40, 80), "three": (80, 3)}
    weights = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), name) for name, s in shapes.items()]
    nodes = [
        helper.make_node("MatMul", ["pixel_values", "one"], ["a"]),
        helper.make_node("Relu", ["a"], ["features"]),
        helper.make_node("MatMul", ["a", "two"], ["c"]),
        helper.make_node("MatMul", ["c", "three"], ["logits"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("pixel_values", 72), ("logits", 3), ("features", 40))
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    openvino.save_model(openvino.Core().read_model(tmp_path / "m.onnx"), tmp_path / "m.xml", compress_to_fp16=False)
    images = {"pixel_values": (batch, 72)}
    # a and c are alive together, and the features to the end
    found = memory_of_ir(tmp_path / "m.xml", images)
    assert found == (4 * (72 * 40 + 40 * 80 + 80 * 3), 4 * batch * (40 + 80 + 40))
    assert found == memory_of_onnx(tmp_path / "m.onnx", images)


def test_an_absent_openvino_is_a_line_with_the_command_that_installs_it(
    write_onnx: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    from vtk.errors import UnavailableError

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "openvino" else real(name, *a))
    runtime.core.cache_clear()
    runtime.capabilities.cache_clear()
    with pytest.raises(UnavailableError, match="pip install openvino"):
        profile(write_onnx(), dataclasses.replace(quick(), backends=("openvino",)), show_progress=False)

"""`--verify-with openvino`: a file is held against torch in each of OpenVINO's precisions too, or is not kept."""

from pathlib import Path

import pytest
import torch
from torch import nn

from vtk.errors import UnavailableError, UsageError, VerificationError
from vtk.runtime import openvino_runtime as runtime
from vtk_export.gate.rows import GateRow, check_rows
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.GELU(), nn.Linear(32, 5)).eval()


def export(module: nn.Module, out: Path) -> tuple[GateRow, ...]:
    config = OnnxConfig(out=out, verify_with=("openvino",))
    return export_onnx(module, config, img_size=8, classes=list("abcde"), show=False).rows


def test_each_precision_of_openvino_has_rows_with_its_own_bounds(module: nn.Module, tmp_path: Path) -> None:
    rows = export(module, tmp_path / "out")
    bf16 = runtime.default_precision() == "bf16"
    names = ["ONNX Runtime", "OpenVINO, fp32", *(["OpenVINO, bf16"] if bf16 else [])]
    assert list(dict.fromkeys(row.runtime for row in rows)) == names and all(row.passed for row in rows)
    assert len(rows) == len(names) * len({row.batch for row in rows})
    worst = {name: max(row.error / row.bound if row.bound < 1 else row.error for row in rows if row.runtime == name)
             for name in names}  # fmt: skip
    assert worst["OpenVINO, fp32"] < 1
    if bf16:
        assert worst["OpenVINO, bf16"] > 1e-4 and min(row.cosine for row in rows) < 1


def test_a_file_that_openvino_runs_otherwise_is_not_kept(
    module: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vtk.runtime.backends.openvino_backend import OpenvinoBackend

    real = OpenvinoBackend.run
    monkeypatch.setattr(
        OpenvinoBackend, "run", lambda self, inputs: {k: v.flip(0) for k, v in real(self, inputs).items()}
    )
    with pytest.raises(VerificationError, match=r"batch 2 in OpenVINO, fp32: max error"):
        export(module, tmp_path / "out")
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_the_row_that_failed_names_its_runtime() -> None:
    check_rows([GateRow(1, 0.0, 0.0, 1.0, 1, 1, 0, runtime="OpenVINO, bf16")])
    with pytest.raises(VerificationError, match=r"^batch 1 in OpenVINO, bf16: max error 2"):
        check_rows([GateRow(1, 2.0, 2.0, 1.0, 1, 1, 0, runtime="OpenVINO, bf16")])
    with pytest.raises(VerificationError, match=r"^batch 1: max error 2"):
        check_rows([GateRow(1, 2.0, 2.0, 1.0, 1, 1, 0)])


def test_other_precisions_and_an_absent_openvino_are_refused_before_anything_is_exported(
    module: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in ("fp16", "bf16"):
        with pytest.raises(UsageError, match=f"`--verify-with` openvino.*--dtype {dtype}"):
            OnnxConfig(out=tmp_path, dtype=dtype, verify_with=("openvino",))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="verify-with"):
        OnnxConfig(out=tmp_path, verify_with=("tensorrt",))
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "openvino" else real(name, *a))
    with pytest.raises(UnavailableError, match="pip install openvino"):
        export(module, tmp_path / "out")

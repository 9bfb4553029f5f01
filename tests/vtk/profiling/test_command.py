import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from vtk.__main__ import main


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """An .onnx of another program: flatten and one linear layer, any batch size, no card."""
    weight = np.random.default_rng(0).normal(size=(3 * 8 * 8, 4)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["pixel_values"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["logits"]),
        ],
        "linear",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_bare_onnx_with_the_default_backends(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    options = ["--device", "cpu", "--batch-sizes", "1,3", "--duration", "0.05", "--threads", "1", "--budget-ms", "1000"]
    assert main(["profile", str(model_file), *options, "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    by_name = {backend["name"]: backend for backend in found["backends"]}
    assert {n: b["status"] for n, b in by_name.items()} == {"ort-cpu": "measured"}  # nothing else runs such a file
    ort = by_name["ort-cpu"]
    assert ort["provider"] == "CPUExecutionProvider" and ort["prepare_s"] is None
    assert [(cell["batch"], cell["status"]) for cell in ort["cells"]] == [(1, "ok"), (3, "ok")]
    assert all(cell["max_diff"] < 1e-5 for cell in ort["cells"])
    assert [c["weight_bytes"] for c in ort["cells"]] == [192 * 4 * 4] * 2
    assert [c["activation_bytes"] for c in ort["cells"]] == [
        b * 4 * (192 + 4) for b in (1, 3)
    ]  # the flat image is the image
    assert "without graph optimisation" in found["reference"]
    assert found["work"] == {"flops": 2 * 192 * 4, "parameters": 192 * 4, "values": 192 + 4}
    assert "with ort-cpu meets it" in found["budget"]
    assert json.loads((out / "profile.json").read_text())["backends"] == found["backends"]
    assert "report.html" in captured.err and found["command"].startswith("vtk profile")


def test_torch_backend_of_a_bare_onnx_asked_for_by_name_is_a_usage_error(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(model_file), "--backends", "ort-cpu,eager", "--device", "cpu"]) == 2
    assert "linear.onnx" in capsys.readouterr().err


@pytest.mark.parametrize("name,kind", [
    ("bank", "timm"), ("bank+graph", "timm"), ("tensorrt", "timm"), ("eager", "onnx"), ("compile", "onnx"),
    ("fused", "onnx"), ("bank", "onnx"), ("aoti", "onnx"),
])  # fmt: skip
def test_a_backend_that_does_not_fit_is_one_line_before_anything_is_exported(
    name: str, kind: str, model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtk.profiling.session import Session

    monkeypatch.setattr(Session, "_export", lambda *_: pytest.fail("exported first"))
    source = [str(model_file)] if kind == "onnx" else ["test_vit", "--no-pretrained"]
    assert main(["profile", *source, "--backends", f"ort-cpu,{name}", "--device", "cpu"]) in (2, 5)
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("name,code", [("ort-cuda", 5), ("ort-trt", 5), ("tensorrt", 5), ("egger", 2)])
def test_absent_and_unknown_backends(
    name: str, code: int, model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("ort-cuda", "ort-trt") and torch.cuda.is_available():
        pytest.skip("CUDA is here")
    assert main(["profile", str(model_file), "--backends", f"ort-cpu,{name}", "--device", "cpu"]) == code
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and name in error[0]


def test_timm_model_in_eager(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-pretrained", "--backends", "eager", "--device", "cpu", "--batch-sizes", "2", "--duration", "0.05"]
    assert main(["profile", "test_vit", *options, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "eager: torch cpu" in out and "3×160×160" in out and "no files written" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's libraries are here and would load")
def test_a_hidden_cuda_library_is_exit_5_and_no_number(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime is without CUDA")
    # torch believes in a device, and onnxruntime really tries: its provider cannot be loaded and it would fall back
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = ["--device", "cuda", "--batch-sizes", "1", "--duration", "0.05", "--threads", "1", "--json"]
    assert main(["profile", str(model_file), "--backends", "ort-cuda", *options]) == 5
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"error", "exit_code"} and "CUDAExecutionProvider was requested" in found["error"]


def test_bank_and_eager_of_a_pack_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import timm
    from safetensors.torch import save_file

    from vtk.card import Card
    from vtk.models.create import build_model
    from vtk.packs.pack import save_task

    small = {"depth": 1, "embed_dim": 32, "num_heads": 2}
    base = tmp_path / "base.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, **small).state_dict(), base)
    created = build_model("vit_tiny_patch16_224", num_classes=3, img_size=32, weights=base, kwargs=small)
    state = {k: torch.randn_like(v) if "head" in k else v for k, v in created.model.state_dict().items()}
    card = Card(created.spec, created.input, ("a", "b", "c"))
    save_task(tmp_path / "task", state=state, created=created, card=card, trained=["head.weight", "head.bias"])
    options = ["--device", "cpu", "--batch-sizes", "1,2", "--duration", "0.05", "--threads", "1", "--json"]
    backends = ["--backends", "eager,bank", "--tasks", str(tmp_path / "task")]
    assert main(["profile", str(tmp_path / "task"), *backends, *options]) == 0
    eager, bank = json.loads(capsys.readouterr().out)["backends"]
    assert bank["provider"] == "bank of 2 tasks, cpu"
    assert [c["status"] for c in (*eager["cells"], *bank["cells"])] == ["ok"] * 4

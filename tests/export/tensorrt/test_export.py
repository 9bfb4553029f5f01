"""`vtk export tensorrt` from end to end; torch's exporter is replaced by what it made before."""

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.export.tensorrt.conftest import Scripts
from vtk.__main__ import main
from vtk.errors import UsageError
from vtk_export.lint.linter import lint
from vtk_export.tensorrt.config import TensorrtCommand, parse_version

FILES = ["README.md", "build.sh", "build_engine.py", "compare.sh", "model.json", "model.onnx", "profile.json"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def export(*argv: object) -> tuple[int, dict[str, Any], str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["export", "tensorrt", *map(str, argv), "--threads", "1", "--json"])
    return code, json.loads(out.getvalue()) if code == 0 else {}, err.getvalue()


@pytest.mark.parametrize(
    ("flags", "opset", "ir", "dtype", "bound"),
    [
        ((), 18, 9, "FLOAT", 1e-4),
        (("--dtype", "fp16", "--trt", "10.15"), 18, 10, "FLOAT16", 1e-2),
        (("--trt", "8.6"), 17, 8, "FLOAT", 1e-4),
        (("--trt", "11.x", "--opset", "20"), 20, 10, "FLOAT", 1e-4),
        (("--target", "tritonserver:24.08"), 18, 9, "FLOAT", 1e-4),
        (("--target", "trt:8.6"), 17, 8, "FLOAT", 1e-4),
    ],
    ids=["10", "fp16", "8.6", "11", "server", "8.6 by target"],
)
def test_files_of_an_export(
    calm: Any, use_fused: Any, tmp_path: Path, flags: tuple[str, ...], opset: int, ir: int, dtype: str, bound: float
) -> None:
    use_fused()
    out = tmp_path / "out"
    code, result, err = export(calm.path, "--out", out, "--min", 2, "--opt", 4, "--max", 9, *flags)
    assert code == 0, err
    assert "linted; not yet built on a device" in err
    assert names(out) == FILES
    proto = onnx.load(out / "model.onnx")
    assert (proto.opset_import[0].version, proto.ir_version) == (opset, ir)
    assert lint(proto, parse_version(flags[flags.index("--trt") + 1] if "--trt" in flags else "10.x")) == []

    (image,) = proto.graph.input
    shape = [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim]
    line = shlex.split((out / "build.sh").read_text().partition("\n\n")[2].replace("\\\n", ""))
    assert line == result["trtexec"]
    for flag, batch in (("min", 2), ("opt", 4), ("max", 9)):
        assert f"--{flag}Shapes={image.name}:{'x'.join(map(str, [batch, *shape[1:]]))}" in line
    profile = json.loads((out / "profile.json").read_text())
    assert profile == result["profile"]
    assert profile["inputs"][image.name]["dtype"] == dtype
    assert profile["outputs"] == {"logits": {"dtype": dtype, "shape": [-1, 5]}}
    assert {p.key: p.value for p in proto.metadata_props}.get("vtk.export", "").count(profile["tensorrt"]) == 1

    images = torch.randn(3, 3, 32, 48)
    with torch.no_grad():
        expected = calm.model()(images).numpy()
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    kind = np.float16 if dtype == "FLOAT16" else np.float32
    found = session.run(["logits"], {"pixel_values": images.numpy().astype(kind)})[0]
    np.testing.assert_allclose(found, expected, atol=bound * np.abs(expected).max())


def test_weights_beside_the_file_survive_lowering_and_another_export(
    calm: Any, use_fused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fused()
    out = tmp_path / "out"
    monkeypatch.setattr("vtk_export.output_folder.INLINE_LIMIT", 1000)
    assert export(calm.path, "--out", out, "--trt", "8.6")[0] == 0
    assert names(out) == sorted([*FILES, "model.onnx.data"])
    images = torch.randn(2, 3, 32, 48)
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = calm.model()(images).numpy()
    np.testing.assert_allclose(session.run(None, {"pixel_values": images.numpy()})[0], expected, atol=1e-3)
    monkeypatch.undo()
    use_fused()
    assert export(calm.path, "--out", out)[0] == 0
    assert names(out) == FILES
    (out / "notes.txt").write_text("mine")
    assert export(calm.path, "--out", out)[0] == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device runs bf16 files")
def test_bf16_is_kept_only_unverified_where_nothing_runs_it(calm: Any, use_fused: Any, tmp_path: Path) -> None:
    use_fused()
    argv = (calm.path, "--out", tmp_path / "out", "--dtype", "bf16", "--trt", "10.15", "--opset", 22)
    code, _, err = export(*argv)
    assert (code, "add --unverified" in err) == (5, True)
    code, result, err = export(*argv, "--unverified")
    assert (code, result["findings"], result["verified"]) == (0, [], []), err
    proto = onnx.load(tmp_path / "out" / "model.onnx")
    assert json.loads({p.key: p.value for p in proto.metadata_props}["vtk.export"])["verified"] is False
    assert result["profile"]["inputs"]["pixel_values"]["dtype"] == "BFLOAT16"


def _other_weights(proto: onnx.ModelProto) -> None:
    (head,) = (node for node in proto.graph.node if node.op_type == "Gemm")
    tensor = next(t for t in proto.graph.initializer if t.name == head.input[1])
    value = numpy_helper.to_array(tensor).copy()
    value[0, 0] += 0.5
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def _through_double(proto: onnx.ModelProto) -> None:
    """The same values, by way of a type that TensorRT has not."""
    for node in proto.graph.node:
        node.output[:] = ["raw" if name == "logits" else name for name in node.output]
    proto.graph.node.append(helper.make_node("Cast", ["raw"], ["double"], to=TensorProto.DOUBLE, name="widen"))
    proto.graph.node.append(helper.make_node("Cast", ["double"], ["logits"], to=TensorProto.FLOAT, name="narrow"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_other_weights, "max error"),
        (_through_double, "cannot take the graph: `widen` (Cast, DOUBLE) does not support"),
    ],
    ids=["values", "lint"],
)
def test_a_wrong_graph_is_exit_4_and_the_earlier_export_stays(
    calm: Any, use_fused: Any, tmp_path: Path, fault: Any, message: str
) -> None:
    use_fused()
    out = tmp_path / "out"
    assert export(calm.path, "--out", out)[0] == 0
    before = {name: (out / name).read_bytes() for name in names(out)}
    use_fused(fault)
    for folder in (out, tmp_path / "new"):
        code, _, err = export(calm.path, "--out", folder, "--trt", "11.x")
        assert code == 4
        assert message in err
    assert {name: (out / name).read_bytes() for name in names(out)} == before
    assert not (tmp_path / "new").exists()


def test_build_without_tensorrt_is_exit_5_before_any_work(
    calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = export(calm.path, "--out", tmp_path / "out", "--build")
    assert code == 5
    assert "`--build` needs TensorRT's Python package, which is not installed" in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_build_leaves_a_stamped_engine_until_the_next_export(
    calm: Any, use_fused: Any, tmp_path: Path, fake_tensorrt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fused()
    out = tmp_path / "out"
    scripts = Scripts(out, fake_tensorrt)
    monkeypatch.syspath_prepend(str(fake_tensorrt))
    monkeypatch.setenv("PYTHONPATH", str(fake_tensorrt))
    for name, value in scripts.env().items():
        monkeypatch.setenv(name, value)
    code, result, err = export(calm.path, "--out", out, "--build")
    assert code == 0, err
    assert "built on this GPU" in err
    assert result["engine"]["tensorrt"] == "10.9.0.34"
    assert {"model.engine", "model.engine.json", "timing.cache"} <= set(names(out))
    monkeypatch.setenv("FAKE_ERROR", "no")
    code, _, err = export(calm.path, "--out", out, "--build")
    assert code == 4
    assert "does not parse model.onnx: no (the ONNX file is kept)" in err
    assert [name for name in names(out) if name != "timing.cache"] == FILES


def test_a_model_that_cannot_be_fused_has_attention_written_out(
    calm: Any, use_fused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fused()
    seen = []

    def refuse(
        model: torch.nn.Module,
        fuse: bool | None,
        *,
        vits: bool = False,
        divide_scores: bool = True,
        fixed_size: bool = True,
    ) -> torch.nn.Module:
        assert not divide_scores  # TensorRT has the scale on q
        seen.append([module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")])
        if fuse:
            raise UsageError("cannot fuse Strange: unknown; leave out --fuse")
        return model

    monkeypatch.setattr("vtk_export.onnx.build.choose_form", refuse)
    code, result, err = export(calm.path, "--out", tmp_path / "out")
    assert (code, result["fused"], seen) == (0, False, [[False], [False]])
    assert "exported unfused: cannot fuse Strange: unknown" in err
    assert export(calm.path, "--out", tmp_path / "other", "--fuse")[0] == 2


def test_lint_looks_at_any_onnx(exported_calm: Any, fused: onnx.ModelProto, tmp_path: Path) -> None:
    good = onnx.ModelProto()
    good.CopyFrom(fused)
    good.ir_version = 9
    onnx.save(good, tmp_path / "good.onnx")
    code, result, err = export(tmp_path / "good.onnx", "--lint")
    assert (code, result["findings"]) == (0, [])
    assert "0 refused, 0 slow" in err
    code, _, err = export(exported_calm.out, "--lint", "--trt", "10.15")
    assert code == 4
    assert "refused: `node_Reshape" in err
    assert export(tmp_path / "absent.onnx", "--lint")[0] == 3
    assert export(tmp_path / "good.onnx", "--out", tmp_path / "out")[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": None}, "`--out` is missing"),
        ({"lint": True}, "leave out --out"),
        ({"min": 4, "opt": 2}, "required is 1 ≤ min ≤ opt ≤ max"),
        ({"min": 0}, "required is 1 ≤ min"),
        ({"static_batch": 2, "max": 8}, "leave out --min"),
        ({"static_batch": 0}, "static-batch"),
        ({"workspace": 0}, "workspace"),
        ({"trt": "8.6", "dtype": "fp16"}, "not being strongly typed"),
        ({"trt": "8.6", "opset": 20}, "cannot be lowered"),
        ({"trt": "10.3", "opset": 22}, "at most 20"),
        ({"trt": "9.0"}, "is not a known TensorRT version"),
        ({"keep_io_types": True}, "keep-io-types"),
        ({"target": "ort:1.20"}, "give trt:X.Y or tritonserver:YY.MM"),
        ({"target": "tritonserver:25.12"}, "its TensorRT version is not known here"),
        ({"target": "trt:10.3", "trt": "10.9"}, "leave out one"),
        ({"target": "trt:10.3", "opset": 22}, "at most 20"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        TensorrtCommand(**{"source": "x", "out": Path("y"), **options})
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "fused", "slow"),
    [
        ("vit_small_patch16_18x2_224", ("--dtype", "fp16"), True, 0),
        ("vit_tiny_patch16_224", ("--static-batch", "2"), True, 0),
        ("vit_tiny_patch16_224", ("--no-fuse", "--trt", "11.x"), False, 12),
        ("deit3_small_patch16_224", ("--trt", "8.6"), True, 0),
    ],
    ids=["parallel", "fixed batch", "plain", "8.6"],
)
def test_real_exports_of_timm_models(tmp_path: Path, name: str, flags: tuple[str, ...], fused: bool, slow: int) -> None:
    argv = (name, "--no-pretrained", "--img-size", 32, "--num-classes", 5, "--out", tmp_path / "out", *flags)
    code, result, err = export(*argv)
    assert code == 0, err
    assert result["fused"] == fused
    assert [finding["level"] for finding in result["findings"]] == ["slow"] * slow
    assert any("Shapes" in word for word in result["trtexec"]) == ("--static-batch" not in flags)

"""``--target`` and ``--ir-version``: the table against what is installed, and what is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from vtk.__main__ import main
from vtk.errors import UsageError
from vtk_export.onnx.config import OnnxConfig
from vtk_export.targets import IR_VERSIONS, KNOWN, OPSETS, describe_oldest, oldest, parse_target


@pytest.mark.parametrize(
    ("text", "opset", "ir"),
    [
        ("ort:1.14", 18, 8),
        ("ort:1.16.3", 19, 9),
        ("ort:1.20.1", 21, 10),
        ("tritonserver:24.04", 20, 9),
        ("tritonserver:24.05", 21, 10),
        ("tritonserver:25.06", 22, 10),
        ("trt:10.3.0", 20, 9),
        ("trt:10.15", 22, 10),
        ("trt:11.2", 22, 10),
    ],
)
def test_what_run_times_take(text: str, opset: int, ir: int) -> None:
    target = parse_target(text)
    assert (target.opset, target.ir_version, target.text) == (opset, ir, text)


def test_newer_versions_take_what_older_ones_take() -> None:
    for versions in KNOWN.values():
        caps = list(versions.values())
        assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(caps))
        assert all(opset in OPSETS and ir in IR_VERSIONS for opset, ir in caps)
        assert caps[-1] == (OPSETS.stop - 1, IR_VERSIONS.stop - 1)


def test_every_month_of_the_server_is_there() -> None:
    months = list(KNOWN["tritonserver"])
    assert (months[0], months[-1], len(months)) == ("24.04", "26.08", 29)


def test_the_installed_onnxruntime_takes_what_the_table_says() -> None:
    short = ".".join(onnxruntime.__version__.split(".")[:2])
    opset, ir = KNOWN["ort"].get(short, (OPSETS.stop - 1, IR_VERSIONS.stop - 1))
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=ir)
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_oldest_run_times_of_a_file() -> None:
    assert oldest(18, 8) == {"tritonserver": "24.04", "trt": "10.0", "ort": "1.14"}
    assert oldest(18, 10) == {"tritonserver": "24.05", "trt": "10.6", "ort": "1.18"}
    assert oldest(22, 10) == {"tritonserver": "25.05", "trt": "10.15", "ort": "1.22"}
    assert describe_oldest(20, 9) == (
        "opset 20 and IR 9 need at least tritonserver 24.04, TensorRT 10.0, onnxruntime 1.17"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tritonserver:23.12",
            r"what tritonserver 23.12 takes is not known; known are: 24.04 to 24.12, 25.01 to 25.12",
        ),
        ("trt:9.3", r"what TensorRT 9.3 takes is not known; known are: 10.0 to 10.16, 11.0 to 11.2"),
        ("ort:1.13", r"known are: 1.14 to 1.31"),
        ("ort", "is not a runtime; give tritonserver:YY.MM, trt:X.Y or ort:X.Y"),
        ("openvino:2024.1", "is not a runtime"),
        ("ort:new", "is not a runtime"),
    ],
)
def test_unknown_run_times_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        OnnxConfig(out=Path("y"), target=text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "ort:1.16", "opset": 20}, r"`--opset` 20 is more than ort:1.16 takes; give at most 19"),
        ({"target": "ort:1.16", "ir_version": 10}, r"`--ir-version` 10 is more than ort:1.16 takes; give at most 9"),
        ({"ir_version": 7}, "allowed is from 8 to 10"),
        ({"ir_version": 11}, "allowed is from 8 to 10"),
        ({"target": "trt:10.3", "int8": "dynamic"}, "trt:10.3 cannot run `--int8 dynamic`"),
    ],
)
def test_more_than_the_run_time_takes_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OnnxConfig(out=Path("y"), **options)


@pytest.mark.parametrize(
    ("argv", "ir"),
    [((), 10), (("--target", "ort:1.14"), 8), (("--target", "tritonserver:24.04"), 9), (("--ir-version", "9"), 9)],
)
def test_the_file_has_the_ir_version_and_says_what_it_needs(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], ir: int
) -> None:
    fake_calm()
    assert main(["export", "onnx", str(calm.path), "--out", str(tmp_path), "--threads", "1", "--json", *argv]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    proto = onnx.load(tmp_path / "model.onnx")
    assert (proto.ir_version, result["ir_version"]) == (ir, ir)
    assert result["facts"]["target"] == (argv[1] if "--target" in argv else "")
    assert result["oldest"] == oldest(18, ir)
    assert f"opset 18 and IR {ir} need at least " in printed.err


def test_an_ir_version_that_the_file_has_not_is_found(tmp_path: Path, exported_calm: Any) -> None:
    from vtk.errors import VerificationError
    from vtk.runtime.onnx_file import open_onnx
    from vtk_export.gate.verify import verify_structure

    path = exported_calm.out / "model.onnx"
    card = open_onnx(path).card
    verify_structure(path, card, opset=18, static_batch=None, ir_version=10)
    with pytest.raises(VerificationError, match="IR version 9 was asked for, the file has 10"):
        verify_structure(path, card, opset=18, static_batch=None, ir_version=9)

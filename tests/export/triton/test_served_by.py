"""What is printed and written for a server follows from the artefact: image, packages, labels, cached engines."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import model_config_pb2

from vtk.__main__ import main
from vtk.errors import UsageError
from vtk_export.runtime_versions import ORT, RELEASES, TRT
from vtk_export.targets import parse_target, same_version, server_for
from vtk_export.triton.command_lines import command_lines
from vtk_export.triton.config import TritonCommand, TritonConfig
from vtk_export.triton.export import export_triton
from vtk_export.triton.pbtxt import build, graph_slots, write_text
from vtk_export.triton.served_by import UNKNOWN, serve_bank, serve_engine, serve_graph, serve_python

# from docs/introduction/compatibility.md of the server and NVIDIA's Frameworks Support Matrix
FACTS = {
    "24.04": ("1.17", "8.6.3"), "24.05": ("1.18", "10.0.1"), "24.08": ("1.18", "10.3.0"), "24.10": ("1.19", "10.5.0"),
    "24.12": ("1.20", "10.7.0"), "25.04": ("1.21", "10.9.0"), "25.06": ("1.22", "10.11.0"),
    "26.02": ("1.24", "10.15.1"), "26.07": ("1.27", "11.1"),
}  # fmt: skip


def graph(path: Path, opset: int = 18, ir: int = 10, kind: int = TensorProto.FLOAT, batch: int | str = "batch") -> Path:
    """Write a graph of one node by ONNX's own helpers."""
    image = helper.make_tensor_value_info("pixel_values", kind, [batch, 3, 8, 8])
    logits = helper.make_tensor_value_info("logits", kind, [batch, 192])
    node = helper.make_node("Flatten", ["pixel_values"], ["logits"])
    made = helper.make_graph([node], "g", [image], [logits])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir), path)
    return path


def command(**options: Any) -> TritonCommand:
    return TritonCommand(**{"out": Path("models"), "sources": ("pack",), **options})


def parse(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def image_of(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("docker run"))
    (image,) = (word for word in shlex.split(line) if word.startswith("nvcr.io/"))
    return image


def test_the_table_has_the_versions_of_nvidias_pages() -> None:
    assert {m: (RELEASES[m].ort, ".".join(RELEASES[m].tensorrt.split(".")[:3])) for m in FACTS} == FACTS
    for release in RELEASES.values():
        assert release.ort in ORT and release.image == f"nvcr.io/nvidia/tritonserver:{release.month}-py3"
        assert not release.tensorrt or release.trt_caps == TRT[".".join(release.tensorrt.split(".")[:2])]


@pytest.mark.parametrize(
    ("opset", "ir", "month"), [(18, 8, "24.10"), (18, 10, "24.10"), (21, 10, "24.10"), (22, 10, "25.05")]
)
def test_the_image_takes_the_files_opset_and_ir(tmp_path: Path, opset: int, ir: int, month: str) -> None:
    path = graph(tmp_path / "model.onnx", opset, ir)
    assert serve_graph(path, None).image == f"nvcr.io/nvidia/tritonserver:{month}-py3"
    most = ORT[RELEASES[month].ort]
    assert opset <= most[0] and ir <= most[1]


@pytest.mark.parametrize(
    ("built", "month"),
    [("10.3", "24.08"), ("10.3.0", "24.08"), ("10.3.0.26", "24.08"), ("10.5.0", "24.10"), ("10.7.0.23", "24.12"),
     ("10.9.0.34", "25.03"), ("8.6.3.1", "24.04"), ("10.15.1", "26.02")],
)  # fmt: skip
def test_the_image_has_the_tensorrt_of_the_engine(built: str, month: str) -> None:
    served = serve_engine(built, None)
    assert served.release is not None and served.release.month == month
    assert same_version(served.release.tensorrt, built)
    assert serve_engine(built, parse_target(f"tritonserver:{month}")) == served
    assert serve_engine(built, parse_target(f"trt:{'.'.join(built.split('.')[:2])}")) == served


@pytest.mark.parametrize(
    ("options", "here", "asks"),
    [
        ({}, False, False), ({}, True, True), ({"server_device": "cpu"}, True, False),
        ({"server_device": "gpu"}, False, True), ({"backend": "python"}, True, False),
        ({"backend": "tensorrt"}, False, True), ({"backend": "vtk"}, False, False),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "auto" if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_the_container_asks_for_gpus_where_the_model_can_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], here: bool, asks: bool
) -> None:
    """Docker starts no container that asks for GPUs on a machine without any."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: here)
    inputs, outputs, batched = graph_slots(graph(tmp_path / "model.onnx"), labels=None)
    message = build("m", command(**options), inputs, outputs, batched=batched, digest="0" * 64)
    line = command_lines(tmp_path, message, serve_bank(None), ["m"], [3, 8, 8])[0]
    assert ("--gpus=all" in shlex.split(line)) == asks


def test_an_engine_that_no_known_server_loads_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_engine("10.14.1.48", None).image == UNKNOWN
    assert "no known server release has TensorRT 10.14.1.48" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("built", "target", "message"),
    [
        ("10.3.0", "tritonserver:24.10", r"TensorRT 10.5.0.18, the engine was built with 10.3.0.*tritonserver:24.08"),
        ("10.3.0", "trt:10.9", "has TensorRT 10.9, the engine was built with 10.3.0"),
        ("10.14.1", "tritonserver:25.12", "its TensorRT version is not known here"),
        ("10.14.1", "trt:10.9", "or leave --target out"),
    ],
)  # fmt: skip
def test_an_engine_for_another_server_is_refused(built: str, target: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        serve_engine(built, parse_target(target))
    assert "\n" not in str(caught.value)


def test_python_gets_the_onnxruntime_that_opens_all_files_and_a_bank_its_python(tmp_path: Path) -> None:
    files = [graph(tmp_path / "a.onnx", 18, 9), graph(tmp_path / "b.onnx", 22, 10)]
    assert serve_python(files[:1], None).packages == ("onnxruntime>=1.16",)
    assert serve_python(files, None).packages == ("onnxruntime>=1.22",)
    release = serve_bank(None).release
    assert release is not None and release.python >= (3, 11)


def test_tensorrt_inside_onnxruntime_gets_a_server_whose_tensorrt_takes_the_file(tmp_path: Path) -> None:
    path = graph(tmp_path / "model.onnx", 18, 9)
    assert serve_graph(path, None, tensorrt=True).image.endswith(":24.10-py3")
    assert serve_graph(path, parse_target("trt:10.9"), tensorrt=True).image.endswith(":25.03-py3")
    assert serve_graph(graph(tmp_path / "new.onnx", 22, 10), None, tensorrt=True).image.endswith(":26.02-py3")
    assert server_for(opset=23) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "trt:10.9"}, "trt:10.9 does not run --backend onnxruntime; give tritonserver:YY.MM or ort"),
        ({"target": "ort:1.20", "backend": "tensorrt"}, "give tritonserver:YY.MM or trt"),
        ({"target": "triton:24.04", "opset": 21}, "`--opset` 21 is more than tritonserver:24.04 takes"),
        ({"target": "triton:24.10", "opset": 21, "backend": "tensorrt"}, "21 is more than trt:10.5.0.18 takes"),
        ({"target": "triton:25.12", "backend": "tensorrt"}, "its TensorRT version is not known here"),
        ({"target": "triton:24.10", "backend": "vtk"}, "has Python 3.10, and --backend vtk needs 3.11"),
        ({"target": "ort:1.20", "backend": "vtk"}, "does not run --backend vtk"),
        ({"target": "triton:23.01"}, "known are: 24.04 to 24.12"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        command(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "ir", "month"),
    [
        ((), 10, "24.10"), (("--target", "triton:24.04"), 9, "24.04"), (("--target", "ort:1.16"), 9, "24.10"),
        (("--backend", "tensorrt", "--target", "tritonserver:24.08"), 9, "24.08"),
        (("--backend", "python"), 10, "24.10"),
    ],
    ids=str,
)  # fmt: skip
def test_export_triton_prints_the_image_of_its_file(
    calm: Any, fake_calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], ir: int,
    month: str,
) -> None:  # fmt: skip
    fake_calm()
    monkeypatch.setattr("vtk_export.tensorrt.export.check", lambda proto, target: [])  # timm's graph, not its form
    options = dict(zip((flag[2:] for flag in flags[::2]), flags[1::2], strict=True))
    result = export_triton({"pets": calm.path}, TritonConfig(out=tmp_path, threads=1, **options), show=False)  # type: ignore[arg-type]
    assert image_of(list(result.models[0].lines)) == f"nvcr.io/nvidia/tritonserver:{month}-py3"
    assert onnx.load(tmp_path / "pets" / "1" / "model.onnx").ir_version == ir


@pytest.mark.parametrize(
    ("kind", "batch", "labelled"),
    [("FLOAT", "batch", True), ("DOUBLE", "batch", True), ("FLOAT16", "batch", False), ("BFLOAT16", "batch", False),
     ("FLOAT", 2, False), ("FLOAT", 1, False), ("FLOAT16", 2, False)],
)  # fmt: skip
def test_labels_are_named_only_where_the_server_classifies(
    tmp_path: Path, kind: str, batch: int | str, labelled: bool
) -> None:
    path = graph(tmp_path / "m.onnx", kind=TensorProto.DataType.Value(kind), batch=batch)
    inputs, outputs, batched = graph_slots(path, labels="logits")
    found = parse(write_text(build("m", command(), inputs, outputs, batched=batched)))
    assert [entry.label_filename for entry in found.output] == (["labels.txt"] if labelled else [""])


@pytest.mark.parametrize(
    ("flags", "labelled"),
    [((), True), (("--dtype", "fp16"), False), (("--dtype", "fp16", "--keep-io-types"), True),
     (("--dtype", "fp16", "--with-preproc", "--ensemble"), False), (("--with-preproc", "--ensemble"), True)],
    ids=str,
)  # fmt: skip
def test_a_repository_has_labels_where_its_config_names_them(
    calm: Any, fake_calm: Any, tmp_path: Path, flags: tuple[str, ...], labelled: bool
) -> None:
    fake_calm()
    argv = ["export", "triton", f"pets={calm.path}", "--out", str(tmp_path), "--threads", "1", *flags]
    assert main(argv) == 0
    for folder in tmp_path.iterdir():
        config = parse((folder / "config.pbtxt").read_text(encoding="utf-8"))
        named = {entry.label_filename for entry in config.output} - {""}
        assert (folder / "labels.txt").exists() == bool(named)
        assert bool(named) == (labelled and not folder.name.endswith("_preprocess"))


Cached = Callable[..., dict[str, str]]


@pytest.fixture
def cached(tmp_path: Path) -> Cached:
    """Return the cache's parameters in the config of a graph."""
    from vtk.runtime.weight_digests import content_digest

    def run(path: Path, **options: Any) -> dict[str, str]:
        inputs, outputs, batched = graph_slots(path, labels="logits")
        config = command(backend="tensorrt", **options)
        made = build("m", config, inputs, outputs, batched=batched, digest=content_digest(path))
        (engine,) = parse(write_text(made)).optimization.execution_accelerators.gpu_execution_accelerator
        return {key: value for key, value in engine.parameters.items() if "cache" in key}

    return run


def weighted(path: Path, value: float, *, beside: bool) -> Path:
    path.parent.mkdir()
    proto = onnx.load(graph(path))
    weight = numpy_helper.from_array(numpy_helper.to_array(helper.make_tensor("w", 1, [64, 8], [value] * 512)), "w")
    proto.graph.initializer.append(weight)
    onnx.save_model(proto, path, save_as_external_data=beside, location="model.onnx.data")
    return path


@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_engines_of_other_weights_have_a_folder_and_a_prefix_of_their_own(
    tmp_path: Path, cached: Cached, beside: bool
) -> None:
    old = cached(weighted(tmp_path / "old" / "model.onnx", 1, beside=beside))
    new = cached(weighted(tmp_path / "new" / "model.onnx", 2, beside=beside))
    same = cached(weighted(tmp_path / "same" / "model.onnx", 1, beside=beside))
    assert old == same
    for key in ("trt_engine_cache_path", "trt_timing_cache_path", "trt_engine_cache_prefix"):
        assert old[key] != new[key]
    # ONNX Runtime makes the folder, but none above it
    assert re.fullmatch(r"/tmp/vtk-engines-[0-9a-f]{16}", old["trt_engine_cache_path"])


def test_engines_of_other_options_are_kept_apart_and_where_it_was_asked_for(tmp_path: Path, cached: Cached) -> None:
    path = graph(tmp_path / "model.onnx")
    found = [
        cached(path, **options)["trt_engine_cache_path"] for options in ({}, {"dtype": "fp16"}, {"max_batch_size": 4})
    ]
    assert len(set(found)) == 3
    assert Path(cached(path, engine_cache="/cache/")["trt_engine_cache_path"]).parent == Path("/cache")


def test_a_model_that_was_trained_again_does_not_get_the_old_engine(
    calm: Any, fake_calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtk_export.tensorrt.export.check", lambda proto, target: [])  # timm's graph, not its form
    argv = ["export", "triton", f"pets={calm.path}", "--backend", "tensorrt", "--out", str(tmp_path), "--threads", "1"]

    def nudge(proto: onnx.ModelProto) -> None:
        tensor = next(t for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2)
        values = numpy_helper.to_array(tensor) * np.float32(1 + 1e-5)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    found = []
    for fault in (None, None, nudge):
        fake_calm(fault)
        assert main(argv) == 0
        config = parse((tmp_path / "pets" / "config.pbtxt").read_text(encoding="utf-8"))
        (engine,) = config.optimization.execution_accelerators.gpu_execution_accelerator
        found.append((engine.parameters["trt_engine_cache_path"], engine.parameters["trt_engine_cache_prefix"]))
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])

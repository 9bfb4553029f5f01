"""ONNX files, compiled libraries, engines, and a server's model repository."""

import hashlib
import json
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from google.protobuf import text_format
from safetensors.torch import save

from tests.fuzz.mutators import flip, json_text, xml_text, zipped
from tests.fuzz.reader import CARD, JSON, ONNX, TENSORS, V0_1, Reader, quietly
from tests.fuzz.structured import protobuf


def _make_onnx(folder: Path) -> None:
    for name in ("onnx/model.onnx", "preproc/model.onnx", "gathered/gathered.onnx", "files/digits.onnx"):
        shutil.copyfile(V0_1 / "exports" / name, folder / name.replace("/", "-"))
    for data in (V0_1 / "exports" / "files").glob("*.data"):
        shutil.copyfile(data, folder / data.name)


def _read_onnx(folder: Path, file: Path) -> None:
    from vtk.profiling.onnx_work import work_of_onnx
    from vtk.runtime.onnx_file import open_onnx
    from vtk_export.lint.linter import lint, load
    from vtk_export.tensorrt.config import parse_version

    for read in (
        lambda: open_onnx(file, many=True),
        lambda: work_of_onnx(file),
        lambda: lint(load(file), parse_version("10.3")),
    ):
        quietly(read)
    source = open_onnx(file, many=True)
    assert source.card.classes and min(source.card.input.size) > 0


_IR = """<?xml version="1.0"?>
<net name="model" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"><data shape="?,3,8,8" element_type="f32"/>
<output><port id="0" precision="FP32" names="pixel_values"><dim>-1</dim><dim>3</dim><dim>8</dim><dim>8</dim></port>
</output></layer>
<layer id="1" name="w" type="Const" version="opset1"><data element_type="f32" shape="2" offset="0" size="8"/>
<output><port id="0" precision="FP32"><dim>2</dim></port></output></layer>
<layer id="2" name="y" type="Add" version="opset1"><input><port id="0"><dim>-1</dim></port></input>
<output><port id="2" precision="FP32" names="logits,a\\,b"><dim>-1</dim><dim>CLASSES</dim></port></output></layer>
<layer id="3" name="r" type="Result" version="opset1"><input><port id="0"><dim>-1</dim></port></input></layer>
</layers><edges><edge from-layer="0" from-port="0" to-layer="2" to-port="0"/>
<edge from-layer="2" from-port="2" to-layer="3" to-port="0"/></edges>
<rt_info><vtk>INFO<graph_sha256 value="00"/><weights_sha256 value="00"/></vtk></rt_info></net>
"""


def _make_openvino(folder: Path) -> None:
    from vtk.runtime.export_facts import KEY, Facts

    size = {"height": 8, "width": 8, "in_chans": 3, "mean": [0.5] * 3, "std": [0.5] * 3}
    card = json.dumps({**CARD, "input": {**CARD["input"], **size}})
    facts = Facts(int8="static", names={"features": "x"}).props()[KEY]
    described = "".join(f'<{name} value="{escape(text, {chr(34): "&quot;"})}"/>' for name, text in
                        (("card", card), ("export", facts)))  # fmt: skip
    text = _IR.replace("CLASSES", str(len(CARD["classes"])))
    (folder / "ours.xml").write_text(text.replace("INFO", described), "utf-8")
    (folder / "other.xml").write_text(text.replace("INFO", ""), "utf-8")
    for name in ("ours", "other"):
        (folder / f"{name}.bin").write_bytes(bytes(8))


def _read_openvino(folder: Path, file: Path) -> None:
    from vtk.runtime.openvino_file import open_openvino

    source = open_openvino(file)
    assert source.card.classes and min(source.card.input.size) > 0


def _make_aoti(folder: Path) -> None:
    meta = {
        "vtk": json.dumps(CARD),
        "vtk.precision": "fp32",
        "vtk.torch": "2.14",
        "AOTI_DEVICE_KEY": "cpu",
        "vtk.cpu": "AVX2",
    }
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
        archive.writestr("model/data/aotinductor/model/x.wrapper_metadata.json", json.dumps(meta))
        archive.writestr("model/version", "1")


def _read_aoti(folder: Path, file: Path) -> None:
    from vtk.runtime.aoti_file import device_of, is_ours, open_aoti

    assert is_ours(file) in (True, False)
    source = open_aoti(file)
    assert isinstance(device_of(source), str) and source.card.classes


def _make_engine(folder: Path) -> None:
    stamp = {
        "tensorrt": "10.3",
        "gpu": "x",
        "compute_capability": "9.0",
        "engine_sha256": "0" * 64,
        "onnx_sha256": "1" * 64,
    }
    (folder / "model.engine").write_bytes(b"ftrt" * 100)
    (folder / "model.engine.json").write_text(json.dumps(stamp))
    (folder / "profile.json").write_text(json.dumps({"precision": "fp16", "tf32": False, "onnx_sha256": "1" * 64}))
    (folder / "model.json").write_text(json.dumps(CARD))


def _read_engine(folder: Path, file: Path) -> None:
    from vtk.runtime.engine_files import open_engine

    assert open_engine(folder / "model.engine").card.classes


def _read_repository(folder: Path, file: Path) -> None:
    from vtk_export.tasks.index import known_files
    from vtk_export.triton.bank_packs import has_base
    from vtk_export.triton.publish import find_existing

    at = folder / "digits" / "1"
    known_files(at)
    assert has_base(at, "x") in (True, False)
    found = find_existing(folder, "digits")
    assert found is not None and found.versions == (1,)


def _make_repository(folder: Path) -> None:
    shutil.copytree(V0_1 / "repositories" / "onnxruntime" / "digits", folder / "digits", dirs_exist_ok=True)
    shutil.copyfile(
        V0_1 / "repositories" / "python" / "many" / "1" / "tasks.json", folder / "digits" / "1" / "tasks.json"
    )
    for bad in ("digits/vtk_images.py", "digits/client.py"):
        (folder / bad).unlink()


def _pbtxt(data: bytes, others: Any, rng: random.Random) -> bytes:
    from vtk_export.triton.pbtxt import messages

    message = text_format.Parse(data.decode(), messages().ModelConfig())
    edited = protobuf(messages().ModelConfig.FromString)(message.SerializeToString(), others, rng)
    return text_format.MessageToString(messages().ModelConfig.FromString(edited)).encode()


def _make_factors(folder: Path) -> None:
    layout = {
        "format": 1, "model": "factors.onnx", "layout": "0" * 16, "batch": None,
        "tasks": {"a": {"file": "a.safetensors"}}, "sha256": {"factors.onnx": "0" * 64},
        "input": {"in_chans": 3, "height": 32, "width": 32},
        "stacks": [
            {"name": "qkv.a", "axes": [8, "rank"], "dtype": "fp16", "fill": 0},
            {"name": "qkv.b", "axes": ["rank", 24], "dtype": "fp16", "fill": 0},
            {"name": "head.bias", "axes": ["classes"], "dtype": "fp32", "fill": -1e38},
            {"name": "counts", "axes": [], "dtype": "int32", "fill": 0},
        ],
    }  # fmt: skip
    (folder / "factors.json").write_text(json.dumps(layout))
    rows = {"qkv.a": torch.ones(8, 2).half(), "qkv.b": torch.ones(2, 24).half(), "head.bias": torch.ones(2)}
    body = save(rows)
    digest = hashlib.sha256(body[8 + int.from_bytes(body[:8], "little") :]).hexdigest()
    about = {"layout": layout["layout"], "classes": ["a", "b"], "sha256": digest}
    (folder / "a.safetensors").write_bytes(save(rows, {"vtk.factors": json.dumps(about)}))


def _read_factors(folder: Path, file: Path) -> None:
    from vtk.errors import DataError
    from vtk_export.triton.served.vtk_factors import FactorError, read_layout, read_task

    try:
        layout = read_layout(folder / "factors.json")
        classes, rows = read_task(folder / "a.safetensors", layout)
    except FactorError as error:  # the class knows nothing of vtk
        raise DataError(str(error)) from error
    assert len(rows) == len(layout["stacks"]) and all(isinstance(name, str) for name in classes)


READERS = {
    "onnx": Reader(1500, _make_onnx, _read_onnx, {".onnx": ONNX}),
    "openvino": Reader(500, _make_openvino, _read_openvino, {".xml": (flip, xml_text, xml_text)}),
    "aoti": Reader(500, _make_aoti, _read_aoti, {".pt2": (flip, zipped(json_text))}),
    "engine": Reader(400, _make_engine, _read_engine, {".json": JSON}),
    "repository": Reader(400, _make_repository, _read_repository, {".pbtxt": (flip, _pbtxt), "tasks.json": JSON}),
    "factors": Reader(400, _make_factors, _read_factors, {".json": JSON, ".safetensors": TENSORS}),
}

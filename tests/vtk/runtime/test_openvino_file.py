"""OpenVINO models as sources: what plain OpenVINO wrote is read without it, and damage is one line."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import DataError
from vtk.runtime.export_facts import Facts
from vtk.runtime.ir_graph import read_ir
from vtk.runtime.opening import open_source
from vtk.runtime.weight_digests import REWRITTEN

openvino = pytest.importorskip("openvino")
from openvino import opset13 as op  # noqa: E402

NAMES = ("blue", 'a "b" <c> & d', "two\nlines", "\u2028\uffff", "\udcff", "日本 語")
CARD = Card(ModelSpec("by-hand"), InputSpec(4, 6, mean=(0.0,) * 3, std=(1.0,) * 3), NAMES)


def make(
    shape: tuple[int, ...] = (-1, 3, 4, 6), *, name: str = "pixel_values", output: str = "logits", outputs: int = 1
) -> Any:
    """Images, flattened, times a matrix; each further output is the one before, of rank 3."""
    images = op.parameter(list(shape), np.float32)
    weight = np.random.default_rng(0).normal(size=(72, len(NAMES))).astype(np.float32)
    ends = [op.matmul(op.reshape(images, np.array([0, -1]), True), op.constant(weight), False, False)]
    for _ in range(outputs - 1):
        ends.append(op.unsqueeze(ends[0], np.array([1])))
    images.output(0).tensor.set_names({name})
    ends[0].output(0).tensor.set_names({output})
    return openvino.Model([op.result(end) for end in ends], [images])


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """As `vtk export openvino` writes it."""
    from vtk_export.openvino import ir

    return ir.write(make(), CARD, tmp_path, Facts(names={"features": "x"}, int8="static"))


def test_card_and_facts_are_what_plain_openvino_reads(exported: Path) -> None:
    source = open_source(exported)
    assert (source.kind, source.card, source.described) == ("openvino", CARD, True)
    assert source.facts == Facts(names={"features": "x"}, int8="static") and source.facts.name("features") == "x"
    model = openvino.Core().read_model(exported)
    assert json.loads(model.get_rt_info(["vtk", "card"]).astype(str))["classes"] == list(NAMES)
    assert json.loads(model.get_rt_info(["vtk", "export"]).astype(str))["int8"] == "static"
    labels = model.get_rt_info(["model_info", "labels"]).astype(str).split(" ")
    assert len(labels) == len(NAMES) and labels[0] == "blue" and labels[-1] == "日本_語"


def test_names_that_xml_has_no_place_for_are_kept(tmp_path: Path) -> None:
    from vtk_export.openvino import ir

    names = ("a\tb", "\x85", "\ufffe", "\x7f", "\u2028", "  ")
    path = ir.write(make(), dataclasses.replace(CARD, classes=names), tmp_path, Facts())
    assert open_source(path).card.classes == names
    model = openvino.Core().read_model(path)
    assert len(model.get_rt_info(["model_info", "labels"]).astype(str).split(" ")) == len(names)


def test_a_file_s_name_that_is_another_term_of_ours_is_not_taken_for_it(tmp_path: Path) -> None:
    from vtk_export.openvino import ir

    card = dataclasses.replace(CARD, classes=("a", "b"))  # fewer than the width of what is called `logits`
    path = ir.write(make(), card, tmp_path / "a", Facts(names={"features": "logits"}))
    assert open_source(path).card == card
    facts = Facts(preprocessing=True, names={"images": "pixel_values"})
    path = ir.write(make((-1, -1, -1, 3), name="pixel_values"), CARD, tmp_path / "b", facts)
    assert open_source(path).facts.name("images") == "pixel_values"


def test_a_folder_and_its_weights_open_as_the_model(exported: Path) -> None:
    for path in (exported.parent, exported.with_suffix(".bin")):
        assert open_source(path).path == exported


def test_no_package_is_needed_to_open_one(exported: Path) -> None:
    code = (
        "import sys; sys.modules['openvino'] = sys.modules['onnx'] = None\n"
        f"from vtk.runtime.opening import open_source\nprint(len(open_source({str(exported)!r}).card.classes))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(NAMES))]


def cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])


def flip(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[7] ^= 1
    weights.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [(Path.unlink, "not beside it"), (cut, "needs .* of it"), (flip, "is damaged, or of another export")],
)
def test_weights_that_are_not_those_of_the_export_are_refused(
    exported: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(exported.with_suffix(".bin"))
    with pytest.raises(DataError, match=says):
        open_source(exported)


def test_a_model_that_another_tool_has_changed_opens_with_a_note(exported: Path) -> None:
    model = openvino.Core().read_model(exported)
    model.reshape([2, 3, 4, 6])
    openvino.save_model(model, exported.with_name("other.xml"), compress_to_fp16=True)
    assert open_source(exported.with_name("other.xml")).notes[-1:] == (REWRITTEN,)
    assert open_source(exported).notes[-1:] != (REWRITTEN,)


def test_white_space_is_no_change(exported: Path) -> None:
    exported.write_text(re.sub(r">\s+<", "> <", exported.read_text("utf-8")), "utf-8")
    assert REWRITTEN not in open_source(exported).notes


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("<dim>4</dim>", "<dim>5</dim>", "its card says"),
        ('<?xml version="1.0"?>', '<?xml version="1.0"?><!DOCTYPE n [<!ENTITY a "b">]>', "document type declaration"),
        ("<net ", "<not ", "not <net>"),
        ('version="11"', 'version="12"', "not <net> of version"),
        ('<edge from-layer="', '<edge from-layer="9', "not a readable OpenVINO model"),
        ("</net>", "", "not a readable OpenVINO model"),
    ],
)
def test_what_is_no_such_file_is_one_line(exported: Path, before: str, after: str, says: str) -> None:
    text = exported.read_text("utf-8")
    assert before in text
    exported.write_text(text.replace(before, after), "utf-8")
    with pytest.raises(DataError, match=says) as error:
        open_source(exported)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_model_of_another_program_is_read_whatever_its_names(outputs: int, tmp_path: Path) -> None:
    model = make(name="input,1", output="prob:0", outputs=outputs)
    openvino.save_model(model, tmp_path / "m.xml")
    source = open_source(tmp_path / "m.xml")
    assert (source.described, source.card.input.size, len(source.card.classes)) == (False, (4, 6), len(NAMES))
    assert source.facts.names == {"pixel_values": "input,1", "logits": "prob:0"}


@pytest.mark.parametrize(
    ("shape", "says"),
    [((-1, 6, 4, 3), "height, width, channels"), ((-1, 3, -1, 24), "fixed size"), ((-1, 72), "images")],
)
def test_a_model_of_another_kind_is_refused(shape: tuple[int, ...], says: str, tmp_path: Path) -> None:
    openvino.save_model(make(shape), tmp_path / "m.xml")
    with pytest.raises(DataError, match=says):
        open_source(tmp_path / "m.xml")


def test_an_onnx_file_of_ours_that_openvino_has_converted_keeps_its_card(write_onnx: Any, card: Card) -> None:
    path = write_onnx(card=card)
    openvino.save_model(openvino.convert_model(path), path.with_suffix(".xml"))
    assert open_source(path.with_suffix(".xml")).card == card


def test_inputs_and_outputs_are_those_that_openvino_sees(exported: Path) -> None:
    graph, model = read_ir(exported), openvino.Core().read_model(exported)
    for values, seen in ((graph.inputs, model.inputs), (graph.outputs, model.outputs)):
        assert [set(value.names) for value in values] == [port.names for port in seen]
        shapes = [[-1 if d.is_dynamic else d.get_length() for d in port.partial_shape] for port in seen]
        assert [[-1 if side is None else side for side in value.shape] for value in values] == shapes
    sizes = [node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant"]
    assert max(sizes) <= graph.weights_end <= exported.with_suffix(".bin").stat().st_size

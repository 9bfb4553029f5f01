"""Opens ONNX files: reads the card or the shapes, and checks the external files of weights."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtk.card import MAX_CHANNELS, MAX_PIXELS, Card, InputSpec, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.formats import parse_json
from vtk.packages import require
from vtk.readers import check_plain, reading
from vtk.runtime import weight_digests as digests
from vtk.runtime.export_facts import Facts, read_facts
from vtk.runtime.external import external_ends
from vtk.runtime.source import Source
from vtk.runtime.weight_digests import file_digest

_MAX_CLASSES = 1 << 20
_FLOATS = (1, 10, 16)
"""Numbers of TensorProto.DataType for fp32, fp16 and bf16."""
_NAMED = re.compile(r".*-([0-9a-f]{12})\.data")
"""A file of `vtk export tasks`: its name ends in the first digits of the sha256 of its bytes."""
_AGAIN = "keep the files of an export together, or export it again"


def open_onnx(path: Path, *, many: bool = False) -> Source:
    """Read the card of an ONNX file, or fill one in from its shapes.

    Args:
        path: the file.
        many: accept a file of many tasks, which needs a task's number with each image.

    Raises:
        UsageError: a file of many tasks, without ``many``.
        DataError: not an ONNX file, incomplete external weights, or an input that is not images of a fixed size.
    """
    require("onnx", "google.protobuf")
    import onnx

    proto = load_proto(path)
    if any(node.op_type == "EPContext" for node in proto.graph.node):  # ONNX Runtime would load what is in it
        raise DataError(f"{path} holds an engine, which is machine code (EPContext); give the .onnx it was made from")
    check_data_files(proto, path)
    remark = digests.check(proto, path)
    name = path.parent.name if path.stem == "model" and path.parent.name else path.name
    meta = {entry.key: entry.value for entry in proto.metadata_props}
    facts = read_facts(meta, path)
    weights = {tensor.name for tensor in proto.graph.initializer}  # which old files list among the inputs
    inputs = [value for value in proto.graph.input if value.name not in weights]
    if "vtk" not in meta:
        facts = dataclasses.replace(facts, names={**foreign_names(inputs, proto.graph.output), **facts.names})
    types = {facts.term(value.name): value.type.tensor_type for value in (*inputs, *proto.graph.output)}
    shapes = {name: _shape(kind) for name, kind in types.items()}
    if "task" in shapes and not many:
        raise UsageError(
            f"{path} holds many tasks and is run with a `task` beside each image; give the .onnx file of one task "
            "(`vtk export tasks --form files`, or both), or a pack"
        )
    image = shapes.get("pixel_values", [])
    logits = shapes.get("logits", shapes.get("probabilities", []))
    if "vtk" in meta:
        card = Card.from_json(meta["vtk"], path)
        expected = [card.input.in_chans, *card.input.size, len(card.classes)]
        found = [*image[1:], *logits[1:]]
        # raw images, a dynamic size or an output of features leave some of these numbers open
        expected = expected if image or not facts.preprocessing else expected[3:]
        expected = expected if logits or "features" not in shapes else expected[:-1]
        if facts.dynamic_size and image:
            found, expected = [found[0], *found[3:]], [expected[0], *expected[3:]]
        if found != expected:
            raise DataError(
                f"{path}: its card says (channels, height, width, classes) {expected}, its graph {found}; it was "
                "edited, export it again"
            )
        return Source("onnx", name, path, card, notes=(*facts.notes(), *filter(None, (remark,))), facts=facts)
    if len(image) != 4 or not all(image[1:]) or len(logits) != 2 or not logits[1]:
        raise DataError(
            f"{path} has the inputs and outputs {shapes}; this toolkit runs files with one input of images (batch, "
            "channels, height, width) of a fixed size, and one output (batch, classes) or one called `logits`"
        )
    chans, height, width = (d or 0 for d in image[1:])
    if width in (1, 3, 4) and chans > width:
        raise DataError(
            f"{path} takes images as (batch, height, width, channels), {image}; this toolkit runs files that take "
            "(batch, channels, height, width)"
        )
    if not (0 < chans <= MAX_CHANNELS and min(height, width) > 0 and height * width <= MAX_PIXELS
            and 0 < logits[1] <= _MAX_CLASSES):  # fmt: skip
        raise DataError(
            f"{path} says that it takes {image} and gives {logits}; the most is {MAX_CHANNELS} channels, "
            f"{MAX_PIXELS:,} pixels and {_MAX_CLASSES:,} classes: was it damaged?"
        )
    spec = InputSpec(height, width, chans, mean=(0.0,) * chans, std=(1.0,) * chans)
    cards = _tasks_of(meta, path) if "task" in shapes else {}
    # the tasks of a file share one image size; the normalisation is the first task's
    spec = next(iter(cards.values())).input if cards else spec
    card = Card(ModelSpec("onnx"), spec, tuple(str(i) for i in range(logits[1])))
    precision = {onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}
    kind = precision.get(types["pixel_values"].elem_type, "fp32")
    return Source("onnx", name, path, card, described=False, facts=Facts(kind, names=facts.names),
                  tasks=tuple(cards))  # fmt: skip


def foreign_names(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, str]:
    """Return names of a file of another program, as of `Facts.names`: its images, and its (batch, classes).

    Args:
        inputs: of the graph, without weights.
        outputs: of the graph.

    Where it is not clear which they are, nothing is renamed.
    """
    names = {value.name for value in (*inputs, *outputs)}
    kinds = [(value.name, value.type.tensor_type) for value in inputs]
    images = [name for name, kind in kinds if len(_shape(kind)) == 4 and kind.elem_type in _FLOATS]
    classes = [value.name for value in outputs if len(_shape(value.type.tensor_type)) == 2]
    found: dict[str, str] = {}
    if len(images) == 1 and "pixel_values" not in names:
        found["pixel_values"] = images[0]
    if len(classes) == 1 and not names & {"logits", "probabilities"}:
        found["logits"] = classes[0]
    return found


def _shape(kind: Any) -> list[int | None]:
    """Return the axes of a tensor type; None for one without a number."""
    return [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]


def _tasks_of(meta: Mapping[str, str], path: Path) -> dict[str, Card]:
    """Read the tasks of a file of many: name to card, in the order of their numbers."""
    fault, advice = "takes a `task` and does not say which there are", "give a file of `vtk export tasks`"
    with reading(path, fault, advice):
        listed = parse_json(meta["vtk.tasks"], f"the list of tasks of {path}")["tasks"]
        return {str(entry["name"]): Card.from_dict(entry["card"], path) for entry in listed}


def load_proto(path: Path) -> Any:
    """Read an ONNX file without the weights beside it.

    Raises:
        DataError: it does not exist, is not a regular file, or is not ONNX.
    """
    import onnx

    check_plain(path, "ONNX")
    with reading(path, "is not a readable ONNX file"):
        return onnx.load(path, load_external_data=False)


def check_data_files(proto: Any, path: Path) -> None:
    """Check the files that an ONNX model's tensors lie in.

    Args:
        proto: the model, read without them.
        path: of the model.

    Raises:
        DataError: a file is missing, outside of the model's folder, too short, or not as the digest in its name.
    """
    homes = {path.parent.resolve(), path.resolve().parent}  # of a model that is itself a link, too
    for location, end in external_ends(proto, path).items():
        file = path.parent / location
        if not file.is_file():
            raise DataError(f"{path} has weights in {location}, which is not beside it; {_AGAIN}")
        if not any(file.resolve().is_relative_to(home) for home in homes):
            raise DataError(f"{file} is a link to a file outside of its folder; {_AGAIN}")
        if file.stat().st_size < end:
            raise DataError(f"{file} has {file.stat().st_size} bytes, {path.name} needs {end} of it; {_AGAIN}")
        named = _NAMED.fullmatch(location)
        if named and file_digest(file)[:12] != named[1]:
            raise DataError(f"{file} is damaged: its bytes do not match the digest in its name; {_AGAIN}")

"""Converts ONNX graphs to OpenVINO models, and writes them with card, labels and digests; appends ``unknown``."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vtk.card import Card
from vtk.errors import DataError, VerificationError
from vtk.files import as_data_error, write_bytes
from vtk.packages import importing, require
from vtk.runtime import export_facts
from vtk.runtime.export_facts import Facts
from vtk.runtime.ir_graph import parse_ir
from vtk.runtime.openvino_file import CARD, EXPORT, GRAPH_DIGEST, WEIGHTS_DIGEST
from vtk.runtime.openvino_resize import antialias
from vtk.runtime.weight_digests import file_digest
from vtk.text import printable

if TYPE_CHECKING:
    from openvino import Model

NAME = "model.xml"
WEIGHTS = "model.bin"

_FOREIGN = ("framework", "conversion_parameters")
"""Entries of the converter: the metadata of the ONNX file, which are written again, and its path."""

_LARGEST_TEXT = 4 << 20
"""Bytes of the XML file, at most."""

_BLANK = {GRAPH_DIGEST: "0" * 64, WEIGHTS_DIGEST: "1" * 64}
"""In place of the digests until the files are written."""


def convert(path: Path) -> "Model":
    """Convert an ONNX file of ours, with static shapes where the file has them.

    Raises:
        UnavailableError: OpenVINO is not installed.
        VerificationError: OpenVINO cannot convert the graph.
    """
    require("openvino")
    with importing("OpenVINO's Python package does not load here ({error}); install it again: pip install openvino"):
        import openvino
    try:
        model = openvino.convert_model(str(path))
    except Exception as error:  # it raises whatever the operator at hand raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise VerificationError(f"OpenVINO cannot convert the graph: {lines[-1][:400]}") from error
    info: Any = model.rt_info
    for name in _FOREIGN:
        if name in info:
            del info[name]
    antialias(model)
    model.friendly_name = "model"
    return model


def read(path: Path) -> "Model":
    """Read a written model whose files may then be written again: its weights are in memory, not mapped."""
    import openvino

    core = openvino.Core()
    core.set_property({"ENABLE_MMAP": False})
    return core.read_model(str(path))


def append_unknown(model: "Model", card: Card, *, answer: str, shares: bool, name: str) -> None:
    """Add the output ``name`` (batch,), bool: largest of softmax(logits / temperature) < threshold, or NaN. In place.

    Args:
        model: with the output ``answer``, logits or their softmax.
        card: with a threshold.
        answer: name of that output.
        shares: whether it is the softmax; its last node does not say, which in int8 hands NaN on.
        name: of the new one.
    """
    from openvino import opset13 as op

    assert card.threshold is not None
    value = model.output(answer).get_node().input_value(0)
    if not shares:
        if card.temperature != 1:
            value = op.multiply(value, np.float32(1 / card.temperature)).output(0)
        value = op.softmax(value, -1).output(0)
    score = op.reduce_max(value, np.array([-1], np.int64), keep_dims=False)
    unknown = op.logical_or(op.is_nan(score), op.less(score, np.float32(card.threshold.score)))
    unknown.set_friendly_name(name)
    (added,) = model.add_outputs([unknown.output(0)])
    added.get_tensor().set_names({name})


def describe(model: "Model", card: Card, facts: Facts) -> None:
    """Write labels, card and facts into a model's metadata (``rt_info``), in place.

    ``model_info`` is what OpenVINO's own tools read: labels are separated by spaces, so a space within one becomes
    ``_``; mean and scale are of pixel values from 0 to 255.
    """
    # escaped: XML has no place for some characters, and JSON reads the same from escapes
    model.set_rt_info(json.dumps(card.to_dict()), list(CARD))
    if export_facts.KEY in (properties := facts.props()):
        model.set_rt_info(properties[export_facts.KEY], list(EXPORT))
    for path, blank in _BLANK.items():
        model.set_rt_info(blank, list(path))
    spec = card.input
    own: dict[str, object] = {
        "model_type": "Classification",
        "labels": " ".join(re.sub(r"\s", "_", printable(name)) or "_" for name in card.classes),
        "multilabel": card.multi_label,
        "embedded_processing": facts.preprocessing,
        "reverse_input_channels": False,
        "resize_type": {"crop": "crop", "squash": "standard", "pad": "fit_to_window_letterbox"}[spec.resize_mode],
    }
    if not facts.preprocessing:
        own["mean_values"] = " ".join(f"{255 * value:.7g}" for value in spec.mean)
        own["scale_values"] = " ".join(f"{255 * value:.7g}" for value in spec.std)
    for name, value in own.items():
        model.set_rt_info(str(value), ["model_info", name])


def write(model: "Model", card: Card, folder: Path, facts: Facts) -> Path:
    """Write ``model.xml`` and ``model.bin``; return the first.

    Args:
        model: of `convert`; its metadata are replaced.
        card: of the file.
        folder: where they go.
        facts: of the file; ``fp16`` stores the weights in that type.

    Raises:
        DataError: the folder cannot be written, or the disk is full.
    """
    describe(model, card, facts)
    path = folder / NAME
    with as_data_error(path):
        _save(model, path, half=facts.stored == "fp16")
        _stamp(path)
    return path


def _save(model: "Model", path: Path, *, half: bool) -> None:
    """Write both files; OpenVINO says ``iostream error`` of a full disk, or nothing.

    Raises:
        OSError: with the reason of the system, which writing as many bytes gives.
        DataError: they were not written whole for another reason.
    """
    import openvino

    failure = "it is cut short"
    try:
        openvino.save_model(model, str(path), compress_to_fp16=half)
        if path.read_bytes()[-16:].rstrip().endswith(b"</net>"):
            end, weights = parse_ir(path.read_bytes()).weights_end, path.with_name(WEIGHTS)
            if weights.stat().st_size >= end:
                return
    except (OSError, RuntimeError) as error:
        failure = str(error)
    for file in (path, path.with_name(WEIGHTS)):
        file.unlink(missing_ok=True)
    constants: list[Any] = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    size = sum(node.get_byte_size() for node in constants)
    write_bytes(path.with_name(WEIGHTS), bytes((size // 2 if half else size) + _LARGEST_TEXT))
    raise DataError(f"OpenVINO did not write {path}: {failure}; try again, or another folder")


def _stamp(path: Path) -> None:
    """Write the digests of graph and weights into a file that has blank ones."""
    data = path.read_bytes()
    graph, weights = parse_ir(data), path.with_name(WEIGHTS)
    digests = {GRAPH_DIGEST: graph.digest, WEIGHTS_DIGEST: file_digest(weights)}
    for place, digest in digests.items():
        before, after = (f'<{place[-1]} value="{text}"'.encode() for text in (_BLANK[place], digest))
        assert data.count(before) == 1, place
        data = data.replace(before, after)
    write_bytes(path, data)

"""Opens OpenVINO models (IR: ``model.xml`` with ``model.bin``): reads the card or the shapes, and checks the weights.

OpenVINO need not be installed. In the metadata of the model (``rt_info``) `vtk export openvino` writes, under ``vtk``,
the card, the facts of the export, and digests of graph and weights.
"""

from pathlib import Path

from vtk.card import MAX_CHANNELS, MAX_PIXELS, Card, InputSpec, ModelSpec
from vtk.errors import DataError
from vtk.readers import check_plain, reading
from vtk.runtime import export_facts
from vtk.runtime.export_facts import Facts, read_facts
from vtk.runtime.ir_graph import IrGraph, Value, read_ir
from vtk.runtime.source import Source
from vtk.runtime.weight_digests import REWRITTEN, file_digest

CARD, EXPORT = ("vtk", "card"), ("vtk", "export")
ONNX_CARD, ONNX_EXPORT = ("framework", "vtk"), ("framework", "vtk.export")
"""Paths in ``rt_info``; the second two are those of an ONNX file of ours that OpenVINO's converter has taken."""
GRAPH_DIGEST, WEIGHTS_DIGEST = ("vtk", "graph_sha256"), ("vtk", "weights_sha256")

_LARGEST = 256 << 20
"""Bytes of the XML file: that of a ViT of 24 blocks has three million."""
_MAX_CLASSES = 1 << 20
_AGAIN = "keep model.xml and model.bin together, or export it again"


def open_openvino(path: Path) -> Source:
    """Read the card of an OpenVINO model, or fill one in from its shapes.

    Raises:
        DataError: no OpenVINO model, weights that are absent or damaged, or an input that is not images of a fixed
            size.
    """
    graph = load_graph(path)
    remark = check_weights(path, graph)
    name = path.parent.name if path.stem == "model" and path.parent.name else path.name
    described, facts_of = (CARD, EXPORT) if CARD in graph.info else (ONNX_CARD, ONNX_EXPORT)
    if described not in graph.info:
        return _open_foreign(path, name, graph)
    card = Card.from_json(graph.info[described], path)
    facts = read_facts({export_facts.KEY: graph.info[facts_of]} if facts_of in graph.info else {}, path)
    image, logits = _value(graph.inputs, "pixel_values"), _value(graph.outputs, "logits", "probabilities")
    found, expected = list[int | None](), list[int | None]()
    if image is not None:
        axes = 1 if facts.dynamic_size else 3
        found += image.shape[1 : 1 + axes]
        expected += [card.input.in_chans, *card.input.size][:axes]
    if logits is not None:
        found += logits.shape[1:]
        expected.append(len(card.classes))
    raw = facts.preprocessing and _value(graph.inputs, "images") is not None
    features = _value(graph.outputs, "features") is not None
    if found != expected or not (image or raw) or not (logits or features):
        raise DataError(f"{path}: its card says (channels, height, width, classes) {expected}, its graph {found}; it "
                        "was edited, export it again")  # fmt: skip
    return Source("openvino", name, path, card, notes=(*facts.notes(), *filter(None, (remark,))), facts=facts)


def load_graph(path: Path) -> IrGraph:
    """Parse the XML file of a model.

    Raises:
        DataError: it does not exist, is not a regular file, or is no OpenVINO model.
    """
    check_plain(path, "an OpenVINO model")
    with reading(path, "is not a readable OpenVINO model (IR)"):
        if (size := path.stat().st_size) > _LARGEST:
            raise ValueError(f"it has {size:,} bytes, and the most is {_LARGEST:,}")
        return read_ir(path)


def check_weights(path: Path, graph: IrGraph) -> str:
    """Check the weights beside the XML file of a model against its offsets, and against the digest of an export.

    Returns:
        A note: empty, or that another tool has changed the graph.

    Raises:
        DataError: they are absent, too short, or not those that were exported.
    """
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        if graph.weights_end:
            raise DataError(f"{path} has its weights in {weights.name}, which is not beside it; {_AGAIN}")
        return ""
    if (size := weights.stat().st_size) < graph.weights_end:
        raise DataError(f"{weights} has {size} bytes, {path.name} needs {graph.weights_end} of it; {_AGAIN}")
    if GRAPH_DIGEST not in graph.info:
        return ""
    if graph.info[GRAPH_DIGEST] != graph.digest:
        return REWRITTEN
    if graph.info.get(WEIGHTS_DIGEST) != file_digest(weights):
        raise DataError(f"{weights} is damaged, or of another export: its bytes are not those that {path.name} was "
                        f"written with; {_AGAIN}")  # fmt: skip
    return ""


def _open_foreign(path: Path, name: str, graph: IrGraph) -> Source:
    """Open a model of another program: one input of images and one output of logits, whatever their names."""
    shapes = [[(value.names[:1], value.shape) for value in values] for values in (graph.inputs, graph.outputs)]
    image = graph.inputs[0].shape if len(graph.inputs) == 1 else ()
    logits = graph.outputs[0].shape if len(graph.outputs) == 1 else ()
    if len(image) != 4 or not all(image[1:]) or len(logits) != 2 or not logits[1]:
        raise DataError(f"{path} has the inputs {shapes[0]} and the outputs {shapes[1]}; this toolkit runs one input "
                        "(batch, channels, height, width) of a fixed size to one output (batch, classes)")  # fmt: skip
    chans, height, width = (side or 0 for side in image[1:])
    if chans > MAX_CHANNELS or height * width > MAX_PIXELS or logits[1] > _MAX_CLASSES:
        raise DataError(f"{path} says that it takes {image} and gives {logits}; the most is {MAX_CHANNELS} channels, "
                        f"{MAX_PIXELS:,} pixels and {_MAX_CLASSES:,} classes: was it damaged?")  # fmt: skip
    spec = InputSpec(height, width, chans, mean=(0.0,) * chans, std=(1.0,) * chans)
    card = Card(ModelSpec("openvino"), spec, tuple(map(str, range(logits[1]))))
    kind = {"FP16": "fp16", "BF16": "bf16"}.get(graph.inputs[0].dtype, "fp32")
    return Source("openvino", name, path, card, described=False, facts=Facts(kind))


def _value(values: tuple[Value, ...], *names: str) -> Value | None:
    """Return the first value with one of several names."""
    return next((value for value in values if not set(names).isdisjoint(value.names)), None)

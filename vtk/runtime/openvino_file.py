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
_FLOATS = ("FP32", "FP16", "BF16")
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
    image = _of_term(graph.inputs, facts, "pixel_values")
    logits = _of_term(graph.outputs, facts, "logits", "probabilities")
    found, expected = list[int | None](), list[int | None]()
    if image is not None:
        axes = 1 if facts.dynamic_size else 3
        found += image.shape[1 : 1 + axes]
        expected += [card.input.in_chans, *card.input.size][:axes]
    if logits is not None:
        found += logits.shape[1:]
        expected.append(len(card.classes))
    raw = facts.preprocessing and _of_term(graph.inputs, facts, "images") is not None
    features = _of_term(graph.outputs, facts, "features") is not None
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
    """Open a model of another program, whatever it calls its images and its logits (`foreign_names`)."""
    images = [value for value in graph.inputs if len(value.shape) == 4 and value.dtype in _FLOATS]
    answers = [value for value in graph.outputs if len(value.shape) == 2]
    image = _value(graph.inputs, "pixel_values") or (images[0] if len(images) == 1 else None)
    answer = _value(graph.outputs, "logits", "probabilities") or (answers[0] if len(answers) == 1 else None)
    taken, given = image.shape if image else (), answer.shape if answer else ()
    if len(taken) != 4 or not all(taken[1:]) or len(given) != 2 or not given[1]:
        shapes = [[list(value.shape) for value in values] for values in (graph.inputs, graph.outputs)]
        raise DataError(f"{path} takes {shapes[0]} and gives {shapes[1]}; this toolkit runs models with one input of "
                        "images (batch, channels, height, width) of a fixed size, and one output (batch, classes) or "
                        "one called `logits`")  # fmt: skip
    chans, height, width = (side or 0 for side in taken[1:])
    if width in (1, 3, 4) and chans > width:
        raise DataError(f"{path} takes images as (batch, height, width, channels), {list(taken)}; this toolkit runs "
                        "models that take (batch, channels, height, width)")  # fmt: skip
    if chans > MAX_CHANNELS or height * width > MAX_PIXELS or given[1] > _MAX_CLASSES:
        raise DataError(f"{path} says that it takes {list(taken)} and gives {list(given)}; the most is {MAX_CHANNELS} "
                        f"channels, {MAX_PIXELS:,} pixels and {_MAX_CLASSES:,} classes: was it damaged?")  # fmt: skip
    names = {}
    if image and image.names and "pixel_values" not in image.names:
        names["pixel_values"] = image.names[0]
    if answer and answer.names and {"logits", "probabilities"}.isdisjoint(answer.names):
        names["logits"] = answer.names[0]
    spec = InputSpec(height, width, chans, mean=(0.0,) * chans, std=(1.0,) * chans)
    card = Card(ModelSpec("openvino"), spec, tuple(map(str, range(given[1]))))
    return Source("openvino", name, path, card, described=False, facts=Facts(names=names))


def _of_term(values: tuple[Value, ...], facts: Facts, *terms: str) -> Value | None:
    """Return the first value that is one of several terms; another one may be called as a term is here."""
    for value in values:
        named = [facts.term(name) for name in value.names if name in facts.names.values()]
        if not set(named or value.names).isdisjoint(terms):
            return value
    return None


def _value(values: tuple[Value, ...], *names: str) -> Value | None:
    """Return the first value with one of several names."""
    return next((value for value in values if not set(names).isdisjoint(value.names)), None)

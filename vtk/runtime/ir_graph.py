"""Parses the XML file of an OpenVINO model (IR): inputs, outputs, extent of the weights, and metadata.

Python's own parser is enough for these, so a model can be opened, and a damaged one refused, without OpenVINO, whose
parser is C++. A document type declaration, which IR never has, is refused: its entities could expand without bound.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.parsers import expat

VERSIONS = ("10", "11")
"""Versions of the format: OpenVINO 2022 and later write 11."""

_MOST_RANK = 8


@dataclass(frozen=True)
class Value:
    """An input or output.

    Attributes:
        names: by which OpenVINO finds it.
        dtype: OpenVINO's, such as ``FP32`` or ``U8``.
        shape: None for a dynamic dimension.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class IrGraph:
    """What `read_ir` finds.

    Attributes:
        inputs: in the file's order.
        outputs: in the file's order.
        weights_end: bytes that the ``.bin`` beside it has at least.
        info: ``rt_info`` of the model, path to value.
        digest: SHA-256 of everything but ``info`` and white space.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights_end: int
    info: Mapping[tuple[str, ...], str]
    digest: str


def read_ir(path: Path) -> IrGraph:
    """Parse the XML file of a model; the caller turns any exception into one line (`vtk.readers.reading`).

    Raises:
        ValueError: it is XML, but no IR of a known version.
        expat.ExpatError: it is no XML.
    """
    return parse_ir(path.read_bytes())


def parse_ir(data: bytes) -> IrGraph:
    """Parse the bytes of such a file, as `read_ir` does."""
    found = _Handler()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = found.start, found.end
    parser.CharacterDataHandler = found.text
    parser.StartDoctypeDeclHandler = _refuse_declaration
    parser.Parse(data, True)
    return found.graph()


def _refuse_declaration(*_: Any) -> None:
    raise ValueError("it has a document type declaration")


@dataclass
class _Layer:
    kind: str
    ports: dict[str, Value] = field(default_factory=dict)


class _Handler:
    """Handlers of the parser: top-level layers and edges, constants at any depth, and ``rt_info`` of the model."""

    def __init__(self) -> None:
        self.path: list[str] = []
        self.layers: dict[str, _Layer] = {}
        self.sources: dict[tuple[str, str], tuple[str, str]] = {}
        self.info: dict[tuple[str, ...], str] = {}
        self.hash = hashlib.sha256()
        self.end_of_weights = 0
        self.layer = _Layer("")
        self.inner = ""  # type of the innermost layer, which may be within a body
        self.port: tuple[str, str, str] = ("", "", "")
        self.dims: list[int | None] = []

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.path.append(tag)
        path = tuple(self.path)
        if len(path) == 1 and (tag, attributes.get("version", "")) not in {("net", version) for version in VERSIONS}:
            raise ValueError(f"its first element is <{tag[:40]}>, not <net> of version {' or '.join(VERSIONS)}")
        if path[:2] == ("net", "rt_info"):
            if "value" in attributes:
                self.info[path[2:]] = attributes["value"]
            return
        self.hash.update(repr((tag, sorted(attributes.items()))).encode("utf-8", "surrogatepass"))
        if tag == "layer":
            self.inner = attributes.get("type", "")
        if path == ("net", "layers", "layer"):
            self.layer = self.layers[attributes["id"]] = _Layer(self.inner)
        elif tag == "data" and self.inner == "Const" and "offset" in attributes:
            offset, size = int(attributes["offset"]), int(attributes["size"])
            if offset < 0 or size < 0:
                raise ValueError(f"a constant lies at {offset}, {size} bytes long")
            self.end_of_weights = max(self.end_of_weights, offset + size)
        elif path[:3] == ("net", "layers", "layer") and len(path) == 5 and tag == "port":
            self.port, self.dims = (attributes["id"], attributes.get("precision", ""), attributes.get("names", "")), []
        elif path == ("net", "edges", "edge"):
            target = attributes["to-layer"], attributes["to-port"]
            self.sources[target] = attributes["from-layer"], attributes["from-port"]

    def text(self, data: str) -> None:
        if self.path[:2] == ["net", "rt_info"] or not data.strip():
            return
        self.hash.update(repr(data).encode("utf-8", "surrogatepass"))
        if self.path[-1] == "dim" and len(self.path) == 6 and len(self.dims) < _MOST_RANK:
            size = int(data)
            self.dims.append(None if size < 0 else size)

    def end(self, tag: str) -> None:
        if tag == "port" and len(self.path) == 5:
            place, kind, names = self.port
            self.layer.ports[place] = Value(_split(names), kind, tuple(self.dims))
        self.path.pop()

    def graph(self) -> IrGraph:
        inputs, outputs = [], []
        for place, layer in self.layers.items():
            if layer.kind == "Parameter":
                inputs += [layer.ports[port] for port in layer.ports]
            elif layer.kind == "Result":
                source, port = next(self.sources[place, port] for port in layer.ports)
                outputs.append(self.layers[source].ports[port])
        return IrGraph(tuple(inputs), tuple(outputs), self.end_of_weights, self.info, self.hash.hexdigest())


def _split(names: str) -> tuple[str, ...]:
    """Return the names of a value: a comma within one is escaped."""
    parts = names.replace(r"\,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)

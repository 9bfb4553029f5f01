"""Lists the external data files of an ONNX model, and the bytes that it needs of each."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from vtk.errors import DataError

_LARGEST = 1 << 50


def external_ends(proto: Any, path: Path) -> dict[str, int]:
    """Return the external files of a model, each with the bytes that it must have at least.

    Args:
        proto: the model, read without its external data.
        path: of the model.

    Raises:
        DataError: a tensor names no file, one outside of the model's folder, or an invalid range of bytes.
    """
    ends: dict[str, int] = {}
    functions = [node for function in getattr(proto, "functions", ()) for node in function.node]
    for tensor in (*_tensors(proto.graph), *_of_nodes(functions)):
        if not (tensor.external_data or tensor.data_location == tensor.EXTERNAL):
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        where = f"{path}: the weights `{tensor.name[:80]}` lie outside of it"
        location = entries.get("location", "")
        if not location:
            raise DataError(f"{where}, and it does not say in which file; was it damaged? Export it again")
        if _leads_away(location):
            raise DataError(f"{where}, in {location[:80]!r}, which is not beside it; a model's files lie in one folder")
        offset, length = (_bytes(entries.get(key, "0"), f"{where}, {key}") for key in ("offset", "length"))
        ends[location] = max(offset + length, ends.get(location, 0))
    return ends


def _leads_away(location: str) -> bool:
    pure = (PurePosixPath(location), PureWindowsPath(location))
    return "\0" in location or any(p.is_absolute() or p.drive or ".." in p.parts for p in pure)


def _bytes(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= _LARGEST):
        raise DataError(f"{where} {text[:40]!r}, which is no number of bytes; was it damaged? Export it again")
    return int(text)


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield all tensors of a graph and of those within its nodes: protobuf reads no more than 33 levels of these."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in (*attribute.graphs, *((attribute.g,) if attribute.HasField("g") else ())):
                yield from _tensors(graph)

"""Renames a graph's inputs and outputs as the last step before it is written, and back after it is read."""

from collections.abc import Mapping
from pathlib import Path

import onnx

from vtk.runtime.export_facts import Facts


def rename_ends(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Rename inputs and outputs, in place.

    Args:
        proto: the model.
        names: old to new; those that the graph does not have are left out. Two may be exchanged.

    Another value that has a new name already gets a name that nothing has.
    """
    ends = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    table = {old: new for old, new in names.items() if old in ends and old != new}
    if not table:
        return
    known = _values(proto.graph)
    for new in [name for name in table.values() if name in known and name not in table]:
        table[new] = _free(new, known | set(table.values()))
    _apply(proto.graph, table)


def load_graph(path: Path, facts: Facts) -> onnx.ModelProto:
    """Read an export with its weights, and call its inputs and outputs as this toolkit does."""
    proto: onnx.ModelProto = onnx.load(path)
    rename_ends(proto, {name: term for term, name in facts.names.items()})
    return proto


def _values(graph: onnx.GraphProto) -> set[str]:
    found = {tensor.name for tensor in graph.initializer}
    found |= {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    for node in graph.node:
        found |= {*node.input, *node.output}
        for inner in _inner(node):
            found |= _values(inner)
    return found


def _free(name: str, known: set[str]) -> str:
    number = 1
    while f"{name}_{number}" in known:
        number += 1
    return f"{name}_{number}"


def _apply(graph: onnx.GraphProto, table: Mapping[str, str]) -> None:
    for entry in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        entry.name = table.get(entry.name, entry.name)
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = table.get(name, name)
        for inner in _inner(node):  # which reads what is outside of it by the same names
            _apply(inner, table)


def _inner(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [graph for a in node.attribute for graph in (*([a.g] if a.HasField("g") else []), *a.graphs)]

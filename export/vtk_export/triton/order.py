"""The order for a model (name, sources, options), and the content that a back-end makes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.runtime.opening import open_source
from vtk.runtime.source import Opening, Source
from vtk_export.onnx.export import ExportResult
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.pbtxt import Slot
from vtk_export.triton.served_by import Server

Measure = Callable[[Path, Path, str, Source], tuple[int, dict[str, Any]]]
"""Measures a written graph of a precision, whose place will be another, and leaves the result beside it: exit code and
result."""


@dataclass
class Order:
    """A requested model.

    Attributes:
        name: of the model.
        named: name of each task to its source.
        config: options.
        show: print the gates' tables.
        in_graph: images are prepared by nodes of the graph.
        part_of: the ensemble that it is a step of.
        measure: takes a graph's latency; None without ``--profile``.
        opening: how to open a source.
        held: those that are in memory, by their names.
        folders: images of ``--data``, by the name of the source.
    """

    name: str
    named: Mapping[str, Path]
    config: TritonCommand
    show: bool = True
    in_graph: bool = False
    part_of: str = ""
    measure: Measure | None = None
    opening: Opening = field(default_factory=Opening)
    held: Mapping[str, Source] = field(default_factory=dict)
    folders: Mapping[str, Path | None] = field(default_factory=dict)

    def open(self, task: str) -> Source:
        """Open a task's source."""
        return self.held[task] if task in self.held else open_source(self.named[task], **self.opening)


@dataclass
class ModelContent:
    """The verified content of a model's version.

    Attributes:
        message: its config.
        cards: of its tasks.
        inputs: of the model.
        outputs: of the model.
        served: the server that can run it.
        found: what the gates measured, plain JSON values.
        code: exit code of what was measured; the model is kept.
    """

    message: Any
    cards: dict[str, Card]
    inputs: list[Slot]
    outputs: list[Slot]
    served: Server
    found: dict[str, object] = field(default_factory=dict)
    code: int = 0


def image_dims(cards: Mapping[str, Card]) -> tuple[int, int, int]:
    """Return (channels, height, width) of the first task's images."""
    spec = next(iter(cards.values())).input
    return spec.in_chans, spec.height, spec.width


def say_notes(source: Source) -> Source:
    """Print the notes of an opened source, and return it."""
    for note in source.notes:
        console.say(note)
    return source


def gate_results(result: ExportResult) -> dict[str, object]:
    """Return what the gate of a graph measured."""
    names = ("facts", "outputs", "judged", "preprocessing_drift", "batch_dependence", "fused", "nodes")
    return {name: value for name, value in result.to_dict().items() if name in names}


def take_latency(order: Order, graph: Path, source: Source, found: dict[str, object]) -> int:
    """Measure the graph's latency before it is published: a polling server would take a new file for a change."""
    if order.measure is None or not order.config.profile:
        return 0
    shown = order.config.out / order.name / graph.parent.name / graph.name
    precision = "fp32" if order.config.dtype == "auto" else order.config.dtype
    code, found["profile"] = order.measure(graph, shown, precision, source)
    return code

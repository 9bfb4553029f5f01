"""Makes each back-end's model: weights and code into a version's folder, verified, and its config."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.errors import UsageError
from vtk.formats import read_json, write_json
from vtk.runtime.source import Opening, Source, open_source
from vtk.runtime.weight_digests import content_digest, file_digest
from vtk_export.onnx.export import ExportResult, export_onnx
from vtk_export.readme import README
from vtk_export.tasks.config import TasksConfig
from vtk_export.tasks.export import export_tasks
from vtk_export.tensorrt.config import TensorrtConfig
from vtk_export.tensorrt.export import export_tensorrt
from vtk_export.triton.bank_packs import has_base, write_packs
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.engine import check_engine, copy_engine, read_engine
from vtk_export.triton.files import same_code, write_code
from vtk_export.triton.pbtxt import USUAL, Slot, build, graph_slots, task_slots
from vtk_export.triton.publish import Draft
from vtk_export.triton.served_by import Served, serve_bank, serve_engine, serve_graph, serve_python

Measure = Callable[[Path, Path, str, Source], tuple[int, dict[str, Any]]]
"""Measures a written graph of a precision, whose place will be another, and leaves the result beside it: exit code and
result."""


@dataclass
class Order:
    """A model that is asked for.

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
class Filled:
    """A version's folder with a verified model.

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
    served: Served
    found: dict[str, object] = field(default_factory=dict)
    code: int = 0


def fill(made: Draft, order: Order) -> Filled:
    """Put the model into the draft.

    Raises:
        UsageError: a source or combination that the back-end does not take.
        BaseError: packs of different bases.
        DataError: a damaged source.
        VerificationError: a file is not what was asked for.
    """
    if order.config.engine is not None:
        return _engine(made, order)
    makers = {"onnxruntime": _graph, "tensorrt": _graph, "python": _tasks, "vtk": _bank}
    filled = makers[order.config.server](made, order)
    (made.at / README).unlink(missing_ok=True)  # of the file alone; the model's own page is above its versions
    return filled


def _graph(made: Draft, order: Order) -> Filled:
    config = order.config
    (task,) = order.named
    source = _say_notes(order.open(task))
    options = config.onnx_config(made.at, order.folders.get(task), with_preproc=order.in_graph)
    if config.server == "tensorrt":
        export_tensorrt(source, _tensorrt_config(made.at, config, order.folders.get(task)), show=order.show)
        found: dict[str, object] = {}
    else:
        found = _facts(export_onnx(source, options, show=order.show))
    labels = "probabilities" if options.softmax else "logits"
    inputs, outputs, batched = graph_slots(
        made.at / "model.onnx", labels=labels, free=("images",) if order.in_graph else ()
    )
    threads = {} if config.server_threads is None else {"intra_op_thread_count": str(config.server_threads)}
    spec = source.card.input
    size = (spec.height, spec.width, 3) if order.in_graph else (spec.in_chans, *spec.size)
    warm = size if batched else (config.static_batch or 1, *size)
    served = serve_graph(made.at / "model.onnx", config.runtime, tensorrt=config.server == "tensorrt")
    digest = content_digest(made.at / "model.onnx") if config.server == "tensorrt" else ""
    message = build(order.name, config, inputs, outputs, batched=batched, parameters=threads, warm=warm,
                    part_of=order.part_of, digest=digest)  # fmt: skip
    code = _measured(order, made.at / "model.onnx", source, found)
    return Filled(message, {task: source.card}, inputs, outputs, served, found, code)


def _engine(made: Draft, order: Order) -> Filled:
    config = order.config
    assert config.engine is not None
    (task,) = order.named
    source = _say_notes(order.open(task))
    engine = read_engine(config.engine)
    served = serve_engine(str(engine.stamp.get("tensorrt", "")), config.runtime)
    check_engine(engine, source, config, order.folders.get(task), show=order.show)
    copy_engine(engine, made.at)
    console.say(f"the engine is for {engine.built}; a server with another version or GPU refuses it")
    inputs, outputs = list(engine.inputs), list(engine.outputs)
    usual = sorted({min(size, config.max_batch_size) for size in engine.batches[1:]})
    preferred = usual if engine.batched and config.max_batch_size > 1 else []
    built = {key: str(value) for key, value in engine.stamp.items() if not key.endswith("_sha256")}
    message = build(order.name, config, inputs, outputs, batched=engine.batched, parameters=built,
                    part_of=order.part_of, preferred=preferred)  # fmt: skip
    return Filled(message, {task: source.card}, inputs, outputs, served, {"engine": dict(engine.stamp)})


def _tasks(made: Draft, order: Order) -> Filled:
    config, first = order.config, next(iter(order.named))
    source = order.open(first)
    options = config.onnx_config(made.at, order.folders.get(first))
    found: dict[str, object] = {}
    if len(order.named) == 1:
        _say_notes(source)
        found = _facts(export_onnx(source, options, show=order.show))
        cards = {first: source.card}
        write_json(made.at / "tasks.json", _index_of_one(first, source.card))
    else:
        many = TasksConfig(
            out=made.at, opset=config.opset, data=tuple(f"{n}={f}" for n, f in order.folders.items() if f),
            split=config.split, fuse=config.fuse, seed=config.seed, threads=config.threads, target=config.target,
        )  # fmt: skip
        export_tasks(order.named, many, base=config.base, show=order.show)
        entries = read_json(made.at / "tasks.json")["tasks"]
        cards = {n: Card.from_dict(read_json(made.at / entries[n]["card"]), made.at) for n in entries}
    _note_digests(made.at)
    write_code(made.at, "python")
    inputs, outputs = _slots(cards, max(len(card.classes) for card in cards.values()), config)
    message = build(order.name, config, inputs, outputs, parameters=_parameters(config), warm=image_dims(cards),
                    part_of=order.part_of)  # fmt: skip
    graph = made.at / ("model.onnx" if len(order.named) == 1 else f"{first}.onnx")
    served = serve_python(sorted(made.at.glob("*.onnx")), config.runtime)
    return Filled(message, cards, inputs, outputs, served, found, _measured(order, graph, source, found))


def _bank(made: Draft, order: Order) -> Filled:
    config = order.config
    made.at.mkdir()
    packed = write_packs(order.named, made.at, config, order.folders, show=order.show)
    write_code(made.at, "vtk")
    inputs, outputs = _slots(packed.cards, None, config)
    parameters = _parameters(config) | {"dtype": config.dtype}
    message = build(order.name, config, inputs, outputs, parameters=parameters, warm=image_dims(packed.cards),
                    part_of=order.part_of)  # fmt: skip
    if made.old is not None and made.old.versions:
        last = made.old.path / str(made.old.versions[-1])
        # what runs follows an index of this format, whichever its code
        if made.old.config == message and has_base(last, packed.base):
            if not same_code(last, "vtk"):
                console.say(f"{order.name}: a server that runs version {made.old.versions[-1]} takes up the packs now, "
                            "and this toolkit's code when it starts again")  # fmt: skip
            made.reuse()
    return Filled(message, packed.cards, inputs, outputs, serve_bank(config.runtime))


def image_dims(cards: Mapping[str, Card]) -> tuple[int, int, int]:
    """Return (channels, height, width) of the first task's images."""
    spec = next(iter(cards.values())).input
    return spec.in_chans, spec.height, spec.width


def _say_notes(source: Source) -> Source:
    for note in source.notes:
        console.say(note)
    return source


def _facts(result: ExportResult) -> dict[str, object]:
    """Return what the gate of a graph measured."""
    names = ("facts", "outputs", "judged", "preprocessing_drift", "batch_dependence", "fused", "nodes")
    return {name: value for name, value in result.to_dict().items() if name in names}


def _measured(order: Order, graph: Path, source: Source, found: dict[str, object]) -> int:
    """Take the graph's latency while nobody reads its folder: a polling server takes a new file for a change."""
    if order.measure is None or not order.config.profile:
        return 0
    shown = order.config.out / order.name / graph.parent.name / graph.name
    precision = "fp32" if order.config.dtype == "auto" else order.config.dtype
    code, found["profile"] = order.measure(graph, shown, precision, source)
    return code


def _tensorrt_config(out: Path, config: TritonCommand, data: Path | None) -> TensorrtConfig:
    options = TensorrtConfig(
        out=out, opset=config.opset, static_batch=config.static_batch, data=data, split=config.split, fuse=config.fuse,
        dtype="fp16" if config.dtype == "fp16" else "fp32", keep_io_types=config.keep_io_types, images=config.images,
        seed=config.seed, threads=config.threads, target=config.target,
    )  # fmt: skip
    if config.static_batch is not None:
        return options
    return dataclasses.replace(options, opt=min(USUAL, config.max_batch_size), max=config.max_batch_size)


def _note_digests(version: Path) -> None:
    """Let the index say what its files are: the server's model holds them against it when it is loaded."""
    index = read_json(version / "tasks.json")
    files = sorted(path for path in version.iterdir() if path.suffix in (".onnx", ".data"))
    write_json(version / "tasks.json", {**index, "sha256": {path.name: file_digest(path) for path in files}})


def _index_of_one(task: str, card: Card) -> dict[str, Any]:
    spec = card.input
    entry = {"number": 0, "file": "model.onnx", "card": "model.json", "classes": list(card.classes),
             "in_chans": spec.in_chans, "height": spec.height, "width": spec.width}  # fmt: skip
    return {"format": 1, "tasks": {task: entry}, "session_options": {}}


def _slots(cards: Mapping[str, Card], width: int | None, config: TritonCommand) -> tuple[list[Slot], list[Slot]]:
    several = [name for name, card in cards.items() if card.multi_label]
    if several:
        raise UsageError(
            f"`{several[0]}` gives several labels an image, `--backend {config.server}` answers with one; use "
            "--backend onnxruntime and take the sigmoid of its logits"
        )
    sizes = [(c.input.in_chans, *c.input.size) for c in cards.values()]
    return task_slots(sizes, width, softmax=config.softmax)


def _parameters(config: TritonCommand) -> dict[str, str]:
    threads = {} if config.server_threads is None else {"threads": str(config.server_threads)}
    return threads | ({"softmax": "1"} if config.softmax else {})

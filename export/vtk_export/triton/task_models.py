"""Makes models of several tasks: ONNX Runtime sessions in the Python back-end, or a bank of this toolkit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.errors import UsageError
from vtk.formats import read_json, write_json
from vtk.runtime.weight_digests import file_digest
from vtk_export.onnx.config import derive
from vtk_export.onnx.export import export_onnx
from vtk_export.tasks.config import TasksConfig
from vtk_export.tasks.export import export_tasks
from vtk_export.tasks.index import temperature_entry
from vtk_export.tensor_names import check_names
from vtk_export.triton.bank_packs import has_base, write_packs
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.files import same_code, write_code
from vtk_export.triton.order import ModelContent, Order, gate_results, image_dims, say_notes, take_latency
from vtk_export.triton.pbtxt import Slot, build, renamed, task_slots
from vtk_export.triton.publish import Draft
from vtk_export.triton.served_by import serve_bank, serve_python


def fill_tasks(draft: Draft, order: Order) -> ModelContent:
    """Export one or several sources to ONNX files for the server's Python back-end."""
    config, first = order.config, next(iter(order.named))
    source = order.open(first)
    options = derive(config, **config.onnx_options(draft.at, order.folders.get(first)))
    found: dict[str, object] = {}
    if len(order.named) == 1:
        say_notes(source)
        found = gate_results(export_onnx(source, options, show=order.show))
        cards = {first: source.card}
        write_json(draft.at / "tasks.json", _index_of_one(first, source.card))
    else:
        many = TasksConfig(
            out=draft.at, opset=config.opset, data=tuple(f"{n}={f}" for n, f in order.folders.items() if f),
            split=config.split, fuse=config.fuse, seed=config.seed, threads=config.threads, target=config.target,
        )  # fmt: skip
        export_tasks(order.named, many, base=config.base, show=order.show)
        entries = read_json(draft.at / "tasks.json")["tasks"]
        cards = {n: Card.from_dict(read_json(draft.at / entries[n]["card"]), draft.at) for n in entries}
    _note_digests(draft.at)
    write_code(draft.at, "python")
    inputs, outputs = slots_of(cards, max(len(card.classes) for card in cards.values()), config)
    message = build(order.name, config, inputs, outputs, parameters=parameters_of(config), warm=image_dims(cards),
                    part_of=order.part_of, names=config.names)  # fmt: skip
    graph = draft.at / ("model.onnx" if len(order.named) == 1 else f"{first}.onnx")
    served = serve_python(sorted(draft.at.glob("*.onnx")), config.runtime)
    return ModelContent(message, cards, inputs, outputs, served, found, take_latency(order, graph, source, found))


def fill_bank(draft: Draft, order: Order) -> ModelContent:
    """Write packs for a bank; a bank that serves packs of the same base is updated in place."""
    config = order.config
    draft.at.mkdir()
    last = draft.last
    earlier = last if last is not None and same_code(last, "vtk") else None
    packed = write_packs(order.named, draft.at, config, order.folders, earlier=earlier, show=order.show)
    write_code(draft.at, "vtk")
    inputs, outputs = slots_of(packed.cards, None, config)
    parameters = parameters_of(config) | {"dtype": config.dtype}
    message = build(order.name, config, inputs, outputs, parameters=parameters, warm=image_dims(packed.cards),
                    part_of=order.part_of, names=config.names)  # fmt: skip
    # what runs follows an index of this format, whichever its code
    if last is not None and draft.old is not None and draft.old.config == message and has_base(last, packed.base):
        if earlier is None:
            console.say(f"{order.name}: a server that runs version {last.name} loads the packs now, and this release's "
                        "code at its next start")  # fmt: skip
        draft.reuse()
    return ModelContent(message, packed.cards, inputs, outputs, serve_bank(config.runtime))


def _note_digests(version: Path) -> None:
    """Add the digests of the files to the index: the server's model checks them when it is loaded."""
    index = read_json(version / "tasks.json")
    files = sorted(path for path in version.iterdir() if path.suffix in (".onnx", ".data"))
    write_json(version / "tasks.json", {**index, "sha256": {path.name: file_digest(path) for path in files}})


def _index_of_one(task: str, card: Card) -> dict[str, Any]:
    spec = card.input
    entry = {"number": 0, "file": "model.onnx", "card": "model.json", "classes": list(card.classes),
             "in_chans": spec.in_chans, "height": spec.height, "width": spec.width,
             **temperature_entry(card)}  # fmt: skip
    return {"format": 1, "tasks": {task: entry}, "session_options": {}}


def slots_of(cards: Mapping[str, Card], width: int | None, config: TritonCommand) -> tuple[list[Slot], list[Slot]]:
    """Return inputs and outputs of a model of several tasks; ``width`` is None where tasks may come later.

    Raises:
        UsageError: a task of which an image may have several labels.
    """
    several = [name for name, card in cards.items() if card.multi_label]
    if several:
        raise UsageError(
            f"`{several[0]}` is multi-label, and `--backend {config.server}` returns one label; use "
            "--backend onnxruntime and take the sigmoid of its logits"
        )
    sizes = [(c.input.in_chans, *c.input.size) for c in cards.values()]
    inputs, outputs = task_slots(sizes, width, softmax=config.softmax)
    names = check_names(config.names, [slot.name for slot in inputs], [slot.name for slot in outputs])
    return renamed(inputs, names), renamed(outputs, names)


def parameters_of(config: TritonCommand) -> dict[str, str]:
    """Return the parameters of a model in Python."""
    threads = {} if config.server_threads is None else {"threads": str(config.server_threads)}
    return threads | ({"softmax": "1"} if config.softmax else {})

"""Makes models of several tasks in one ONNX graph that takes their low-rank factors.

The Python back-end binds the factors and exchanges them while it serves. The back-end of ONNX Runtime can bind nothing:
there the factors of all tasks are constants of the graph, and another set of tasks is another version.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtk import console
from vtk.errors import DataError, UsageError
from vtk.formats import read_json, write_json
from vtk.packs.cards import read_card
from vtk.runtime.opening import open_source
from vtk_export.tasks.config import TasksConfig
from vtk_export.tasks.export import export_tasks
from vtk_export.tasks.index import LAYOUT, temperature_entry
from vtk_export.tensor_names import check_names
from vtk_export.triton.bank_packs import INDEX, PACKS, PARTS
from vtk_export.triton.constant_factors import write_constant
from vtk_export.triton.factor_update import update_factors
from vtk_export.triton.files import same_code, write_code
from vtk_export.triton.order import ModelContent, Order, image_dims
from vtk_export.triton.pbtxt import build, graph_slots
from vtk_export.triton.publish import Draft, link_file
from vtk_export.triton.served_by import serve_graph, serve_python
from vtk_export.triton.task_models import parameters_of, slots_of


def takes_factors(order: Order) -> bool:
    """Return whether a model in the Python back-end is to be one graph that takes factors.

    With ``--form auto`` it is if every pack holds factors and takes images of one size; an update leaves it
    one: only such models of this back-end have packs from which they could be changed, and one dense pack must not
    give every other task a graph of its own.
    """
    if order.config.in_openvino:
        return False
    if order.config.form != "auto":
        return order.config.form == "factors"
    if not order.config.several or order.config.server != "python" or order.config.profile or order.config.fuse:
        return False  # these are for graphs of one task
    if order.config.changes:
        return True
    cards = [source.card for source in map(open_source, order.named.values()) if source.kind == "pack"]
    sizes = {(card.input.in_chans, *card.input.size) for card in cards}
    return len(cards) == len(order.named) and all(c.pack.get("factors") for c in cards) and len(sizes) == 1


def fill_factors(draft: Draft, order: Order) -> ModelContent:
    """Write the graph, the tasks' files and their packs; a model that serves tasks of the same graph takes the change.

    Raises:
        UsageError: a source that is no pack, or packs that one graph cannot hold.
        BaseError: packs of different bases.
        DataError: a damaged pack.
        VerificationError: the graph's logits are not those of a task's own model.
    """
    config = order.config
    packs = {name: _pack(path) for name, path in order.named.items()}
    cards = {name: read_card(path) for name, path in packs.items()}
    inputs, outputs = slots_of(cards, None, config)
    message = build(order.name, config, inputs, outputs, parameters={**parameters_of(config), "form": "factors"},
                    warm=image_dims(cards), part_of=order.part_of, names=config.names)  # fmt: skip
    last = draft.last if draft.old is not None and draft.old.config == message else None
    same = last is not None and same_code(last, "factors")

    def export(named: Mapping[str, Path], out: Path) -> None:
        export_tasks(named, _tasks_config(out, order, named), base=config.base, earlier=last, show=order.show)

    if not (last is not None and same and update_factors(last, draft.at, packs, export, show=order.show)):
        export(packs, draft.at)
    layout = read_json(draft.at / LAYOUT)
    _write_packs(draft, packs, layout)
    write_code(draft.at, "factors")
    if last is not None:
        if layout["layout"] == _layout(last):
            if not same:
                console.say(f"{order.name}: a server that runs version {last.name} loads the tasks now, and this "
                            "release's code at its next start")  # fmt: skip
            draft.reuse()
        else:
            console.say(f"{order.name}: its tasks change other tensors than those before, so this is another graph and "
                        "version")  # fmt: skip
    return ModelContent(message, cards, inputs, outputs, serve_python([draft.at / layout["model"]], config.runtime))


def fill_constant(draft: Draft, order: Order) -> ModelContent:
    """Write one graph with the factors of all tasks inside, for ONNX Runtime's own back-end: clients send numbers.

    Raises: what `fill_factors` raises.
    """
    config = order.config
    packs = {name: _pack(path) for name, path in order.named.items()}
    cards = {name: read_card(path) for name, path in packs.items()}
    folder = draft.folder / "factors"
    export_tasks(packs, _tasks_config(folder, order, packs), base=config.base, show=order.show)
    layout = read_json(folder / LAYOUT)
    draft.at.mkdir()
    names = check_names(config.names, ("pixel_values", "task"), ("logits", "num_classes"))
    write_constant(folder, layout, cards, draft.at / "model.onnx", names)
    shutil.rmtree(folder)
    _write_packs(draft, packs, layout)
    inputs, outputs, batched = graph_slots(draft.at / "model.onnx", labels=None)
    threads = {} if config.server_threads is None else {"intra_op_thread_count": str(config.server_threads)}
    message = build(order.name, config, inputs, outputs, batched=batched, parameters={**threads, "form": "factors"},
                    part_of=order.part_of, names=names)  # fmt: skip
    return ModelContent(message, cards, inputs, outputs, serve_graph(draft.at / "model.onnx", config.runtime))


def _write_packs(draft: Draft, packs: Mapping[str, Path], layout: Mapping[str, Any]) -> None:
    """Keep the packs beside the graph, for the next change of the model, and write the index."""
    entries: dict[str, Any] = {}
    for name, pack in packs.items():
        (draft.at / PACKS / name).mkdir(parents=True)
        kept = draft.last is not None and draft.last in pack.parents
        for part in PARTS:
            (link_file if kept else shutil.copyfile)(pack / part, draft.at / PACKS / name / part)
        task = layout["tasks"][name]
        entries[name] = {"pack": f"{PACKS}/{name}", "file": task["file"], "digest": task["sha256"][:16],
                         **temperature_entry(read_card(pack))}  # fmt: skip
    write_json(draft.at / INDEX, {"format": 1, "layout": layout["layout"], "tasks": entries})


def _tasks_config(out: Path, order: Order, named: Mapping[str, Path]) -> TasksConfig:
    """Return the options of the graph's export."""
    config = order.config
    return TasksConfig(
        out=out, form="factors", factor_dtype=config.factor_dtype, opset=config.opset, split=config.split,
        fuse=config.fuse, profile=config.profile,
        data=tuple(f"{n}={f}" for n, f in order.folders.items() if f and n in named), seed=config.seed,
        threads=config.threads, target=config.target, static_batch=config.static_batch,
    )  # fmt: skip


def _pack(path: Path) -> Path:
    source = open_source(path)
    if source.kind != "pack" or source.path is None:
        raise UsageError(f"{path} is not a task pack but a {source.kind}, which shares no base; give packs, or "
                         "--backend onnxruntime --form files")  # fmt: skip
    return source.path


def _layout(version: Path) -> str:
    """Return which files of tasks fit the graph of a version; "" if that cannot be read."""
    try:
        return str(read_json(version / LAYOUT)["layout"])
    except (DataError, KeyError, TypeError):
        return ""

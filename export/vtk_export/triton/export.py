"""``vtk export triton``: models of a repository, each verified before it is published."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.files import read_json, write_json
from vtk.runtime.source import Source, open_source
from vtk_export.config import OnnxConfig, TasksConfig
from vtk_export.many.names import named_packs
from vtk_export.onnx import export_onnx
from vtk_export.tasks import export_tasks
from vtk_export.tensorrt.export import export_tensorrt
from vtk_export.tensorrt_config import TensorrtConfig
from vtk_export.triton.files import same_code, write_code, write_model_files
from vtk_export.triton.lines import command_lines
from vtk_export.triton.names import check_name
from vtk_export.triton.packs import read_base_id, write_packs
from vtk_export.triton.pbtxt import USUAL, Slot, build, graph_slots, task_slots
from vtk_export.triton.publish import Draft, draft
from vtk_export.triton_config import TritonConfig


@dataclass(frozen=True)
class Published:
    """A model that is in the repository.

    Attributes:
        name: of the model.
        path: its folder.
        version: that was written.
        updated: the version was there, and the model that runs takes the changes up by itself.
        tasks: names.
        bytes: of the version's files.
        lines: command lines for the server, a load test and the client.
    """

    name: str
    path: Path
    version: int
    updated: bool
    tasks: tuple[str, ...]
    bytes: int
    lines: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "model": self.name, "path": str(self.path), "version": self.version, "updated": self.updated,
            "tasks": list(self.tasks), "size_bytes": self.bytes, "commands": list(self.lines),
        }  # fmt: skip


@dataclass(frozen=True)
class TritonExportResult:
    """A repository after an export.

    Attributes:
        path: the repository.
        backend: ``onnxruntime``, ``tensorrt``, ``python`` or ``vtk``.
        models: one, or one for each source.
        seconds: of export and verification.
    """

    path: Path
    backend: str
    models: tuple[Published, ...]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        models = [model.to_dict() for model in self.models]
        return {"path": str(self.path), "backend": self.backend, "models": models, "export_ms": 1000 * self.seconds}


def export_triton(config: TritonConfig, *, show: bool = True) -> TritonExportResult:
    """Export, verify and publish; a model that fails leaves the repository as it was.

    Args:
        config: options.
        show: print the gates' tables.

    Raises:
        UsageError: a source, name or combination that the back-end does not take.
        BaseError: packs of different bases for one model.
        DataError: a damaged source, or a repository that cannot be written or holds another model of this name.
        VerificationError: a file is not what was asked for.
    """
    start = time.perf_counter()
    named = named_packs(config.sources)
    server = config.server
    if server in ("onnxruntime", "tensorrt"):
        if len(named) > 1:
            console.say(
                f"{len(named)} models, each with a whole copy of its weights; --backend python or vtk share them"
            )
        models = [_one_onnx(config.name or name, name, path, config, show) for name, path in named.items()]
    else:
        name = config.name or (next(iter(named)) if len(named) == 1 else "tasks")
        make = _bank if server == "vtk" else _tasks
        models = [make(name, named, config, show)]
    return TritonExportResult(config.out, server, tuple(models), time.perf_counter() - start)


def _one_onnx(model: str, task: str, path: Path, config: TritonConfig, show: bool) -> Published:
    with draft(config.out, check_name(model)) as made:
        source = _open(path, config)
        if config.server == "tensorrt":
            export_tensorrt(source, _tensorrt_config(str(path), made.at, config), show=show)
        else:
            export_onnx(source, _onnx_config(str(path), made.at, config), show=show)
        inputs, outputs, batched = graph_slots(made.at / "model.onnx", labels="logits")
        threads = {} if config.server_threads is None else {"intra_op_thread_count": str(config.server_threads)}
        message = build(model, config, inputs, outputs, batched=batched, parameters=threads)
        return _finish(made, message, {task: source.card}, config, outputs)


def _tasks(model: str, named: Mapping[str, Path], config: TritonConfig, show: bool) -> Published:
    with draft(config.out, check_name(model)) as made:
        if len(named) == 1:
            task, path = next(iter(named.items()))
            source = _open(path, config)
            export_onnx(source, _onnx_config(str(path), made.at, config), show=show)
            cards = {task: source.card}
            write_json(made.at / "tasks.json", _index_of_one(task, source.card))
        else:
            options = TasksConfig(
                made.at, opset=config.opset, data=config.data, base=config.base, fuse=config.fuse, seed=config.seed,
                threads=config.threads,
            )  # fmt: skip
            export_tasks(named, options, show=show)
            entries = read_json(made.at / "tasks.json")["tasks"]
            cards = {n: Card.from_dict(read_json(made.at / entries[n]["card"]), made.at) for n in entries}
        write_code(made.at, "python")
        inputs, outputs = _slots(cards, max(len(card.classes) for card in cards.values()))
        message = build(model, config, inputs, outputs, parameters=_parameters(config), warm=_dims(cards))
        return _finish(made, message, cards, config, outputs)


def _bank(model: str, named: Mapping[str, Path], config: TritonConfig, show: bool) -> Published:
    with draft(config.out, check_name(model)) as made:
        made.at.mkdir()
        packed = write_packs(named, made.at, config, show=show)
        write_code(made.at, "vtk")
        inputs, outputs = _slots(packed.cards, None)
        parameters = _parameters(config) | {"dtype": config.dtype}
        message = build(model, config, inputs, outputs, parameters=parameters, warm=_dims(packed.cards))
        if made.old is not None and made.old.versions:
            last = made.old.path / str(made.old.versions[-1])
            if made.old.config == message and read_base_id(last) == packed.base and same_code(last, "vtk"):
                made.reuse()
        return _finish(made, message, packed.cards, config, outputs)


def _finish(
    made: Draft, message: Any, cards: Mapping[str, Card], config: TritonConfig, outputs: list[Slot]
) -> Published:
    write_model_files(made.folder, message, cards, [slot.name for slot in outputs])
    fixed = () if message.max_batch_size else (message.input[0].dims[0],)
    lines = command_lines(config.out, message, config.server, list(cards), [*fixed, *_dims(cards)])
    size = sum(file.stat().st_size for file in made.at.rglob("*") if file.is_file())
    path = config.out / message.name
    return Published(message.name, path, made.version, made.reused, tuple(cards), size, tuple(lines))


def _open(path: Path, config: TritonConfig) -> Source:
    source = open_source(
        path, base=config.base, pretrained=config.pretrained, num_classes=config.num_classes,
        img_size=config.img_size, seed=config.seed,
    )  # fmt: skip
    for note in source.notes:
        console.say(note)
    return source


def _onnx_config(source: str, out: Path, config: TritonConfig) -> OnnxConfig:
    return OnnxConfig(
        source, out, opset=config.opset, static_batch=config.static_batch, data=config.data, fuse=config.fuse,
        dtype="fp32" if config.dtype == "auto" else config.dtype, keep_io_types=config.keep_io_types,
        seed=config.seed, threads=config.threads,
    )  # fmt: skip


def _tensorrt_config(source: str, out: Path, config: TritonConfig) -> TensorrtConfig:
    options = TensorrtConfig(
        source, out, opset=config.opset, static_batch=config.static_batch, data=config.data, fuse=config.fuse,
        dtype="fp16" if config.dtype == "fp16" else "fp32", keep_io_types=config.keep_io_types, seed=config.seed,
        threads=config.threads,
    )  # fmt: skip
    if config.static_batch is not None:
        return options
    return dataclasses.replace(options, opt=min(USUAL, config.max_batch_size), max=config.max_batch_size)


def _index_of_one(task: str, card: Card) -> dict[str, Any]:
    spec = card.input
    entry = {"number": 0, "file": "model.onnx", "card": "model.json", "classes": list(card.classes),
             "in_chans": spec.in_chans, "height": spec.height, "width": spec.width}  # fmt: skip
    return {"format": 1, "tasks": {task: entry}, "session_options": {}}


def _slots(cards: Mapping[str, Card], width: int | None) -> tuple[list[Slot], list[Slot]]:
    return task_slots([(c.input.in_chans, *c.input.size) for c in cards.values()], width)


def _dims(cards: Mapping[str, Card]) -> tuple[int, int, int]:
    spec = next(iter(cards.values())).input
    return spec.in_chans, spec.height, spec.width


def _parameters(config: TritonConfig) -> dict[str, str]:
    return {} if config.server_threads is None else {"threads": str(config.server_threads)}

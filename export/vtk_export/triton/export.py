"""Exports models to a repository of Triton Inference Server; each is verified before it is published."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from vtk import console
from vtk.errors import UsageError
from vtk.options import expect
from vtk.packages import require
from vtk.runtime.data_option import folders_of
from vtk.runtime.opening import open_source
from vtk.runtime.source import Opening, Source
from vtk_export.tasks.names import named_packs
from vtk_export.triton.command_lines import command_lines
from vtk_export.triton.config import TritonCommand, TritonConfig
from vtk_export.triton.config_checks import check_name
from vtk_export.triton.ensemble import publish_ensemble, wants_ensemble
from vtk_export.triton.files import write_model_files
from vtk_export.triton.models import fill
from vtk_export.triton.order import Measure, ModelContent, Order, image_dims
from vtk_export.triton.publish import Draft, draft
from vtk_export.triton.update import updated_order

if TYPE_CHECKING:
    from vtk.runtime.source import Openable


@dataclass(frozen=True)
class ModelResult:
    """A published model.

    Attributes:
        name: of the model.
        path: its folder.
        version: that was written.
        updated: the version was there, and the model that runs takes the changes up by itself.
        tasks: names.
        bytes: of the version's files and of those beside it; of an ensemble also those of its steps.
        lines: command lines for the server, a load test and the client.
        steps: of an ensemble, their names and versions.
        found: what the gates measured.
        code: exit code of what was measured beyond the gates.
    """

    name: str
    path: Path
    version: int
    updated: bool
    tasks: tuple[str, ...]
    bytes: int
    lines: tuple[str, ...]
    steps: dict[str, int] = field(default_factory=dict)
    found: dict[str, object] = field(default_factory=dict)
    code: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "model": self.name, "path": str(self.path), "version": self.version, "updated": self.updated,
            "tasks": list(self.tasks), "size_bytes": self.bytes, "commands": list(self.lines), "steps": self.steps,
            **self.found,
        }  # fmt: skip


@dataclass(frozen=True)
class TritonExportResult:
    """A repository after an export.

    Attributes:
        path: the repository.
        backend: ``onnxruntime``, ``tensorrt``, ``openvino``, ``python`` or ``vtk``.
        models: one, or one for each source.
        seconds: of export and verification.
    """

    path: Path
    backend: str
    models: tuple[ModelResult, ...]
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        models = [model.to_dict() for model in self.models]
        return {"path": str(self.path), "backend": self.backend, "models": models, "export_ms": 1000 * self.seconds}


def export_triton(
    sources: "Openable | Sequence[Openable] | Mapping[str, Openable]",
    config: TritonConfig,
    *,
    show: bool = True,
    measure: Measure | None = None,
    **opening: Unpack[Opening],
) -> TritonExportResult:
    """Export, verify and publish; a model that fails leaves the repository as it was.

    Args:
        sources: packs, run folders, checkpoints or timm names, each ``SOURCE`` or ``NAME=SOURCE``, a `Task` or a module
            in memory (for onnxruntime, tensorrt and openvino); or name to source; or one source alone.
        config: what to make of them.
        opening: how to open them, see `vtk.open_source`.
        show: print the gates' tables.
        measure: takes the latency of a written graph, for ``--profile``.

    Raises:
        UsageError: a source, name or combination that the back-end does not take.
        BaseError: packs of different bases for one model.
        DataError: a damaged source, or a repository that cannot be written or holds another model of this name.
        VerificationError: a file is not what was asked for.
        UnavailableError: what describes a model to the server is not installed.
    """
    expect(config, TritonConfig, "export_triton")
    require("tritonclient")
    start = time.perf_counter()
    texts, held = _texts(sources, opening)
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(TritonConfig)}
    source_options = {name: value for name, value in opening.items() if name in TritonCommand.__dataclass_fields__}
    config = TritonCommand(sources=tuple(texts), **{**values, **({} if len(held) == len(texts) else source_options)})
    named = named_packs(config.sources)
    if held and not config.models:
        raise UsageError(f"`--backend` {config.server} takes packs from their files; give paths, or another back-end")
    opening.setdefault("seed", config.seed)
    folders = folders_of(config.data, list(named))
    if config.models:
        if len(named) > 1:
            console.say(
                f"{len(named)} models, each with its own copy of all weights; --backend python or vtk share them"
            )
        orders = [Order(config.name or name, {name: path}, config, show, measure=measure, opening=opening, held=held,
                        folders=folders)
                  for name, path in named.items()]  # fmt: skip
    else:
        name = config.name or ("tasks" if config.several else next(iter(named)))
        orders = [Order(name, named, config, show, measure=measure, opening=opening, folders=folders)]
    with console.stages(show):
        models = tuple(_publish(order) for order in orders)
    return TritonExportResult(config.out, config.server, models, time.perf_counter() - start)


def _texts(
    sources: "Openable | Sequence[Openable] | Mapping[str, Openable]", opening: Opening
) -> tuple[list[str], dict[str, Source]]:
    """Return every source as text, and sources in memory, opened, by their text."""
    texts: list[str] = []
    held: dict[str, Source] = {}
    if isinstance(sources, Mapping):
        pairs: list[tuple[str, Openable]] = list(sources.items())
    elif isinstance(sources, Sequence) and not isinstance(sources, str):
        pairs = [("", one) for one in sources]
    else:
        pairs = [("", sources)]
    for name, source in pairs:
        if isinstance(source, (str, Path)):
            texts.append(f"{name}={source}" if name else str(source))
            continue
        opened = open_source(source, **opening)
        name = name or opened.name
        held[name] = opened
        texts.append(f"{name}={name}")
    return texts, held


def _publish(order: Order) -> ModelResult:
    config = order.config
    check_name(order.name)
    console.stage(f"exporting the model {order.name} for {config.server}")
    if wants_ensemble(order):
        whole, content, steps = publish_ensemble(order)
        size = sum(_size(config.out / part) for part in (order.name, *steps))
        return _published(order, whole, content, size, {name: step.version for name, step in steps.items()})
    order.in_graph = config.with_preproc
    with draft(config.out, order.name) as model:
        order = updated_order(order, model)
        content = fill(model, order)
        write_model_files(model.folder, content.message, content.cards, [slot.name for slot in content.outputs])
        size = _size(model.folder)
    return _published(order, model, content, size, {})


def _published(order: Order, model: Draft, content: ModelContent, size: int, steps: dict[str, int]) -> ModelResult:
    config, message = order.config, content.message
    channels, height, width = image_dims(content.cards)
    sides = (height, width, channels) if order.in_graph else (channels, height, width)
    fixed = () if message.max_batch_size else (max(message.input[0].dims[0], 1),)
    lines = command_lines(config.out, message, content.served, list(content.cards), [*fixed, *sides],
                          ensemble=order.name if steps else "")  # fmt: skip
    path = config.out / order.name
    return ModelResult(order.name, path, model.version, model.reused, tuple(content.cards), size, tuple(lines), steps,
                     content.found, content.code)  # fmt: skip


def _size(folder: Path) -> int:
    """Return the bytes of a model's files without those of earlier versions."""
    versions = [path for path in folder.iterdir() if path.name.isdecimal()]
    earlier = sorted(versions, key=lambda path: int(path.name))[:-1]
    files = (file for file in folder.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files if not any(path in file.parents for path in earlier))

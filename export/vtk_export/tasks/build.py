"""Builds an export of several tasks: converts the models, writes the files with shared weights, verifies them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from vtk import console
from vtk.card import Card
from vtk.errors import DataError, VerificationError
from vtk.formats import to_json, write_json
from vtk.runtime import weight_digests as digests
from vtk.runtime.data_option import folders_of
from vtk.runtime.export_facts import Facts
from vtk_export.gate.limits import LIMITS
from vtk_export.gate.neighbours import Dependence, rounding
from vtk_export.graph.convert import choose_form, convert, explicit_attention
from vtk_export.graph.nonfinite import mark_rows, may_hide
from vtk_export.graph.opset17 import lower
from vtk_export.graph.rename import rename_ends
from vtk_export.lint.linter import check
from vtk_export.output_folder import INLINE_LIMIT
from vtk_export.tasks.config import TasksConfig
from vtk_export.tasks.gate import (
    BATCHES,
    TaskRow,
    measure_neighbours,
    print_task_rows,
    verify_file,
    verify_gathered,
)
from vtk_export.tasks.gathered_vit import GatheredViT
from vtk_export.tasks.index import SESSION_OPTIONS, temperature_entry
from vtk_export.tasks.members import Loader, Member, twin
from vtk_export.tasks.readme import tasks_page
from vtk_export.tasks.weight_pool import LEAST, Pool, digest

GATHERED = "gathered"
"""Stem of the file of all tasks, and the ``--form`` that writes it alone."""

LEAST_SHARE = 0.99
"""Least part of the bytes of equal matrices that the shared file must hold: the rest is rounding of what is counted."""


@dataclass(frozen=True)
class TaskFile:
    """The file of one task.

    Attributes:
        name: of the task.
        path: of the .onnx file, or of the file of factors.
        bytes: of it and of the task's own data, without what is shared.
        shared_bytes: of the weights that it has in the shared file, or in the graph of all tasks.
    """

    name: str
    path: Path
    bytes: int
    shared_bytes: int


class Build:
    """The state of one export: graphs in a pool, then files in a folder.

    Attributes:
        sizes: by the stem of each .onnx file: bytes of its own, and of its weights in the shared file.
        shared: name of the shared file.
        dependence: by file, how far an image's logits depend on the others of its call.
        padded: bytes of padding in stacks of factors.
    """

    padded = 0

    def __init__(self, config: TasksConfig, members: Sequence[Member], base: Path | None = None) -> None:
        self.config, self.members = config, members
        count = sum(BATCHES) if config.static_batch is None else config.static_batch
        folders = folders_of(config.data, [member.name for member in members])
        self.loader = Loader(base, folders, config.split, config.seed, count)
        self.pool = Pool()
        self.equal: dict[str, tuple[int, set[str]]] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.shared: str | None = None
        self.dependence: dict[str, Dependence] = {}

    @property
    def alone(self) -> bool:
        """Whether each task has a file of its own."""
        return self.config.form in ("files", "both")

    def convert(self) -> None:
        """Load all members and convert them, one at a time; the graphs' weights go into the pool."""
        models = []
        for member in self.members:
            console.stage(f"converting {member.name}")
            model: Any = self.loader.load(member).model
            self._count(member.name, model)
            trt = self.config.for_tensorrt
            if trt:
                explicit_attention(model)
            if self.config.form in (GATHERED, "both"):
                models.append(twin(model))
            if self.alone:
                graph = choose_form(model, self.config.fuse, vits=trt, divide_scores=not trt)
                spec, opset, static = member.card.input, self.config.opset, self.config.static_batch
                self._add(member.name, convert(graph, spec, opset=opset, static_batch=static))
                del graph
        self.loader.run_banks(self.members)
        if models:
            console.stage("converting all tasks to one graph")
            task = torch.zeros(self.config.static_batch or 2, dtype=torch.int32)
            proto = convert(
                GatheredViT(models), self.members[0].card.input, opset=self.config.opset,
                static_batch=self.config.static_batch, names=("logits", "num_classes"), more={"task": task},
            )  # fmt: skip
            self._add(GATHERED, proto)

    def _add(self, name: str, proto: onnx.ModelProto) -> None:
        if may_hide(proto):
            mark_rows(proto)
        self.pool.add(name, proto)

    def _count(self, name: str, model: Any) -> None:
        """Record the matrices of a model, to check later what the files share."""
        for key, value in model.state_dict().items():
            data = value.detach().contiguous().numpy()
            if key.endswith("weight") and value.ndim > 1 and data.nbytes >= LEAST:
                self.equal.setdefault(digest(data.data), (data.nbytes, set()))[1].add(name)

    def write(self, folder: Path) -> None:
        """Write data files, graphs and cards.

        Raises:
            VerificationError: the graphs have less in common than the packs.
            DataError: the disk is full.
        """
        try:
            self._write(folder)
        except OSError as error:
            raise DataError(f"cannot write {folder}: {error.strerror or error}; free some space") from error

    def _write(self, folder: Path) -> None:
        places: Mapping[str, tuple[str, int]] = {}
        keys = self.pool.shared
        if self.alone:
            self._check_share(keys)
        if keys:
            path, places = self.pool.write(keys, folder, "shared")
            self.shared = path.name
        for name in self.pool.names:
            own, mine = self.pool.own_bytes(name), places
            if own > INLINE_LIMIT:  # protobuf cannot hold 2 GiB in one message
                mine = {**places, **self.pool.write(self.pool.own(name), folder, name)[1]}
            shared = self.pool.bytes_of(name) - own
            proto = self.pool.release(name, mine)
            rename_ends(proto, self.config.names)
            proto.ir_version = self.config.ir
            if self.config.file_opset < self.config.opset:
                lower(proto, ir_version=self.config.ir)
            if self.config.runtime is not None and self.config.for_tensorrt:
                check(proto, self.config.runtime)
            proto.ClearField("metadata_props")
            onnx.helper.set_model_props(proto, self._props(name))
            digests.stamp(proto, folder)
            (folder / f"{name}.onnx").write_bytes(proto.SerializeToString(deterministic=True))
            files = [file for file in folder.iterdir() if file.name == f"{name}.onnx" or _is_data(file, name)]
            self.sizes[name] = (sum(file.stat().st_size for file in files), shared)
        if self.alone:
            for member in self.members:
                write_json(folder / f"{member.name}.json", json.loads(member.card.to_json()))

    def _check_share(self, keys: Sequence[str]) -> None:
        wanted = sum(size for size, names in self.equal.values() if len(names) > 1)
        found = self.pool.matrix_bytes(keys)
        if found < LEAST_SHARE * wanted:
            raise VerificationError(
                f"the packs have {console.size(wanted)} of matrices in common, their graphs only "
                f"{console.size(found)}: the exporter wrote equal weights differently; export them apart "
                "(`vtk export onnx`), and please report this"
            )

    def _names(self, name: str) -> dict[str, str]:
        """Return the names of inputs and outputs of a file that differ from the toolkit's own."""
        has = ("pixel_values", "logits") if name in self.cards() else ("pixel_values", "task", "logits", "num_classes")
        return {term: called for term, called in self.config.names.items() if term in has}

    def _props(self, name: str) -> dict[str, str]:
        facts = Facts(target=self.config.target or "", names=self._names(name))
        if name == GATHERED:  # no task can be called so
            tasks = [{"name": m.name, "card": m.card.to_dict()} for m in self.members]
            # a key of the file format, not a module
            named = {} if not facts.names else facts.props()
            return {**named, "vtk.tasks": to_json({"format": 1, "tasks": tasks})}
        return {"vtk": next(m.card for m in self.members if m.name == name).to_json(), **facts.props()}

    def verify(self, folder: Path) -> list[TaskRow]:
        """Run the files and return the gate's rows, passed or not."""
        rows: list[TaskRow] = []
        asked: dict[str, Any] = {"opset": self.config.file_opset, "ir_version": self.config.ir,
                 "static_batch": self.config.static_batch, "threads": self.config.threads}  # fmt: skip
        for member in self.members if self.alone else ():
            rows += verify_file(folder / f"{member.name}.onnx", member, names=self._names(member.name), **asked)
        if GATHERED in self.sizes:
            rows += verify_gathered(folder / f"{GATHERED}.onnx", self.members, names=self._names(GATHERED), **asked)
        return rows

    def print_rows(self, rows: Sequence[TaskRow]) -> None:
        """Print the gate's table."""
        print_task_rows(rows)

    def page(self) -> str:
        """Return the README.md of the folder."""
        return tasks_page(
            self.cards(), files=self.alone, gathered=GATHERED in self.sizes, options=SESSION_OPTIONS,
            batch=self.config.static_batch, called=self.config.names,
        )  # fmt: skip

    def cards(self) -> dict[str, Card]:
        """Return the cards of the tasks, in the order of their numbers."""
        return {member.name: member.card for member in self.members}

    def task_files(self, out: Path) -> tuple[TaskFile, ...]:
        """Return the files of the tasks in ``out``; none of a file of all tasks."""
        names = [member.name for member in self.members if member.name in self.sizes]
        return tuple(TaskFile(name, out / f"{name}.onnx", *self.sizes[name]) for name in names)

    def separate_bytes(self) -> int:
        """Return the bytes of the same files if each held all its weights itself."""
        return sum(map(sum, self.sizes.values()))

    def measure(self, folder: Path) -> str:
        """Measure the batch dependence of every file, and return the worst as text.

        Raises:
            VerificationError: an image's logits depend on the others of its call.
        """
        for name in self.sizes:
            members = self.members if name == GATHERED else [m for m in self.members if m.name == name]
            self.dependence[f"{name}.onnx"] = measure_neighbours(
                folder / f"{name}.onnx", members, gathered=name == GATHERED, static_batch=self.config.static_batch,
                threads=self.config.threads,
            )  # fmt: skip
        worst = max(self.dependence.values(), key=lambda found: found.relative)
        return worst.describe(rounding(LIMITS["fp32"]))

    def index(self, folder: Path) -> dict[str, Any]:
        """Return the content of ``tasks.json``."""
        files = self.alone
        tasks = {
            m.name: {
                "number": i,
                "file": f"{m.name}.onnx" if files else None,
                "card": f"{m.name}.json" if files else None,
                "classes": list(m.card.classes),
                "in_chans": m.card.input.in_chans,
                "height": m.card.input.height,
                "width": m.card.input.width,
                **temperature_entry(m.card),
            }
            for i, m in enumerate(self.members)
        }
        shared = None
        if self.shared:
            path = folder / self.shared
            shared = {"file": path.name, "sha256": digests.file_digest(path), "bytes": path.stat().st_size}
        gathered = {"file": f"{GATHERED}.onnx"} if GATHERED in self.sizes else None
        named = {"names": self.config.names} if self.config.names else {}
        return {**named, "tasks": tasks, "shared": shared, "gathered": gathered, "session_options": SESSION_OPTIONS}


def _is_data(file: Path, name: str) -> bool:
    return file.suffix == ".data" and file.name.rpartition("-")[0] == name

"""Builds an export of one graph and the factors of each task: loads the packs, writes the files, verifies them."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import vtk_export
from vtk import console
from vtk.errors import DataError
from vtk.formats import read_json, to_json, write_json
from vtk.packs.load import Task, build_from_card, start_base
from vtk.runtime import weight_digests as digests
from vtk_export.gate.limits import LIMITS
from vtk_export.gate.neighbours import rounding
from vtk_export.graph.convert import convert
from vtk_export.tasks.build import Build, TaskFile
from vtk_export.tasks.config import TasksConfig
from vtk_export.tasks.factor_gate import measure_neighbours, open_model, print_factor_rows, verify_factors
from vtk_export.tasks.factor_layout import DTYPES, Layout, examples, head_layers, names_of, origin_of, plan
from vtk_export.tasks.factor_rows import (
    Changes,
    Rows,
    changes_of,
    n_bytes,
    open_sizes,
    padded_bytes,
    ranks_of,
    stored_state,
    task_rows,
    write_rows,
)
from vtk_export.tasks.factor_vit import FactorViT
from vtk_export.tasks.gate import TaskRow
from vtk_export.tasks.gathered_vit import join_biases
from vtk_export.tasks.index import LAYOUT, METADATA, SERVED, SUFFIX
from vtk_export.tasks.members import Member
from vtk_export.tasks.readme import factors_page

FACTORS = "factors"
"""Stem of the file of all tasks, and the ``--form`` that writes it."""

FORMAT = 1
_CODE = Path(vtk_export.__file__).parent / "triton" / "served" / f"{SERVED}.py"
_FEW, _MANY = 2, 3
"""Images of each task but the first, where there are more than so many tasks."""


class FactorBuild(Build):
    """The state of one export in the form ``factors``.

    Attributes:
        layout: of the stacks.
        rows: of each task.
        padded: bytes by which the stacks exceed the tasks' rows.
    """

    layout: Layout

    def __init__(
        self, config: TasksConfig, members: Sequence[Member], base: Path | None = None, earlier: Path | None = None
    ) -> None:
        """Take the graph of the folder ``earlier`` where these tasks need the same, else convert one."""
        super().__init__(config, members, base)
        self._earlier = earlier
        self._graph: tuple[Path, ...] = ()
        self.rows: dict[str, Rows] = {}
        self.padded = 0
        self._stored: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._models: list[Any] = []
        self._whole = 0

    def convert(self) -> None:
        """Load all members, one at a time, and convert the base's model with the stacks as inputs."""
        start: Any = None
        origin: dict[str, Any] = {}
        values: dict[str, Tensor] = {}
        changes: dict[str, Changes] = {}
        for i, member in enumerate(self.members):
            console.stage(f"loading {member.name}")
            task = self.loader.load(member, _FEW if i and len(self.members) > _MANY else None)
            join_biases(task.model)
            self._whole += sum(value.nbytes for value in task.model.state_dict().values())
            if start is None:
                start = start_model(task)
                origin = origin_of(task.card, start)
                values = {name: value.detach().clone() for name, value in start.state_dict().items()}
            found = changes_of(task, values, head_layers(start), DTYPES[self.config.factor_dtype], _what(member))
            with torch.no_grad():
                state = stored_state(values, found)
                self._stored[member.name] = functional_call(task.model, state, (member.images,))
            changes[member.name] = found
        self.loader.run_banks(self.members)
        factored = {key for found in changes.values() for key in found.factors}
        trained = {key for found in changes.values() for key in found.tensors}
        for names, more in zip((factored, trained), self._earlier_names(origin), strict=True):
            names |= more
        self.layout = plan(start, factored, trained, self.config.factor_dtype, origin)
        for member in self.members:
            self.rows[member.name] = task_rows(self.layout, values, changes[member.name], _what(member))
        self.padded = padded_bytes(self.layout, list(self.rows.values()))
        self._graph = self._same_graph()
        if self._graph:
            return
        console.stage("converting all tasks to one graph")
        stacks = dict(zip((stack.name for stack in self.layout.stacks), examples(self.layout.stacks), strict=True))
        numbers = torch.zeros(self.config.static_batch or 2, dtype=torch.int32)
        proto = convert(
            FactorViT(start, self.layout), self.members[0].card.input, opset=self.config.opset,
            static_batch=self.config.static_batch, names=("logits", "num_classes"), more={"task": numbers},
            stacks=stacks,
        )  # fmt: skip
        self._add(FACTORS, proto)

    def _earlier_names(self, origin: Mapping[str, Any]) -> tuple[set[str], set[str]]:
        """Return the names of what the earlier graph has stacks of: it may hold these tasks, who change less."""
        if self._earlier is not None:
            with contextlib.suppress(DataError, KeyError, TypeError, AttributeError):
                found = read_json(self._earlier / LAYOUT)
                if to_json(found["origin"]) == to_json(origin):
                    return names_of(stack["name"] for stack in found["stacks"])
        return set(), set()

    def _same_graph(self) -> tuple[Path, ...]:
        """Return the files of the earlier graph; none if there is none, if it is damaged, or if it is another."""
        if self._earlier is None:
            return ()
        with contextlib.suppress(DataError, OSError, KeyError, TypeError, AttributeError):
            found = read_json(self._earlier / LAYOUT)
            if found.get("names", {}) != self.config.names:
                return ()
            wanted = {"format": FORMAT, "model": f"{FACTORS}.onnx", **self._facts()}
            files = {self._earlier / name: digest for name, digest in found["sha256"].items()}
            if all(found[key] == value for key, value in wanted.items()) and files:
                if all(digests.file_digest(path) == digest for path, digest in files.items()):
                    return tuple(files)
        return ()

    def _facts(self) -> dict[str, Any]:
        """Return what decides which graph it is."""
        return {"layout": self.layout.digest, "opset": self.config.file_opset, "ir_version": self.config.ir,
                "batch": self.config.static_batch}  # fmt: skip

    def _write(self, folder: Path) -> None:
        for path in self._graph:
            shutil.copyfile(path, folder / path.name)
        if self._graph:
            self.sizes[FACTORS] = (sum(path.stat().st_size for path in self._graph), 0)
        else:
            super()._write(folder)
        for member in self.members:
            path = folder / f"{member.name}{SUFFIX}"
            self._digests[member.name] = write_rows(path, self.layout, self.rows[member.name], member.card.classes)
        shutil.copyfile(_CODE, folder / f"{SERVED}.py")
        write_json(folder / LAYOUT, self._layout_file(folder))

    def _layout_file(self, folder: Path) -> dict[str, Any]:
        """Return the content of ``factors.json``."""
        spec = self.members[0].card.input
        ranks = {name: self.rows[name] for name in self.rows}
        files = [path for path in folder.iterdir() if path.suffix in (".onnx", ".data")]
        tasks = {
            m.name: {
                "file": f"{m.name}{SUFFIX}",
                "sha256": self._digests[m.name],
                "bytes": n_bytes(self.rows[m.name]),
                "classes": list(m.card.classes),
                "multi_label": m.card.multi_label,
                "input": m.card.input.to_dict(),
                "ranks": ranks_of(self.layout, ranks[m.name]),
            }
            for m in self.members
        }
        return {
            "format": FORMAT,
            "model": f"{FACTORS}.onnx",
            **self._facts(),
            **({"names": self.config.names} if self.config.names else {}),
            "input": {"in_chans": spec.in_chans, "height": spec.height, "width": spec.width},
            "sha256": {path.name: digests.file_digest(path) for path in sorted(files)},
            "origin": dict(self.layout.origin),
            "stacks": [stack.to_dict() for stack in self.layout.stacks],
            "sizes": open_sizes(self.layout, list(self.rows.values())),
            "padded_bytes": self.padded,
            "tasks": tasks,
        }

    def _props(self, name: str) -> dict[str, str]:
        # tasks come and go, and the graph is the same
        return {METADATA: to_json({"format": FORMAT, "layout": self.layout.digest})}

    def verify(self, folder: Path) -> list[TaskRow]:
        """Open the folder as a client does, run it, and return the gate's rows, passed or not."""
        self._models = [
            open_model(folder, SERVED, threads=self.config.threads, optimize=optimize) for optimize in (True, False)
        ]
        return verify_factors(
            folder / f"{FACTORS}.onnx", self._models, self.layout, self.members, self._stored,
            opset=self.config.file_opset, ir_version=self.config.ir, static_batch=self.config.static_batch,
            names=self.config.names,
        )  # fmt: skip

    def print_rows(self, rows: Sequence[TaskRow]) -> None:
        """Print the gate's table, and how much of the stacks is padding."""
        print_factor_rows(rows)
        whole = self.padded + sum(map(n_bytes, self.rows.values()))
        padding = f"{console.size(self.padded)} pad ranks and classes to the largest task's"
        console.say(f"stacks of {len(self.rows)} tasks: {console.size(whole)}, of which {padding}")

    def page(self) -> str:
        """Return the README.md of the folder."""
        return factors_page(self.cards(), batch=self.config.static_batch, called=self.config.names)

    def task_files(self, out: Path) -> tuple[TaskFile, ...]:
        """Return the files of the tasks' factors in ``out``."""
        shared = self.sizes[FACTORS][0]
        return tuple(TaskFile(name, out / f"{name}{SUFFIX}", n_bytes(rows), shared) for name, rows in self.rows.items())

    def separate_bytes(self) -> int:
        """Return the bytes of the tasks' whole models in fp32."""
        return self._whole

    def measure(self, folder: Path) -> str:
        """Measure the batch dependence, and return it as text.

        Raises:
            VerificationError: an image's logits depend on the others of its call.
        """
        path = folder / f"{FACTORS}.onnx"
        found = measure_neighbours(path, self._models[0], self.members, self.config.static_batch)
        self._models.clear()
        self.dependence[path.name] = found
        return found.describe(rounding(LIMITS["fp32"]))

    def index(self, folder: Path) -> dict[str, Any]:
        """Return the content of ``tasks.json``."""
        return {**super().index(folder), "factors": {"file": f"{FACTORS}.onnx", "layout": LAYOUT}}


def start_model(task: Task) -> nn.Module:
    """Return the model of a task as created from its base, in eval mode; tensors that a bundle lacks are 0."""
    assert task.base is not None
    base = start_base(task.base, task.card, task.path)
    created = build_from_card(task.card, base=base)
    model = created.model.eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            key = created.key_map.get(name)
            if key is not None and key not in base.tensors and name in task.carried:
                value.zero_()
    join_biases(model)
    return model


def _what(member: Member) -> str:
    return f"`{member.name}` ({member.path})"

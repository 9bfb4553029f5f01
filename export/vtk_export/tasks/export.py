"""Exports several tasks of one base: one ONNX file per task, sharing one file of weights, or one for mixed batches.

Packs of one base differ in about a third of their weights. In the form ``files`` the other two thirds are in one data
file to which all tasks' .onnx files refer. In the form ``gathered`` one graph serves mixed batches.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vtk import console
from vtk.errors import UsageError
from vtk.files import write_text
from vtk.options import expect
from vtk.packages import require
from vtk_export.gate.neighbours import Dependence
from vtk_export.output_folder import workspace
from vtk_export.readme import README
from vtk_export.targets import describe_oldest, oldest
from vtk_export.tasks.build import GATHERED, Build, TaskFile
from vtk_export.tasks.config import TasksConfig
from vtk_export.tasks.factor_build import FACTORS, FactorBuild
from vtk_export.tasks.gate import TaskRow, check_task_rows
from vtk_export.tasks.index import COMMAND, known_files, marks, publish
from vtk_export.tasks.members import open_members
from vtk_export.tasks.names import named_packs


@dataclass(frozen=True)
class TasksExportResult:
    """A verified folder of many tasks.

    Attributes:
        path: the folder; ``tasks.json`` in it says which file is whose.
        form: ``files``, ``gathered``, ``both`` or ``factors``.
        tasks: names, in the order of their numbers in the gathered file.
        files: of the tasks; none in the form ``gathered``.
        shared: the file of shared weights, None without one.
        gathered: the file of all tasks, None without one.
        bytes: of the folder's files that this export wrote.
        separate_bytes: of the same files if each held all its weights itself; in the form ``factors`` of the tasks'
            whole models.
        rows: results of the gate.
        dependence: by file, the effect of the other images of a call on an image's logits.
        factors: the file that takes the tasks' factors, None without one.
        padded_bytes: of padding in the stacks of all tasks' factors.
        images: what it was verified with.
        seconds: of export and verification.
        opset: of the files.
        ir_version: of the files.
    """

    path: Path
    form: str
    tasks: tuple[str, ...]
    files: tuple[TaskFile, ...]
    shared: Path | None
    gathered: Path | None
    bytes: int
    separate_bytes: int
    rows: tuple[TaskRow, ...] = field(repr=False)
    images: str
    seconds: float
    opset: int = 18
    ir_version: int = 10
    dependence: Mapping[str, Dependence] = field(default_factory=dict, repr=False)
    factors: Path | None = None
    padded_bytes: int = 0

    def needs(self) -> str:
        """Return one line with the oldest runtimes that take the files."""
        return describe_oldest(self.opset, self.ir_version)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        files = [{"task": f.name, "path": str(f.path), "own_bytes": f.bytes, "shared_bytes": f.shared_bytes}
                 for f in self.files]  # fmt: skip
        return {
            "path": str(self.path), "form": self.form, "tasks": list(self.tasks), "files": files,
            "shared": None if self.shared is None else str(self.shared),
            "gathered": None if self.gathered is None else str(self.gathered),
            "size_bytes": self.bytes, "separate_bytes": self.separate_bytes, "images": self.images,
            "verified": [row.to_dict() for row in self.rows], "export_ms": 1000 * self.seconds,
            "opset": self.opset, "ir_version": self.ir_version, "oldest": oldest(self.opset, self.ir_version),
            "factors": None if self.factors is None else str(self.factors), "padded_bytes": self.padded_bytes,
            "batch_dependence": {name: dataclasses.asdict(found) for name, found in self.dependence.items()},
        }  # fmt: skip


def export_tasks(
    packs: Mapping[str, str | Path] | Sequence[str | Path],
    config: TasksConfig,
    *,
    base: str | Path | None = None,
    earlier: Path | None = None,
    show: bool = True,
) -> TasksExportResult:
    """Export, verify, and put the files into ``config.out``; a failure leaves that folder as it was.

    Args:
        packs: name to pack or run folder; or a sequence of ``PACK`` and ``NAME=PACK``.
        config: options.
        base: file with the base weights; by default looked up.
        earlier: folder of a ``--form factors``, whose graph is taken and verified where these packs need the same.
        show: print the gate's table; a failure's table is always printed.

    Raises:
        UsageError: fewer than two packs, invalid names, different architectures, or models that one file cannot hold.
        BaseError: packs of different bases.
        DataError: a damaged pack, or a folder that holds other files or cannot be written.
        VerificationError: a file fails the gate, or the files share less than the packs do.
    """
    expect(config, TasksConfig, "export_tasks")
    require("onnxscript", "onnxruntime")
    start = time.perf_counter()
    named = named_packs(packs)
    factors = config.form == FACTORS
    if len(named) < (1 if factors else 2):
        were = "pack was" if len(named) == 1 else "packs were"
        raise UsageError(f"{len(named)} {were} given; give two or more, or use `vtk export onnx`")
    members = open_members(named, one_size=config.form != "files")
    with (
        console.stages(show),
        workspace(
            config.out, overwrite=config.overwrite, command=COMMAND, marks=marks(known_files(config.out))
        ) as folder,
    ):
        weights = None if base is None else Path(base)
        built = FactorBuild(config, members, weights, earlier) if factors else Build(config, members, weights)
        built.convert()
        console.stage("writing the files")
        built.write(folder)
        console.stage("comparing the files with PyTorch and a bank")
        rows = built.verify(folder)
        if show or not all(row.row.passed for row in rows):
            built.print_rows(rows)
            console.say(f"verified with {built.loader.what}")
        check_task_rows(rows)
        line = built.measure(folder)
        if show:
            console.say(line)
        write_text(folder / README, built.page())
        total = publish(folder, config.out, built.index(folder))
    out = config.out
    return TasksExportResult(
        path=out, form=config.form, tasks=tuple(named),
        files=built.task_files(out),
        shared=out / built.shared if built.shared else None,
        gathered=out / f"{GATHERED}.onnx" if GATHERED in built.sizes else None,
        bytes=total, separate_bytes=built.separate_bytes(), rows=tuple(rows),
        images=built.loader.what, seconds=time.perf_counter() - start, opset=config.file_opset, ir_version=config.ir,
        dependence=built.dependence, factors=out / f"{FACTORS}.onnx" if FACTORS in built.sizes else None,
        padded_bytes=built.padded,
    )  # fmt: skip

"""Options of ``vtk export tasks``; free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vtk.errors import UsageError
from vtk.options import Option
from vtk.options.shared import Base, Out, Overwrite, ProfileSizes, VerifyDataOf
from vtk_export.options import GraphConfig
from vtk_export.targets import check_caps


@dataclass(frozen=True, kw_only=True)
class TasksConfig(GraphConfig):
    """Options of the ONNX export of several packs of one base.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    out: Out
    form: Annotated[
        Literal["files", "gathered", "both"],
        Option("files: one file per task, weights shared; gathered: one file for mixed batches", often=True),
    ] = "files"
    data: VerifyDataOf = ()
    profile: ProfileSizes = ()
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        self.check_profile(self.profile)
        if self.runtime is not None:
            check_caps(self.runtime, self.opset, None)
        if self.fuse and self.form != "files":
            raise UsageError(f"`--fuse` is for --form files, `--form` is {self.form}: gathered weights cannot be "
                             "folded; leave it out")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TasksCommand(TasksConfig):
    """``vtk export tasks``: the packs and the options."""

    packs: Annotated[
        tuple[Path, ...],
        Option("two or more packs or run folders, each PACK or NAME=PACK", "source", often=True),
    ] = ()
    base: Base = None

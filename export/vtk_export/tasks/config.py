"""Options of ``vtk export tasks``; free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vtk.errors import UsageError
from vtk.options import Option
from vtk.options.shared import Base, Out, Overwrite, ProfileSizes, VerifyDataOf
from vtk_export.options import GraphConfig
from vtk_export.targets import check_caps
from vtk_export.tensor_names import InputName, OutputName, check_names, parse_names

FactorType = Annotated[Literal["fp16", "fp32"], Option("type of the factors of --form factors", "format")]


@dataclass(frozen=True, kw_only=True)
class TasksConfig(GraphConfig):
    """Options of the ONNX export of several packs of one base.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    out: Out
    form: Annotated[
        Literal["files", "gathered", "both", "factors"],
        Option(
            "files: one per task, shared weights; gathered: one for mixed batches; factors: one, low-rank tasks",
            often=True,
        ),
    ] = "files"
    factor_dtype: FactorType = "fp16"
    data: VerifyDataOf = ()
    input_name: InputName = ()
    output_name: OutputName = ()
    profile: ProfileSizes = ()
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        self.check_profile(self.profile)
        self.names  # noqa: B018 - refuses what the files do not have
        if self.runtime is not None:
            check_caps(self.runtime, self.opset, None)
        if self.form == "factors" and self.for_tensorrt:
            raise UsageError(f"`--form factors` is for ONNX Runtime, which binds its inputs once; `--target` is "
                             f"{self.target}: use --form gathered")  # fmt: skip
        if self.form == "factors" and self.profile:
            raise UsageError("`--profile` measures files that take images alone; leave it out of --form factors")
        if self.fuse and self.form != "files":
            raise UsageError(f"`--fuse` is for --form files, `--form` is {self.form}: weights of many tasks in "
                             "one graph cannot be folded; leave it out")  # fmt: skip

    @property
    def names(self) -> dict[str, str]:
        """Names of inputs and outputs that differ from the toolkit's own."""
        several = self.form != "files"
        inputs, outputs = ("pixel_values", "task"), ("logits", "num_classes")
        names = parse_names(self.input_name, self.output_name, image=inputs[0], answer=outputs[0])
        return check_names(names, inputs[: 1 + several], outputs[: 1 + several])


@dataclass(frozen=True, kw_only=True)
class TasksCommand(TasksConfig):
    """``vtk export tasks``: the packs and the options."""

    packs: Annotated[
        tuple[Path, ...],
        Option("two or more (for factors, one) packs or run folders, each PACK or NAME=PACK", "source", often=True),
    ] = ()
    base: Base = None

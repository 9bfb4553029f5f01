"""Options of ``vtk tasks bench``; imports no torch, so that help is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Base, Device

MIN_ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """Packs, batch sizes and precision that ``vtk tasks bench`` measures.

    Raises:
        UsageError: a value cannot be measured.
    """

    GROUP: ClassVar[str] = "measure"

    pack: Annotated[
        tuple[Path, ...], Option("pack folder; repeat for each task", "source", often=True, flag="pack",
                                 metavar="PACK")
    ] = ()  # fmt: skip
    copies: Annotated[int, Option("load each pack this many times, to simulate more tasks", often=True, least=1)] = 1
    images_per_task: Annotated[int, Option("images per task in one call", often=True, least=1)] = 1
    batch: Annotated[
        tuple[int, ...],
        Option("images of all tasks in one call, instead of --images-per-task", often=True, least=1),
    ] = ()
    rounds: Annotated[int, Option("timed calls of each side, alternating", least=MIN_ROUNDS)] = 11
    base: Base = None
    device: Device = "auto"
    dtype: Annotated[
        Literal["auto", "fp16", "bf16", "fp32", "fp64"],
        Option("precision of weights and activations (auto: fp32 on a CPU, bf16 on CUDA)", often=True),
    ] = "auto"
    max_gpu_bytes: Annotated[
        int | None, Option("most bytes of the bank on the GPU; other packs are paged in", least=1)
    ] = None

    def check(self) -> None:
        """Refuse a configuration that cannot be measured."""
        if not self.pack:
            raise UsageError("no packs; give `--pack FOLDER`, repeated for each task")
        tasks = len(self.pack) * self.copies
        for batch in self.batch:
            if batch < tasks:
                raise UsageError(
                    f"`--batch` has {batch}, and there are {tasks} tasks; give at least one image for each"
                )

"""Options of ``vtk tasks bench``; imports no torch, so that help is quick."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import MOST_SIDE, Base, Device, Seed
from vtk.packs.config import StoredAs

MIN_ROUNDS = 7
MODEL, RANK, CLASSES = "vit_small_patch16_224", 16, 10
"""Of synthetic tasks, where nothing else is given."""

BATCH = 16
"""Images of a call for synthetic tasks."""


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
    images_per_task: Annotated[
        int | None,
        Option("images per task in one call (default: 1; with --tasks 16 images in all)", often=True, least=1),
    ] = None
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
    max_bytes: Annotated[
        int | None,
        Option("most bytes of the bank on the device: merged copies of factors fill it, other packs are paged in",
               least=1),
    ] = None  # fmt: skip
    max_gpu_bytes: Annotated[int | None, Option("older name of --max-bytes", least=1)] = None

    tasks: Annotated[
        int | None,
        Option("measure this many synthetic packs of low-rank factors, of --pack's model", "synthetic", often=True,
               least=1),
    ] = None  # fmt: skip
    rank: Annotated[
        tuple[int, ...],
        Option("rank of matrices (default: 16); several are of the tasks in turn", "synthetic", often=True, least=0),
    ] = ()
    task_classes: Annotated[int, Option("classes of each task", "synthetic", least=1)] = CLASSES
    pack_dtype: StoredAs = "bf16"
    model: Annotated[
        str | None,
        Option("timm model with random weights, or with --base's (default: --pack's, or vit_small_patch16_224)",
               "synthetic", often=True, nonempty=True),
    ] = None  # fmt: skip
    img_size: Annotated[
        int | tuple[int, int] | None,
        Option("image size, one side or height and width (default: the model's)", "synthetic", least=1, most=MOST_SIDE),
    ] = None
    seed: Seed = 0

    @property
    def budget(self) -> int | None:
        """Most bytes on the device, by either name."""
        return self.max_bytes or self.max_gpu_bytes

    def check(self) -> None:
        """Refuse a configuration that cannot be measured."""
        if self.max_bytes and self.max_gpu_bytes:
            raise UsageError("`--max-gpu-bytes` is the older name of `--max-bytes`; give one of them")
        if self.tasks is not None:
            self._check_synthetic()
            return
        of_synthetic = ("rank", "task_classes", "pack_dtype", "model", "img_size", "seed")
        defaults = {f.name: f.default for f in fields(self)}
        if given := next((name for name in of_synthetic if getattr(self, name) != defaults[name]), None):
            raise UsageError(f"`--{given.replace('_', '-')}` is of synthetic packs; give `--tasks N` too")
        if not self.pack:
            raise UsageError("no packs; give `--pack FOLDER`, repeated for each task, or `--tasks N`")
        tasks = len(self.pack) * self.copies
        for batch in self.batch:
            if batch < tasks:
                raise UsageError(
                    f"`--batch` has {batch}, and there are {tasks} tasks; give at least one image for each"
                )

    def _check_synthetic(self) -> None:
        if len(self.pack) > 1 or self.copies > 1:
            raise UsageError("`--tasks` makes packs of one model; give one `--pack`, or --model, and no --copies")
        if self.pack and self.model is not None:
            raise UsageError("`--pack` and `--model` name two models; give one of them")
        if self.images_per_task and self.batch:
            raise UsageError("`--images-per-task` and `--batch` both say how many images a call has; give one of them")

"""Options of ``vtk parallelize``; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.config import flag_of
from vtk.options.shared import Device, Out, Overwrite, Seed, SourceOptions
from vtk.training.options.distill import Alpha, DistillOptions, Kind, Temperature
from vtk.training.options.policy import Policy
from vtk.training.options.recipe import FixedBatchSize, LearningRate

_DISTILL = ("distill_kind", "distill_alpha", "distill_temperature")


@dataclass(frozen=True, kw_only=True)
class ParallelizeConfig(Config):
    """How blocks are joined, what the result is compared on, and whether it is trained.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    GROUP: ClassVar[str] = "distillation"

    out: Out
    branches: Annotated[
        int, Option("blocks to join into one; the depth must be a multiple of it", "branches", often=True, least=2)
    ] = 2
    data: Annotated[
        Path | None, Option("folder of images to compare on (default: random images)", "data", often=True)
    ] = None
    images: Annotated[int, Option("images to compare on", "data", least=1)] = 64
    finetune: Annotated[
        int | None,
        Option("epochs of fine-tuning on --data, into DIR/finetune", "schedule", often=True, least=1),
    ] = None
    train: Policy = "attn"
    lr: LearningRate = 1e-4
    batch_size: FixedBatchSize = 32
    distill: Annotated[bool, Option("the sequential model teaches the parallel one in --finetune", often=True)] = False
    labels: Annotated[
        bool, Option("learn from labels, too", often=True, off="learn from the teacher alone, into DIR/distilled")
    ] = True
    distill_kind: Kind = DistillOptions.distill_kind
    distill_alpha: Alpha = DistillOptions.distill_alpha
    distill_temperature: Temperature = DistillOptions.distill_temperature
    device: Device = "auto"
    seed: Seed = 0
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.finetune is None:
            for name in ("train", "lr", "batch_size"):
                if getattr(self, name) != getattr(ParallelizeConfig, name):
                    raise UsageError(f"`{flag_of(type(self), name)}` is of --finetune, which is not given; add it")
        if self.finetune is not None and self.data is None:
            raise UsageError("`--finetune` needs --data, a folder with one folder of images per class")
        if self.distill:
            if self.finetune is None:
                raise UsageError("`--distill` is a way of --finetune; say for how many epochs")
            if self.distill_kind != "soft" and self.distill_temperature != 1:
                raise UsageError(
                    f"`--distill-temperature` softens probabilities; --distill-kind {self.distill_kind} has none"
                )
            if not self.labels and self.distill_alpha != DistillOptions.distill_alpha:
                raise UsageError("`--distill-alpha` weighs teacher against labels, and --no-labels has none; give one")
            return
        if not self.labels:
            raise UsageError("`--no-labels` leaves only the teacher to learn from; add --distill")
        for name in _DISTILL:
            if getattr(self, name) != getattr(DistillOptions, name):
                raise UsageError(f"`{flag_of(type(self), name)}` says how to learn from the teacher; add --distill")


@dataclass(frozen=True, kw_only=True)
class ParallelizeCommand(ParallelizeConfig, SourceOptions):
    """``vtk parallelize``: what to open, and how to join its blocks."""

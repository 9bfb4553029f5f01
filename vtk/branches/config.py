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
    """How blocks are made parallel, compared and fine-tuned.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    GROUP: ClassVar[str] = "distillation"

    out: Out
    branches: Annotated[
        int, Option("consecutive blocks to make parallel; must divide the depth", "branches", often=True, least=2)
    ] = 2
    data: Annotated[
        Path | None, Option("folder of images for the comparison (default: random images)", "data", often=True)
    ] = None
    images: Annotated[int, Option("number of images for the comparison", "data", least=1)] = 64
    finetune: Annotated[
        int | None,
        Option("fine-tune on --data for this many epochs, into DIR/finetune", "schedule", often=True, least=1),
    ] = None
    train: Policy = "attn"
    lr: LearningRate = 1e-4
    batch_size: FixedBatchSize = 32
    distill: Annotated[bool, Option("distil the sequential model into the parallel one in --finetune", often=True)] = (
        False
    )
    labels: Annotated[
        bool, Option("also learn from labels", often=True, off="learn from the teacher only, into DIR/distilled")
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
                    raise UsageError(f"`{flag_of(type(self), name)}` needs --finetune, which was not given; add it")
        if self.finetune is not None and self.data is None:
            raise UsageError("`--finetune` needs --data, a folder with one folder of images per class")
        if self.distill:
            if self.finetune is None:
                raise UsageError("`--distill` needs --finetune with a number of epochs; add it")
            if self.distill_kind != "soft" and self.distill_temperature != 1:
                raise UsageError(
                    f"`--distill-temperature` softens probabilities, which --distill-kind {self.distill_kind} does not "
                    "use; leave it out"
                )
            if not self.labels and self.distill_alpha != DistillOptions.distill_alpha:
                raise UsageError(
                    "`--distill-alpha` weighs the teacher against labels, which --no-labels leaves out; give one of "
                    "them"
                )
            return
        if not self.labels:
            raise UsageError("`--no-labels` learns from the teacher only; add --distill")
        for name in _DISTILL:
            if getattr(self, name) != getattr(DistillOptions, name):
                raise UsageError(f"`{flag_of(type(self), name)}` needs --distill; add it")


@dataclass(frozen=True, kw_only=True)
class ParallelizeCommand(ParallelizeConfig, SourceOptions):
    """``vtk parallelize``: the model, and how its blocks are made parallel."""

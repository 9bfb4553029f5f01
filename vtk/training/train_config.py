"""Options of a run that trains the whole model: those of every run, and its own."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vtk.errors import UsageError
from vtk.packs.config import PackDtype
from vtk.training.options.policy import MemoryMode, PolicyName
from vtk.training.options.recipe import Epochs, HeadMultiplier, LearningRate
from vtk.training.options.scratch import ScratchOptions
from vtk.training.options.source import DataOptions, Pretrained
from vtk.training.recipes import read_recipe
from vtk.training.run_config import ExecutionOptions, ModelOptions, RunConfig, TrainingOptions


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig, ExecutionOptions, TrainingOptions, ScratchOptions, ModelOptions, DataOptions):
    """Options of `vtk train`: images, model, and training.

    All weights are trained, by default from random ones. The defaults are for small models on a few thousand to a few
    hundred thousand images; `vtk.training.recipes` has those of papers. ``recipe`` says where values came from; it is
    read by `from_recipe` and by the command line.

    Raises:
        UsageError: a value is out of range or two values contradict each other.
    """

    pretrained: Pretrained = False
    epochs: Epochs = 100
    lr: LearningRate = 1e-3
    head_lr_mult: HeadMultiplier = 1.0

    command: ClassVar[str] = "train"
    # options of fine-tuning that are constants here
    train: ClassVar[PolicyName] = "full"
    memory: ClassVar[MemoryMode] = "plain"
    pack_dtype: ClassVar[PackDtype] = "fp32"
    pack_rank: ClassVar[None] = None
    tasks: ClassVar[tuple[str, ...]] = ()
    sampling: ClassVar[float] = 1.0
    init_from: ClassVar[tuple[str, ...]] = ()

    def _check_kind(self) -> None:
        self._check_scratch()

    def settled(self, memory: MemoryMode, batch: int) -> Self:
        """Return the config with the batch size that was chosen; there is one memory mode."""
        assert memory == self.memory
        return dataclasses.replace(self, batch_size=batch)

    def scaled(self) -> Self:
        """Return the config with the learning rate scaled to its batch size."""
        if self.lr_batch is None:
            return self
        assert isinstance(self.batch_size, int)
        return dataclasses.replace(self, lr=self.lr * self.batch_size * self.accumulate / self.lr_batch, lr_batch=None)

    def _check_source(self) -> None:
        if self.weights is not None and self.pretrained:
            raise UsageError("`--weights` gives weights to start from, --pretrained asks for the hub's; give one")
        self._check_input()

    def _check_together(self) -> None:
        """Refuse combinations of options from several groups."""
        if self.loss != "ce" and self.multi_label:
            raise UsageError(f"`--loss` {self.loss}: --multi-label is binary cross-entropy already; leave --loss out")
        if self.loss != "ce" and self.class_weights != "none":
            raise UsageError(
                f"`--class-weights` balanced weighs the classes of cross-entropy; with --loss {self.loss} give "
                "--sampler balanced"
            )
        if self.loss != "ce" and self.distill_alpha == 1:
            raise UsageError(
                f"`--loss` {self.loss} is of the labels, of which --distill-alpha 1 leaves nothing; give an alpha "
                "below 1, or leave --loss out"
            )
        if self.aug_repeats > 1 and self.sampler == "balanced":
            raise UsageError("`--aug-repeats` and `--sampler` balanced both repeat images; give one of them")


def from_recipe(name: str, kind: type[Any] = TrainConfig, **values: Any) -> Any:
    """Return the config of a recipe, with further or other values.

    Args:
        name: of a recipe, or a YAML file.
        kind: class of the config: `vtk.TrainConfig`, `vtk.FinetuneConfig` or `vtk.PretrainConfig`.
        values: of other options.

    Raises:
        UsageError: see `vtk.training.recipes.read_recipe`, or values that contradict each other.
    """
    return kind(**{**read_recipe(name, kind), **values, "recipe": name})

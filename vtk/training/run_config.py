"""Options that every run has, whether it fine-tunes a part of a model or trains all of it."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vtk.data.config import ImageOptions
from vtk.errors import UsageError
from vtk.training.options.architecture import ArchitectureOptions
from vtk.training.options.distill import DistillOptions
from vtk.training.options.labels import LabelOptions
from vtk.training.options.outcome import OutcomeOptions
from vtk.training.options.recipe import LayerRateOptions, RecipeOptions
from vtk.training.options.running import DryRunOptions, GraphOptions, RunningOptions, TrialOptions
from vtk.training.options.sharpness import SharpnessOptions
from vtk.training.options.source import DataOptions, SourceOptions
from vtk.training.options.views import AugmentOptions
from vtk.training.recipes import recipe_values

if TYPE_CHECKING:
    from typing import Literal

    from vtk.packs.config import PackDtype
    from vtk.training.options.policy import MemoryMode, PolicyName


# fields come in the order of the last parent first


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions(DryRunOptions, GraphOptions, RunningOptions, TrialOptions):
    """Preview, trial, number formats, device, saving and resuming."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(
    OutcomeOptions, LabelOptions, AugmentOptions, DistillOptions, SharpnessOptions, LayerRateOptions, RecipeOptions
):
    """Length, optimizer, objective, augmentation, and the metric of the best epoch."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(ArchitectureOptions, ImageOptions, SourceOptions):
    """The model and its images."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(ExecutionOptions, TrainingOptions, ModelOptions, DataOptions):
    """Options of a run of either kind; the configs of `vtk finetune` and `vtk train` add their own."""

    command: ClassVar[str]

    if TYPE_CHECKING:  # options of fine-tuning, constants of a run that trains the whole model

        @property
        def train(self) -> PolicyName: ...  # noqa: D102
        @property
        def memory(self) -> Literal["auto"] | MemoryMode: ...  # noqa: D102
        @property
        def pack_dtype(self) -> PackDtype: ...  # noqa: D102
        @property
        def pack_rank(self) -> int | Literal["auto"] | None: ...  # noqa: D102
        @property
        def tasks(self) -> tuple[str, ...]: ...  # noqa: D102
        @property
        def sampling(self) -> float: ...  # noqa: D102
        @property
        def init_from(self) -> tuple[str, ...]: ...  # noqa: D102

    def check(self) -> None:
        """Refuse options that contradict each other."""
        self._check_recipe()
        self._check_source()
        self._check_architecture()
        self._check_kind()
        self._check_sharpness()
        self._check_distill()
        self._check_augment()
        self._check_labels()
        self._check_running()
        self._metric_of(self.multi_label)
        self._check_weighted_labels(self.distill_alpha)
        if self.multi_label and self.keep_empty_classes:
            raise UsageError("`--keep-empty-classes` does not apply to --multi-label; leave one of them out")
        self._check_together()

    @property
    def chosen_metric(self) -> str:
        """The metric that chooses the best epoch."""
        return self._metric_of(self.multi_label)

    def defaults(self) -> dict[str, Any]:
        """Return the default of each option: the recipe's value, or the field's."""
        return {f.name: f.default for f in dataclasses.fields(self)} | recipe_values(self.recipe, type(self))

    def settled(self, memory: "MemoryMode", batch: int) -> Self:
        """Return the config with the memory mode and the batch size that were chosen for ``auto``."""
        changes: dict[str, Any] = {"memory": memory, "batch_size": batch}
        return dataclasses.replace(self, **changes)

    def scaled(self) -> Self:
        """Return the config with the learning rate of its batch size, as the engine takes it."""
        return self

    def _check_kind(self) -> None:
        """Refuse options of one kind of run that contradict each other."""

    def _check_together(self) -> None:
        """Refuse combinations of options from several groups that one kind of run excludes."""

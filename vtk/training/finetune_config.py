"""Options of a fine-tuning run: every default of the recipe is in one of the groups, once."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from vtk.data.config import ImageOptions
from vtk.errors import UsageError
from vtk.training.options.architecture import ArchitectureOptions
from vtk.training.options.augment import AugmentOptions
from vtk.training.options.distill import DistillOptions
from vtk.training.options.labels import LabelOptions
from vtk.training.options.outcome import OutcomeOptions
from vtk.training.options.packs import MODES, MemoryMode, PackOptions
from vtk.training.options.policy import PolicyName, PolicyOptions
from vtk.training.options.recipe import LayerRateOptions, RecipeOptions
from vtk.training.options.running import DryRunOptions, GraphOptions, RunningOptions
from vtk.training.options.sharpness import SharpnessOptions
from vtk.training.options.source import SourceOptions
from vtk.training.options.tasks import TaskOptions
from vtk.training.options.trial import TrialOptions

__all__ = ["MODES", "FinetuneConfig", "MemoryMode", "PolicyName"]


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(
    # fields come in the order of the last parent first
    DryRunOptions,
    GraphOptions,
    RunningOptions,
    TrialOptions,
    PackOptions,
    OutcomeOptions,
    LabelOptions,
    AugmentOptions,
    DistillOptions,
    SharpnessOptions,
    LayerRateOptions,
    RecipeOptions,
    PolicyOptions,
    ArchitectureOptions,
    ImageOptions,
    SourceOptions,
    TaskOptions,
):
    """What to fine-tune on which images, and how.

    The defaults are a recipe for a few hundred to a few ten thousand images: AdamW at a small rate, the new head ten
    times faster, a short warm-up, light augmentation.

    Raises:
        UsageError: a value is out of range or two values contradict each other.
    """

    command: ClassVar[str] = "finetune"

    def check(self) -> None:
        """Refuse options that contradict each other."""
        self._check_source()
        self._check_architecture()
        self._check_policy()
        self._check_sharpness()
        self._check_distill()
        self._check_augment()
        self._check_labels()
        self._check_running()
        self._check_together()

    @property
    def chosen_metric(self) -> str:
        """The number by which the best epoch is chosen."""
        return self._metric_of(self.multi_label)

    def defaults(self) -> dict[str, Any]:
        """Return what each option is where no flag says otherwise."""
        return {f.name: f.default for f in dataclasses.fields(self)}

    def settled(self, memory: MemoryMode, batch: int) -> "FinetuneConfig":
        """Return the config with the memory mode and the batch that were chosen."""
        return dataclasses.replace(self, memory=memory, batch_size=batch)

    def scaled(self) -> "FinetuneConfig":
        """Return the config as the engine takes it: the learning rate is for any batch."""
        return self

    def _check_together(self) -> None:
        """Refuse what options of different groups do to each other."""
        specs = self._check_tasks()
        self._check_trained_parts(self.train, bool(specs))
        self._metric_of(self.multi_label)
        self._check_weighted_labels(self.distill_alpha)
        if self.multi_label and self.keep_empty_classes:
            raise UsageError("`--keep-empty-classes` and --multi-label exclude each other; give one of them")
        if self.init_from and self.train == "lora":
            raise UsageError("`--init-from` trains a pack's weights on; adapters start from the base: leave one out")
        if self.train == "lora" and (self.cb or self.cb_scale):
            raise UsageError(
                f"`--{'cb' if self.cb else 'cb-scale'}`: timm has no Context Broadcasting, so stock PEFT could not "
                "use the adapter that --train lora writes; use --train attn"
            )
        if not specs:
            return
        if self.train not in ("attn", "head"):
            raise UsageError(
                f"`--train` {self.train}: tasks of one run share the frozen FFN, norms and stem; choose attn or head"
            )
        if self.cb_scale:
            raise UsageError(
                "`--cb-scale` trains Λ inside what the tasks of one run share; use --cb, or one run for each task"
            )
        if self.in_chans != 3:
            raise UsageError(
                f"`--in-chans` {self.in_chans} trains the stem, which the tasks of one run share; give one run for each"
            )
        if self.distill_from is not None:
            raise UsageError(
                "`--distill-from` is for runs of one task, whose classes the teacher has; give one run for each"
            )
        if self.grad_checkpointing:
            raise UsageError("`--grad-checkpointing` is for runs of one task; use --memory minimal")
        if self.cuda_graph == "on":
            raise UsageError(
                "`--cuda-graph` on: the steps of several tasks hold other images each time; leave it out, or give one "
                "run for each"
            )
        if self.compile:
            raise UsageError("`--compile` is for runs of one task: every mixture of tasks would be compiled anew")

"""Options of a fine-tuning run: every default of the recipe is in one of the groups, once."""

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path

from vtk.errors import UsageError
from vtk.training.options.architecture import ArchitectureOptions
from vtk.training.options.augment import AugmentOptions
from vtk.training.options.checks import require
from vtk.training.options.images import ImageOptions
from vtk.training.options.labels import LabelOptions
from vtk.training.options.outcome import OutcomeOptions
from vtk.training.options.policy import PolicyName, PolicyOptions
from vtk.training.options.recipe import RecipeOptions
from vtk.training.options.running import MODES, MemoryMode, RunningOptions
from vtk.training.options.source import SourceOptions

__all__ = ["MODES", "FinetuneConfig", "MemoryMode", "PolicyName"]


@dataclass(frozen=True)
class FinetuneConfig(
    # fields come in the order of the last parent first
    RunningOptions,
    OutcomeOptions,
    LabelOptions,
    AugmentOptions,
    RecipeOptions,
    PolicyOptions,
    ArchitectureOptions,
    ImageOptions,
    SourceOptions,
):
    """What to fine-tune on which images, and how.

    The defaults are a recipe for a few hundred to a few ten thousand images: AdamW at a small rate, the new head ten
    times faster, a short warm-up, light augmentation.

    Raises:
        UsageError: a value is out of range or two values contradict each other.
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            require(not isinstance(value, float) or isfinite(value), f.name, value, "a finite number")
        self._check_source()
        self._check_images()
        self._check_architecture()
        self._check_policy()
        self._check_recipe()
        self._check_augment()
        self._check_labels()
        self._check_outcome()
        self._check_running()
        self._check_together()

    @property
    def chosen_metric(self) -> str:
        """The number by which the best epoch is chosen."""
        return self._metric_of(self.multi_label)

    def _check_together(self) -> None:
        """Refuse what options of different groups do to each other."""
        specs = self._check_tasks()
        self._metric_of(self.multi_label)
        if self.data is not None and Path(self.data).suffix.lower() == ".csv" and not self.multi_label:
            raise UsageError(f"{self.data} is a table; add --multi-label, or give a folder with one folder per class")
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
        if self.grad_checkpointing:
            raise UsageError("`--grad-checkpointing` is for runs of one task; use --memory minimal")

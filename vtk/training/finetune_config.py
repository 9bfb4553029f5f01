"""Options of a fine-tuning run: those of every run, and its own."""

from dataclasses import dataclass
from typing import ClassVar

from vtk.errors import UsageError
from vtk.training.options.policy import MODES, MemoryMode, PackOptions, PolicyName, PolicyOptions
from vtk.training.options.tasks import TaskOptions
from vtk.training.run_config import ExecutionOptions, ModelOptions, RunConfig, TrainingOptions

__all__ = ["MODES", "FinetuneConfig", "MemoryMode", "PolicyName"]


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(
    RunConfig, ExecutionOptions, PackOptions, TrainingOptions, PolicyOptions, ModelOptions, TaskOptions
):
    """Options of `vtk finetune`: images, model, and training.

    The defaults are a recipe for a few hundred to a few ten thousand images: AdamW at a small rate, the new head ten
    times faster, a short warm-up, light augmentation.

    Raises:
        UsageError: a value is out of range or two values contradict each other.
    """

    command: ClassVar[str] = "finetune"

    def _check_kind(self) -> None:
        self._check_policy()
        self._check_pack(self.train)

    def _check_together(self) -> None:
        """Refuse combinations of options from several groups."""
        specs = self._check_tasks()
        self._check_trained_parts(self.train, bool(specs))
        if self.init_from and self.train == "lora":
            raise UsageError(
                "`--init-from` continues from the weights of a pack, adapters start from the base; leave one out"
            )
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

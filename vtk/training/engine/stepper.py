"""Does the optimizer steps of a run: forward and backward passes, the update, and the sums of the epoch."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vtk.errors import VtkError
from vtk.training.engine.gradients import Gradients, Means
from vtk.training.engine.learner import Learner
from vtk.training.engine.loss_scale import SMALLEST
from vtk.training.engine.partial_epoch import PartialEpoch
from vtk.training.engine.static_step.step import StaticStep
from vtk.training.engine.step_plan import Feed, Step
from vtk.training.engine.step_rule import StepRule
from vtk.training.objectives.base import Batch

PATIENCE = 10
"""Steps in a row without finite gradients after which a run ends: skipping more would not bring it back."""


class DivergedError(VtkError):
    """The loss became infinite or not a number."""


class Stepper:
    """Does optimizer steps.

    Args:
        means: what gradients are computed with.
        learners: all of the run; each step updates those whose images it has.
        step_rule: how gradients become an update.
        static: does the steps without waiting for the device; None where the run has no such step.
    """

    def __init__(
        self, means: Means, learners: Sequence[Learner], step_rule: StepRule, static: StaticStep | None
    ) -> None:
        self.means, self.learners, self.step_rule, self.static = means, learners, step_rule, static

    def __call__(self, sources: Sequence[Iterator[Batch]], step: Step, part: PartialEpoch) -> Tensor:
        """Do one step.

        Args:
            sources: batches of each stream.
            step: its streams and the sizes of their batches.
            part: the sums of the epoch so far, which are updated.

        Returns:
            (learners,) this process's losses, summed over images.

        Raises:
            DivergedError: too many steps in a row have no finite gradients.
        """
        return (self._step if self.static is None else self._static_step)(sources, step, part)

    def _step(self, sources: Sequence[Iterator[Batch]], step: Step, part: PartialEpoch) -> Tensor:
        """Do one optimizer step; return this process's part of each learner's loss, summed over images."""
        feed = Feed([(i, sources[i], len(sizes)) for i, sizes in step], self._prepare, keep=self.step_rule.passes > 1)
        images = {stream: sum(sizes) for stream, sizes in step}
        gradients = Gradients(self.means, self.learners, list(images) if self.means.joint else [0], feed, images)
        learners, losses, logs = gradients.learners, gradients.losses, gradients.logs
        for learner in learners:
            learner.begin()

        def update() -> None:
            scaler = self.means.precision.scaler
            taken = [learner.update(scaler) for learner in learners]
            scaler.update()
            left_out = taken.count(False)
            part.skipped += left_out
            for i, learner, done in zip(images if self.means.joint else (0,), learners, taken, strict=True):
                count = images[i] if self.means.joint else sum(images.values())
                # a loss that is not finite is no part of the epoch's; a scaler's overflow says nothing of the loss
                if done or scaler.skips:
                    part.counted[i] += count
                else:
                    losses[i] = 0.0
                if done:  # without them, the loss where the rule led says nothing
                    part.perturbed[0][i] += gradients.again[i]
                    part.perturbed[1][i] += count
                if learner.in_row >= PATIENCE and not scaler.skips:
                    raise DivergedError(
                        self.advice(learner, f"in {PATIENCE} steps in a row, in epoch {part.epoch + 1}")
                    )
            if all(taken) or scaler.skips:
                for key, number in logs.items():
                    part.logs[key] = part.logs.get(key, torch.zeros_like(number)) + number
            if left_out and scaler.factor < SMALLEST:
                raise DivergedError(
                    f"gradients are not finite in epoch {part.epoch + 1}, even with a loss that is not multiplied; use "
                    "a lower --lr, a longer --warmup, or --precision bf16"
                )

        self.step_rule.step(gradients, update)
        return losses

    def _static_step(self, sources: Sequence[Iterator[Batch]], step: Step, part: PartialEpoch) -> Tensor:
        """Do the same without a look at the device; `_settle` finds out later what came of it."""
        assert self.static is not None
        ((stream, sizes),) = step
        batches = [self._prepare(dataclasses.replace(next(sources[stream]), stream=stream)) for _ in sizes]
        losses = self.static(batches)
        for key, number in self.static.logs.items():
            part.logs[key] = part.logs[key] + number if key in part.logs else number.clone()
        return losses

    def settle(self, part: PartialEpoch) -> None:
        """Bring what the host knows of the static steps up to date; waits for the device."""
        if self.static is None:
            return
        counts = self.static.settle()
        part.skipped += counts.skipped
        part.counted[0] += counts.images
        if counts.in_row >= PATIENCE:
            raise DivergedError(
                self.advice(self.learners[0], f"in {PATIENCE} steps in a row, in epoch {part.epoch + 1}")
            )

    def _prepare(self, batch: Batch) -> Batch:
        return self.means.objective.prepare(batch.to(self.means.ranks.device))

    def advice(self, learner: Learner, when: str) -> str:
        """Return the message for gradients that are not finite ``when``, with the options to change."""
        whose = f"the loss of task {learner.name}" if learner.name else "the loss"
        return f"{whose} or its gradients are not finite {when} (learning rate {learner.lr:.2g}); use {self._milder}"

    @property
    def _milder(self) -> str:
        """What to change of a run that diverged; a rule with a second pass may have gone too far in the first."""
        further = "a smaller --sam or --adversarial, " if self.step_rule.passes > 1 else ""
        return f"{further}a lower --lr, a longer --warmup or a smaller --clip-grad"

    def check_losses(self, totals: Sequence[float], part: PartialEpoch) -> None:
        """Refuse sums of losses that are not finite.

        Args:
            totals: of each learner, over the epoch and all processes.
            part: the epoch so far.

        Raises:
            DivergedError: names the step, the learning rate and the options to change.
        """
        for learner, total in zip(self.learners, totals, strict=True):
            if not math.isfinite(total):
                whose = f"the loss of task {learner.name}" if learner.name else "the loss"
                raise DivergedError(
                    f"{whose} is {total} after step {part.step} of epoch {part.epoch + 1} (learning rate "
                    f"{learner.lr:.2g}); use {self._milder}"
                )

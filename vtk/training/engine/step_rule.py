"""Step rules, which turn gradients into an update: that of plain training; `vtk.training.step_rules.sam` has SAM."""

from collections.abc import Callable
from typing import Protocol

from vtk.training.engine.gradients import Gradients


class StepRule(Protocol):
    """Turns gradients into an update.

    Attributes:
        passes: forward and backward passes of a step over its batches.
    """

    passes: int

    def step(self, gradients: Gradients, update: Callable[[], None]) -> None:
        """Do one optimizer step.

        Args:
            gradients: of the step's batches; called, it leaves in the parameters what plain training updates by.
            update: clips, lets the optimizer step and advances the learning rate; called once.
        """


class PlainStep:
    """Gradients, then update."""

    passes = 1

    def step(self, gradients: Gradients, update: Callable[[], None]) -> None:
        """Do one optimizer step."""
        gradients()
        update()

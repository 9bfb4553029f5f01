"""Step rules, which turn gradients into an update: that of plain training; `vtk.training.step_rules.sam` has SAM."""

from collections.abc import Callable
from typing import Protocol

from vtk.training.engine.gradients import Gradients


class StepRule(Protocol):
    """How gradients become an update.

    Attributes:
        passes: how often a step runs its batches forward and backward.
    """

    passes: int

    def step(self, gradients: Gradients, update: Callable[[], None]) -> None:
        """Do one optimiser step.

        Args:
            gradients: of the step's batches; called, it leaves in the parameters what plain training updates by.
            update: clips, lets the optimiser step and advances the learning rate; called once.
        """


class PlainStep:
    """Gradients, then update."""

    passes = 1

    def step(self, gradients: Gradients, update: Callable[[], None]) -> None:
        """Do one optimiser step."""
        gradients()
        update()

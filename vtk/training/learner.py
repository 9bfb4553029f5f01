"""A learner: parameters that one optimiser steps, with their clipping and their learning rate."""

from typing import Any, Protocol

import torch
from torch import nn

from vtk.training.loss_scale import LossScaler
from vtk.training.optim import OptimConfig, make_optimizer, make_schedule


class LearnerConfig(OptimConfig, Protocol):
    """What this module reads of a config."""

    @property
    def clip_grad(self) -> float: ...  # noqa: D102


class Learner:
    """The trainable parameters of a model, or of one task of a model of several.

    Args:
        name: of the task; empty where there is only one.
        model: holds the parameters.
        config: optimiser, learning rate and clipping.
        steps: of the whole run.

    Attributes:
        parameters: those that require gradients.
        optimizer: over them.
        schedule: of its learning rate.
        lr: highest learning rate of the latest update, without the head's factor.
    """

    def __init__(self, name: str, model: nn.Module, config: LearnerConfig, steps: int) -> None:
        self.name, self.config = name, config
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(model, config)
        self.schedule = make_schedule(self.optimizer, config, steps)
        self.lr = self._lr()

    def load(self, optimizer: dict[str, Any], schedule: dict[str, Any]) -> None:
        """Go on from saved states."""
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(schedule)

    def update(self, scaler: LossScaler) -> bool:
        """Clip the gradients, step the optimiser, advance the learning rate.

        Returns:
            Whether it did: with gradients that are not finite the scaler leaves the step out, and the learning rate
            stays where it is.
        """
        if self.config.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_grad)
        self.lr = self._lr()
        stepped = scaler.step(self.optimizer)
        if stepped:
            self.schedule.step()
        return stepped

    def _lr(self) -> float:
        group = self.optimizer.param_groups[0]
        return self.config.lr * float(group["lr"]) / float(group["initial_lr"])

"""The state of a training loop between two epochs or two steps, and how a resumed run continues from it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vtk.errors import DataError
from vtk.training.engine.learner import Learner
from vtk.training.engine.partial_epoch import PartialEpoch, copy_into, to_cpu
from vtk.training.engine.precision import Precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.result import FitState
from vtk.training.engine.static_step.step import StaticStep
from vtk.training.objectives.base import Objective, Stateful
from vtk.training.policies.policy import live_buffers
from vtk.training.random_states import random_states, set_random_states


class LoopState:
    """Saves and loads what changes while a loop trains, besides the trained tensors.

    Args:
        model: of the run.
        learners: their optimizers, schedules and averages.
        precision: its loss scaler.
        objective: its random numbers.
        ranks: this process and the others.
        static: step on the device; None without one.
        joint: whether each learner has states of its own, under its name.
    """

    def __init__(
        self, model: nn.Module, learners: Sequence[Learner], precision: Precision, objective: Objective, ranks: Ranks,
        static: StaticStep | None, *, joint: bool,
    ) -> None:  # fmt: skip
        self.model, self.learners, self.precision, self.objective = model, learners, precision, objective
        self.ranks, self.static, self.joint = ranks, static, joint
        self._random: dict[str, Any] = {}  # states of generators, until the epoch that they are of goes on

    def load(self, state: FitState) -> None:
        """Continue after an epoch."""
        for learner in self.learners:
            parts = (state.optimizer, state.schedule, state.ema)
            learner.load(*(part[learner.name] if self.joint and part else part for part in parts))
        self.precision.scaler.load_state_dict(state.scaler)

    def load_midway(self, state: FitState, count: int) -> PartialEpoch:
        """Continue within an epoch of ``count`` steps, after `load`.

        Raises:
            DataError: the state is damaged.
        """
        try:
            own = state.parts[self.ranks.rank]
            part = PartialEpoch.of_state(own["midway"], self.ranks.device)
            if not 0 < part.step == state.step <= count or part.epoch != state.epoch:
                raise ValueError(f"step {state.step} of {count}")
            self._random = {name: own[name] for name in ("objective", "random")}
            copy_into(self.own_buffers(), own["buffers"])
            for learner, (lr, in_row) in zip(self.learners, own["learners"], strict=True):
                learner.lr, learner.in_row = lr, in_row
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DataError(
                f"`--resume`: the state within epoch {state.epoch + 1} is damaged ({type(error).__name__}: {error}); "
                "give --overwrite in place of --resume to restart"
            ) from error
        return part

    def restore_random(self) -> None:
        """Let random generators continue from where the state within this epoch was written, if it was."""
        states, self._random = self._random, {}
        if states:
            if isinstance(self.objective, Stateful):
                self.objective.load_state_dict(states["objective"])
            set_random_states(states["random"], self.ranks.device)

    def save(self, epoch: int, rows: list[dict[str, float]]) -> FitState:
        """Return the state after ``epoch`` epochs, whose numbers are ``rows``."""
        optimizers = {
            learner.name: self.static.update.state_dict() if self.static else learner.optimizer.state_dict()
            for learner in self.learners
        }
        schedules = {learner.name: learner.schedule.state_dict() for learner in self.learners}
        scaler = self.precision.scaler.state_dict()
        averages = {learner.name: learner.ema.state_dict() for learner in self.learners if learner.ema is not None}
        if not self.joint:
            return FitState(epoch, optimizers[""], schedules[""], rows, scaler, averages.get("", {}))
        return FitState(epoch, optimizers, schedules, rows, scaler, averages)

    def save_midway(self, part: PartialEpoch, epoch: int, rows: list[dict[str, float]]) -> FitState:
        """Return the state within the epoch in progress; ``rows`` are of those before. All processes take part."""
        own = {
            "midway": part.state_dict(), "random": random_states(self.ranks.device), "buffers": self.own_buffers(),
            "objective": self.objective.state_dict() if isinstance(self.objective, Stateful) else {},
            "learners": [[learner.lr, learner.in_row] for learner in self.learners],
        }  # fmt: skip
        state = dataclasses.replace(self.save(epoch, rows), epoch=part.epoch, step=part.step)
        state.parts.extend(self.ranks.gather(to_cpu(own)))
        return state

    def own_buffers(self) -> list[Tensor]:
        """Return what each process counts of its own images until the end of an epoch."""
        live = live_buffers(self.model)
        averages = [t for own in self.learners if own.ema is not None for t in own.ema.buffers()]
        return [b for n, b in self.model.named_buffers() if n in live] + averages

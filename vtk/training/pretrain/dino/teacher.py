"""DINO's teacher: the moving average of the student, and the center of its own outputs.

It is the moving average of the engine, so that it is saved with the run, evaluated and kept in the student's place; its
decay rises to 1, and it holds the center. A step that is left out leaves both as they were.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vtk.errors import DataError
from vtk.training.engine.ema import Ema
from vtk.training.engine.processes import Ranks
from vtk.training.pretrain.dino.loss import Schedules


class Teacher(Ema):
    """The average that gives the targets.

    Args:
        parameters: of the student, by name.
        schedules: of the run.
        prototypes: K, numbers of an output.
        center_momentum: share of itself that the center keeps after a step.
        ranks: this process and the others; the center is that of the outputs of all.

    Attributes:
        center: (K,) moving average of the mean output over all whole views of a step.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], schedules: Schedules, prototypes: int, center_momentum: float,
        ranks: Ranks,
    ) -> None:  # fmt: skip
        super().__init__(parameters, schedules.momentum)
        self.schedules, self.center_momentum, self.ranks = schedules, center_momentum, ranks
        one = next(iter(self.averages.values()))
        self.center = torch.zeros(prototypes, device=one.device, dtype=torch.promote_types(one.dtype, torch.float32))
        self._own = True  # whether the model holds the student's weights
        self._kept: list[Tensor] = []  # averages of buffers before the step, which its forward passes change
        self._sum = torch.zeros(prototypes + 1, device=one.device, dtype=self.center.dtype)

    @property
    def temperature(self) -> float:
        """Of the next step."""
        return self.schedules.temperature_at(self.step)

    @property
    def frozen(self) -> bool:
        """Whether the prototypes stay in the next step."""
        return self.schedules.frozen_at(self.step)

    def kept(self) -> float:
        """Return the share of the average that this update keeps."""
        return self.schedules.momentum_at(self.step - 1)

    def exchange(self) -> None:
        """Exchange the weights of student and teacher."""
        super().exchange()
        self._own = not self._own

    def in_model(self, teacher: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model holds the teacher's weights, or the student's."""
        return self.applied() if teacher == self._own else contextlib.nullcontext()

    def begin(self) -> None:
        """Remember, before the first forward pass of a step, what the teacher's own passes change: its BatchNorms."""
        if not self._kept:
            self._kept = [buffer.clone() for buffer in self.buffers()]

    def observe(self, outputs: Tensor) -> None:
        """Count the teacher's outputs (G, B, K) of a forward pass for the center after this step."""
        rows = outputs.detach().flatten(0, 1).to(self._sum.dtype)
        self._sum[:-1] += rows.sum(0)
        self._sum[-1] += len(rows)

    def update(self) -> None:
        """Take in the student's weights and the outputs of the step; all processes call this."""
        super().update()
        total = self.ranks.sum(self._sum)
        self.center.lerp_(total[:-1] / total[-1].clamp_min(1), 1 - self.center_momentum)
        self._sum.zero_()
        self._kept = []

    def skip(self) -> None:
        """Forget the outputs of a step that is left out, also where BatchNorms have counted them."""
        if self._kept:
            torch._foreach_copy_(self.buffers(), self._kept)
        self._sum.zero_()
        self._kept = []

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {**super().state_dict(), "center": self.center}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``.

        Raises:
            DataError: it is not one of this student.
        """
        super().load_state_dict(state)
        center = state.get("center")
        if not isinstance(center, Tensor) or center.shape != self.center.shape:
            raise DataError("`--resume`: the saved state has no center of these prototypes; start another run")
        self.center.copy_(center)

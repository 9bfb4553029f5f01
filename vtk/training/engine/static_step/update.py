"""The update of a learner on the device alone: learning rate and step count are tensors, and nothing is waited for.

With gradients that are not finite an update leaves everything as it was: torch's fused optimizers read a flag on the
device for that (as they do for its GradScaler), and what is not theirs is chosen by the same flag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vtk.training.engine.ema import WARMING
from vtk.training.engine.learner import Learner

_TAKEN, _SKIPPED, _IN_ROW, _WORST, _IMAGES = range(5)


@dataclass(frozen=True)
class Counts:
    """Counts of the device since the last call of `settle`.

    Attributes:
        skipped: updates that were left out.
        images: of updates that were not.
        in_row: updates left out in a row, at most.
    """

    skipped: int
    images: int
    in_row: int


class DeviceUpdate:
    """Clips, steps, averages and counts; `settle` tells the learner what came of it.

    Args:
        learner: its optimizer is one of `vtk.training.engine.static_step.rules.OPTIMIZERS`, and is changed: the
            learning rates of its groups become tensors.
        device: of the parameters.

    Attributes:
        bad: () bool, whether the latest update was left out.
    """

    def __init__(self, learner: Learner, device: torch.device) -> None:
        self.learner, self.device = learner, device
        optimizer: Any = learner.optimizer
        # torch's fused kernels read a rate in fp32 on CUDA, and in fp64 on the CPU
        wide = torch.float64 if device.type == "cpu" else torch.float32
        self._rates = torch.zeros(len(optimizer.param_groups), dtype=wide, device=device)
        self._bases = torch.tensor(learner.schedule.base_lrs, dtype=torch.float64, device=device)
        factors = [learner.factor(step) for step in range(learner.steps + 1)]
        self._factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self._counts = torch.zeros(5, dtype=torch.int64, device=device)
        self.bad = torch.zeros((), dtype=torch.bool, device=device)
        self._left_out = torch.zeros((), device=device)
        self._original: list[dict[str, Any]] = []
        self.attach()

    @torch.no_grad()
    def attach(self) -> None:
        """Take over the optimizer's state, as it is after its making or loading."""
        learner, optimizer = self.learner, self.learner.optimizer
        self._original = []
        for i, group in enumerate(optimizer.param_groups):
            changed = {"lr": self._rates[i], "fused": True, "foreach": False}
            if "capturable" in group:
                changed["capturable"] = True
            self._original.append({name: group.get(name) for name in changed if name != "lr"})
            group.update(changed)
            if group.get("momentum"):  # torch makes them without contents, and would leave them so in a step left out
                for p in group["params"]:
                    state = optimizer.state[p]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(p)
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"]).to(self.device, torch.float32)
        untyped: Any = optimizer
        untyped.found_inf, untyped._warned_capturable_if_run_uncaptured = self._left_out, True
        self._taken = learner.schedule.last_epoch
        self._ahead = 0
        self._lag = learner.ema.step - self._taken if learner.ema is not None else 0
        self._read = [self._taken, 0, learner.in_row, 0, 0]
        self._counts.copy_(torch.tensor(self._read))

    @torch.no_grad()
    def __call__(self, images: int, kept: Sequence[Tensor]) -> None:
        """Do the update by the gradients that the parameters have.

        Args:
            images: of the step.
            kept: the learner's buffers before the step's forward passes.
        """
        learner = self.learner
        if learner.config.clip_grad:
            norm = torch.nn.utils.clip_grad_norm_(learner.parameters, learner.config.clip_grad)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in learner.parameters if p.grad is not None])
        torch.logical_not(norm.isfinite(), out=self.bad)
        self._left_out.copy_(self.bad)
        taken = self._counts[_TAKEN : _TAKEN + 1]
        factor = self._factors.index_select(0, taken.clamp(max=len(self._factors) - 1))
        self._rates.copy_(self._bases * factor)
        learner.optimizer.step()
        self._count(images)
        for buffer, before in zip(learner.buffers, kept, strict=True):
            buffer.copy_(torch.where(self.bad, before, buffer))
        self._average(taken)

    def _count(self, images: int) -> None:
        good, bad = (~self.bad).long(), self.bad.long()
        counts = self._counts.unbind()
        counts[_TAKEN].add_(good)
        counts[_SKIPPED].add_(bad)
        counts[_IN_ROW].add_(1).mul_(bad)
        torch.maximum(counts[_WORST], counts[_IN_ROW], out=counts[_WORST])
        counts[_IMAGES].add_(good, alpha=images)

    def _average(self, taken: Tensor) -> None:
        """Update the average as `vtk.training.engine.ema.Ema.update` does, where the step was taken."""
        ema = self.learner.ema
        if ema is None:
            return
        averages = list(ema.averages.values())
        step = taken.double() + self._lag
        weight = (1 - ((1 + step) / (WARMING + step)).clamp(max=ema.decay)) * ~self.bad
        away = torch._foreach_sub(ema.tensors(), averages)
        torch._foreach_mul_(away, weight[0].to(averages[0].dtype))
        torch._foreach_add_(averages, away)

    def note(self) -> None:
        """Let the learner's rate be that of the update just queued, if none since the last `settle` was left out."""
        self.learner.lr = self.learner.config.lr * self.learner.factor(self._taken + self._ahead)
        self._ahead += 1

    def settle(self) -> Counts:
        """Read what was counted, and bring the learner's schedule and average up to it; this waits for the device."""
        learner, now = self.learner, self._counts.tolist()
        before, self._read = self._read, now
        self._taken, learner.in_row = now[_TAKEN], now[_IN_ROW]
        if self._ahead:
            learner.lr = learner.config.lr * learner.factor(self._taken - (learner.in_row == 0))
        self._ahead = 0
        schedule: Any = learner.schedule
        schedule.last_epoch, schedule._step_count = self._taken, self._taken + 1
        schedule._last_lr = [base * learner.factor(self._taken) for base in schedule.base_lrs]
        if learner.ema is not None:
            learner.ema.step = self._taken + self._lag
        self._counts[_WORST].copy_(self._counts[_IN_ROW])
        worst, self._read[_WORST] = now[_WORST], now[_IN_ROW]
        return Counts(now[_SKIPPED] - before[_SKIPPED], now[_IMAGES] - before[_IMAGES], worst)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as a plain loop would have it; call `settle` before."""
        state = self.learner.optimizer.state_dict()
        for group, original, rate in zip(
            state["param_groups"], self._original, self.learner.schedule.get_last_lr(), strict=True
        ):
            group.update(original, lr=float(rate))
        return state

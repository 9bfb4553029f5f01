"""A learner: parameters that one optimizer steps, with their clipping and their learning rate."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vtk.training.engine.ema import Ema
from vtk.training.engine.loss_scale import LossScaler
from vtk.training.engine.param_groups import OptimConfig, WeightDecay, make_optimizer, make_schedule
from vtk.training.options.running import GraphChoice
from vtk.training.policies.policy import live_buffers


class LearnerConfig(OptimConfig, Protocol):
    """What this module reads of a config."""

    @property
    def clip_grad(self) -> float: ...  # noqa: D102
    @property
    def ema(self) -> float | None: ...  # noqa: D102


class FitConfig(LearnerConfig, Protocol):
    """What the engine reads of a config."""

    @property
    def epochs(self) -> int: ...  # noqa: D102
    @property
    def accumulate(self) -> int: ...  # noqa: D102
    @property
    def grad_checkpointing(self) -> bool: ...  # noqa: D102
    @property
    def compile(self) -> bool: ...  # noqa: D102
    @property
    def cuda_graph(self) -> GraphChoice: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def stop_after(self) -> int | None: ...  # noqa: D102


@runtime_checkable
class Averaging(Protocol):
    """An objective whose targets come from a moving average of the model that learns."""

    def average(self, tensors: Mapping[str, Tensor], steps: int) -> Ema:
        """Return the average, which is saved and evaluated as that of ``--ema``.

        Args:
            tensors: parameters that are trained, and buffers that training changes, by name, on the device.
            steps: of the whole run.
        """


class Learner:
    """The trainable parameters of a model, or of one task of a model of several.

    Args:
        name: of the task; empty where there is only one.
        model: holds the parameters.
        config: optimizer, learning rate and clipping.
        steps: of the whole run.
        averaging: makes the average; by default it is that of ``config.ema``, if any.

    Attributes:
        steps: of the whole run.
        parameters: those that require gradients.
        optimizer: over them.
        schedule: of its learning rate.
        in_row: updates skipped in a row until the latest.
        lr: peak learning rate of the latest update, without the multiplier of the head.
        buffers: those that training changes.
        ema: average of the parameters and of the buffers that training changes; None without ``config.ema``.
    """

    def __init__(
        self, name: str, model: nn.Module, config: LearnerConfig, steps: int, averaging: Averaging | None = None
    ) -> None:
        self.name, self.config, self.steps = name, config, steps
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(model, config)
        self.schedule = make_schedule(self.optimizer, config, steps)
        self.weight_decay = WeightDecay(self.optimizer, config, steps)
        self.lr = self._lr()
        self.in_row = 0
        self.buffers = [b for n, b in model.named_buffers() if n in live_buffers(model)]
        self._kept: list[Tensor] = []
        self.ema: Ema | None = None
        if averaging is not None or config.ema is not None:
            live = live_buffers(model)
            buffers = {n: b for n, b in model.named_buffers() if n in live and b.is_floating_point()}
            tensors = {**{n: p for n, p in model.named_parameters() if p.requires_grad}, **buffers}
            self.ema = averaging.average(tensors, steps) if averaging else Ema(tensors, config.ema or 0.0)

    def load(self, optimizer: dict[str, Any], schedule: dict[str, Any], ema: dict[str, Any]) -> None:
        """Go on from saved states."""
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(schedule)
        if self.ema is not None:
            self.ema.load_state_dict(ema)

    def update(self, scaler: LossScaler) -> bool:
        """Clip the gradients, step the optimizer, advance the learning rate.

        Returns:
            Whether it did: with gradients that are not finite the step is left out as if it had not been, and the
            learning rate stays where it is. All processes see the same gradients, and so do the same.
        """
        norm: Tensor | None = None
        if self.config.clip_grad:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_grad)
        self.lr = self._lr()
        self.weight_decay.set_at(self.schedule.last_epoch)
        stepped = (scaler.skips or self._finite(norm)) and scaler.step(self.optimizer)
        if stepped:
            self.schedule.step()
            if self.ema is not None:
                self.ema.update()
        else:
            if self._kept:
                torch._foreach_copy_(self.buffers, self._kept)
            if self.ema is not None:
                self.ema.skip()
        self.in_row = 0 if stepped else self.in_row + 1
        return stepped

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate of update ``step`` (from 0)."""
        return float(self.schedule.lr_lambdas[0](step))

    def begin(self) -> None:
        """Remember, before the step's first forward pass, what it changes besides the parameters."""
        self._kept = [buffer.clone() for buffer in self.buffers]

    def _finite(self, norm: Tensor | None) -> bool:
        """Tell whether all gradients are; the device is waited for, as it is by a loss scaler."""
        if norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        return bool(norm.isfinite())

    def _lr(self) -> float:
        group = self.optimizer.param_groups[0]
        return self.config.lr * float(group["lr"]) / float(group["initial_lr"])

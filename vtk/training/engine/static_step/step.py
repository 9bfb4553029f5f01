"""One optimizer step as a function of static tensors: forward, backward, clipping, update and average.

It reads images and labels where they always lie and writes what it found where it always does, so that its kernels may
be recorded once and started by one call. Until then, and for steps of another shape (the last batch of an epoch), the
same function runs as it is.
"""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vtk import console
from vtk.training.engine.gradients import Gradients, Means
from vtk.training.engine.learner import Learner
from vtk.training.engine.static_step.update import Counts, DeviceUpdate
from vtk.training.engine.step_plan import Feed
from vtk.training.objectives.base import Batch

WARM_UP = 3
"""Steps that run as they are before one is captured: kernels compile, and libraries and optimizer make their state."""

Shape = tuple[Any, ...]


class Recorder(Protocol):
    """Makes one call of what a function starts on a device."""

    def warm(self, function: Callable[[], None]) -> None:
        """Run ``function`` where it will be recorded."""

    def record(self, function: Callable[[], None], spare: float) -> Callable[[], None]:
        """Record ``function`` without running it; return what runs it.

        Args:
            function: reads and writes tensors that stay.
            spare: memory to leave free, as a multiple of what ``function`` takes.

        Raises:
            Exception: of any kind; what can be recorded is known only then.
        """


class StaticStep:
    """Runs steps of a single learner; see the module.

    Args:
        means: of the run; nothing of it waits for the device (`vtk.training.engine.static_step.rules`).
        learner: that all steps update.
        recorder: None to record nothing.
        spare: images of the largest step of another shape, as a share of those of the first one's.

    Attributes:
        losses: (1,) loss of the latest step, summed over images; 0 where it was left out.
        logs: the same of the objective's further numbers.
        recorded: whether steps of the main shape are started by one call.
    """

    def __init__(self, means: Means, learner: Learner, recorder: Recorder | None, spare: float = 0.0) -> None:
        self.means, self.learner, self.recorder, self.spare = means, learner, recorder, spare
        self.update = DeviceUpdate(learner, means.ranks.device)
        self.losses = torch.zeros(1, device=means.ranks.device)
        self.logs: dict[str, Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self._main: Shape | None = None
        self._batches: list[Batch] = []
        self._replay: Callable[[], None] | None = None
        self._done = 0

    @property
    def recorded(self) -> bool:
        """Whether steps of the main shape are started by one call."""
        return self._replay is not None

    def load(self) -> None:
        """Continue from the state that the learner has loaded; a recording of other tensors is dropped."""
        self.update.attach()
        self._forget()

    def run(self, batches: Sequence[Batch]) -> None:
        """Do one step on these batches; this is what is recorded."""
        stream, images = batches[0].stream, sum(len(batch.images) for batch in batches)
        feed = Feed([(stream, iter(batches), len(batches))], _same, keep=False)
        gradients = Gradients(self.means, [self.learner], [0], feed, {stream: images})
        kept = [buffer.clone() for buffer in self.learner.buffers]
        gradients()
        self.update(images, kept)
        bad = self.update.bad
        self.losses.copy_(gradients.losses.masked_fill(bad, 0.0))
        for name, number in gradients.logs.items():
            if name not in self.logs:
                self.logs[name] = torch.zeros_like(number)
            self.logs[name].copy_(number.masked_fill(bad, 0.0))

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Do one step; return its loss summed over images, in a tensor that the next step overwrites."""
        self.update.note()
        shape = _shape(batches)
        self._main = self._main or shape
        if self.recorder is None or shape != self._main:
            self.run(batches)
            return self.losses
        if self._replay is None and not self._warm(batches):
            return self.losses
        for static, batch in zip(self._batches, batches, strict=True):
            for name in _tensors(batch):
                getattr(static, name).copy_(getattr(batch, name), non_blocking=True)
        if self._replay is None:
            self._record()
        (self._replay or (lambda: self.run(self._batches)))()
        return self.losses

    def settle(self) -> Counts:
        """Read what the steps since the last call came to; this waits for the device."""
        return self.update.settle()

    def _warm(self, batches: Sequence[Batch]) -> bool:
        """Tell whether the step may be recorded now; else it is done."""
        assert self.recorder is not None
        if not self._batches:
            self._batches = [
                dataclasses.replace(b, **{name: getattr(b, name).clone() for name in _tensors(b)}) for b in batches
            ]
        if self._done < WARM_UP:
            self._done += 1
            self.recorder.warm(lambda: self.run(batches))
            return False
        return True

    def _record(self) -> None:
        """Record the step; where that fails, say so in a line and go on without."""
        assert self.recorder is not None
        self._drop()
        collecting = gc.isenabled()
        gc.disable()  # what it frees could be another graph's
        try:
            self._replay = self.recorder.record(lambda: self.run(self._batches), self.spare)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            console.warn(f"--cuda-graph: a step could not be captured ({why}); it runs without")
            self.recorder = None
        finally:
            if collecting:
                gc.enable()
            self._drop()

    def _drop(self) -> None:
        """Let go of gradients and casts of a step: they hold on to the stream and the memory they were made in."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.means.precision.before_eval(self.means.model)


def _same(batch: Batch) -> Batch:
    return batch


def _tensors(batch: Batch) -> list[str]:
    return [f.name for f in dataclasses.fields(batch) if isinstance(getattr(batch, f.name), Tensor)]


def _shape(batches: Sequence[Batch]) -> Shape:
    """Return what two steps have in common that one graph can do."""
    return tuple(
        (batch.stream, *((name, getattr(batch, name).shape, getattr(batch, name).dtype) for name in _tensors(batch)))
        for batch in batches
    )

"""The training loop: the steps of an epoch, and its row of numbers. `fit` drives it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.data.loading.samplers import mix
from vtk.errors import UsageError
from vtk.training.engine.callback_list import Callbacks
from vtk.training.engine.callbacks import StepInfo
from vtk.training.engine.compile_passes import steps_of
from vtk.training.engine.gradients import Means
from vtk.training.engine.learner import Averaging, FitConfig, Learner
from vtk.training.engine.loop_state import LoopState
from vtk.training.engine.partial_epoch import PartialEpoch, epoch_row
from vtk.training.engine.precision import Precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.result import FitState
from vtk.training.engine.save_schedule import Interrupted, Saves
from vtk.training.engine.static_step.make import make_static_step
from vtk.training.engine.step_plan import EpochSteps, Step, count_batches, count_images
from vtk.training.engine.step_rule import StepRule
from vtk.training.engine.stepper import DivergedError, Stepper
from vtk.training.engine.streams import Stream, batches
from vtk.training.objectives.base import Batch, Objective
from vtk.training.policies.policy import train_mode

_INTERVAL = 10  # steps between two looks at the loss on a GPU, where looking waits for all work that is queued
_SLOW = 1.0  # seconds of a step from which every one is looked at: who sends a signal does not wait for long


@dataclass
class _Events:
    """What happened since the step before: a signal came, it is time to save, steps are slow."""

    signal: bool
    late: bool
    slow: bool


class Loop:
    """A run between its epochs; `fit` drives it.

    Attributes:
        epochs: planned.
        epoch: epochs done.
        step: steps done of the whole run.
        seen: images of the epoch's steps.
        stopped: whether a callback ended the run.
        midway: the epoch in progress, until it was evaluated and saved; None after that.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        streams: Sequence[Stream],
        config: FitConfig,
        precision: Precision,
        step_rule: StepRule,
        ranks: Ranks,
        learners: Mapping[str, nn.Module] | None = None,
        callbacks: Callbacks | None = None,
        *,
        max_steps: int | None = None,
    ) -> None:
        self.model, self.objective, self.streams, self.config = model, objective, streams, config
        self.precision, self.step_rule, self.ranks, self.joint = precision, step_rule, ranks, learners is not None
        self.callbacks = callbacks or Callbacks()
        sizes = [stream.sizes for stream in streams]
        self.steps = EpochSteps(
            sizes, config.accumulate, config.seed, joint=self.joint, epochs=config.epochs, max_steps=max_steps
        )
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not trained or not self.steps.of_epoch(0):
            raise UsageError("there is nothing to train: no parameter requires gradients, or no stream has a batch")
        self.epochs, self.count = self.steps.epochs, self.steps.count
        model.to(ranks.device)
        precision.prepare(model, trained)
        parts = {"": model} if learners is None else learners
        averaging = objective if isinstance(objective, Averaging) else None
        self.learners = [
            Learner(name, part, config, self.steps.of_learner(stream), averaging)
            for stream, (name, part) in enumerate(parts.items())
        ]
        last = {stream for step in self.steps.of_epoch(self.epochs - 1) for stream, _ in step}
        if self.joint and (lacking := [name for stream, name in enumerate(parts) if stream not in last]):
            raise UsageError(
                f"`--max-steps` {max_steps}: task `{lacking[0]}` has no step in epoch {self.epochs} before that; "
                f"give {self.epochs * self.count}"
            )
        # gradients of several learners are summed here: which of them have any changes from step to step
        wrapped = model if self.joint else ranks.wrap(model)
        self.passes = steps_of(model, sizes, compile=config.compile, checkpointing=config.grad_checkpointing)
        means = Means(model, wrapped, objective, precision, ranks, self.joint)
        images = [count_images(step) for step in self.steps.of_epoch(0)]
        self.static = make_static_step(config, means, self.learners[0], step_rule, images)
        self.stepper = Stepper(means, self.learners, step_rule, self.static)
        self.state = LoopState(model, self.learners, precision, objective, ranks, self.static, joint=self.joint)
        self.epoch = self.step = self.seen = 0
        self.stopped = False
        self.midway: PartialEpoch | None = None

    def load(self, state: FitState) -> None:
        """Continue from ``state``."""
        self.state.load(state)
        self.epoch, self.step = state.epoch, state.epoch * self.count + state.step
        if state.step:
            self.midway = self.state.load_midway(state, self.count)
        if self.static is not None:
            self.static.load()

    def save(self, rows: list[dict[str, float]]) -> FitState:
        """Return the state after the epochs done, whose numbers are ``rows``."""
        return self.state.save(self.epoch, rows)

    def save_midway(self, rows: list[dict[str, float]]) -> FitState:
        """Return the state within the epoch in progress; ``rows`` are of those before. All processes take part."""
        assert self.midway is not None
        self.stepper.settle(self.midway)
        return self.state.save_midway(self.midway, self.epoch, rows)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside of the context, with ``ema``."""
        with contextlib.ExitStack() as stack:
            for learner in self.learners:
                if learner.ema is not None:
                    stack.enter_context(learner.ema.applied())
            yield

    def end(self) -> None:
        """Leave the averaged weights in the model, with ``ema``."""
        for learner in self.learners:
            if learner.ema is not None:
                learner.ema.exchange()

    def run_epoch(
        self, show: bool, saves: Saves | None = None, save: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Train for one epoch, or for the rest of it; return its row of numbers.

        Args:
            show: print what was compiled.
            saves: when to save within the epoch.
            save: writes the state.

        Raises:
            Interrupted: a signal has asked the run to end.
        """
        ranks, epoch = self.ranks, self.epoch
        # all that is random in an epoch follows from the seed, its number and the rank: a resumed run draws the same
        torch.manual_seed(mix(self.config.seed, epoch, ranks.rank))
        self.objective.start_epoch(mix(self.config.seed, epoch, ranks.rank, 1))
        train_mode(self.model)
        steps = self.steps.of_epoch(epoch)
        if self.midway is not None and self.midway.epoch != epoch:  # of an epoch that nobody saved
            self.midway = None
        part = self.midway = self.midway or PartialEpoch.start(epoch, len(self.learners), ranks.device)
        done = count_batches(steps[: part.step], len(self.streams))
        sources = [batches(stream, epoch, skip) for stream, skip in zip(self.streams, done, strict=True)]
        self.state.restore_random()
        try:
            self._run_steps(part, steps, sources, show, saves or Saves(lambda state: None), save or (lambda: None))
        finally:
            for source in sources:
                source.close() if hasattr(source, "close") else None
        self.seen = part.seen
        if ranks.world > 1:
            ranks.broadcast(self.state.own_buffers())
        self.precision.before_eval(self.model)
        self.model.eval()
        self.epoch += 1
        active = {stream if self.joint else 0 for step in steps[: part.step] for stream, _ in step}
        for i, (learner, count) in enumerate(zip(self.learners, part.counted, strict=True)):
            if not count and i in active:
                raise DivergedError(self.stepper.advice(learner, f"in all steps of epoch {self.epoch}"))
        skips = self.precision.scaler.skips
        return epoch_row(part, self.learners, ranks, joint=self.joint, passes=self.step_rule.passes, skips=skips)

    def _run_steps(
        self, part: PartialEpoch, steps: Sequence[Step], sources: Sequence[Iterator[Batch]], show: bool, saves: Saves,
        save: Callable[[], None],
    ) -> None:  # fmt: skip
        """Do the steps of the epoch that are left."""
        ranks, count = self.ranks, len(steps)
        interval = 1 if ranks.device.type == "cpu" and ranks.world == 1 and self.static is None else _INTERVAL
        total = sum(map(count_images, steps))
        before, begin = part.seconds, time.perf_counter()
        progress = self.callbacks.steps(part.epoch + 1, self.epochs, count, total, part.step, part.seen)
        with self.passes(show), progress:
            for i, step in enumerate(steps[part.step :], part.step):
                losses = self.stepper(sources, step, part)
                self.step += 1
                part.totals += losses
                images = count_images(step)
                part.seen += images
                part.step = i + 1
                look = (i + 1) % interval == 0 or i + 1 == count
                seconds = before + time.perf_counter() - begin
                if look:
                    self.stepper.settle(part)
                events = _Events(bool(saves.signals.number), saves.late(), seconds > _SLOW * part.step)
                known = self._check(part, losses, events) / images if look else None
                self._tell(i, images, known, losses)
                part.seconds = before + time.perf_counter() - begin
                interval = 1 if look and events.slow else interval
                if self.stopped:
                    if not look:
                        self.stepper.settle(part)
                        self._check(part, losses, events)
                    break
                saves.signals.check()  # alone, a process need not look
                if look and events.signal:
                    raise Interrupted
                # several processes agree where they look
                if ((look or ranks.world == 1) and events.late) or saves.at(self.step):
                    began = time.perf_counter()
                    save()
                    saves.saved()
                    begin += time.perf_counter() - began  # is no time of training

    def _tell(self, index: int, images: int, known: float | None, losses: Tensor) -> None:
        """Call the callbacks after a step; the loss is read from the device only by those that want it."""
        if self.callbacks.all:
            # a static step overwrites its losses, and a callback may read them later
            kept = losses.detach() if self.static is None else losses.clone()
            lr, scale, control = self.learners[0].lr, self.ranks.world / images, self.callbacks.control
            self.callbacks.step(StepInfo(self.epoch + 1, control, self.step, index + 1, images, lr, known, scale, kept))
        if self.ranks.world == 1:
            self.stopped = self.callbacks.control.stop

    def _check(self, part: PartialEpoch, losses: Tensor, events: _Events) -> float:
        """Return the loss of the step over all images; all processes call this at the same steps, and agree on events.

        Raises:
            DivergedError: the loss is not finite.
        """
        flags = self.callbacks.control.stop, events.signal, events.late and self.ranks.main, events.slow
        own = [torch.full_like(part.totals, float(flag)) for flag in flags]
        sums = self.ranks.sum(torch.stack([part.totals, losses, *own])).tolist()
        stopped, events.signal, events.late, events.slow = (row[0] > 0 for row in sums[2:])
        self.stopped = self.stopped or stopped
        self.stepper.check_losses(sums[0], part)
        return float(sum(sums[1]))

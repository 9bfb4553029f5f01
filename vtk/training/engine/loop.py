"""The loop of a run: the steps of an epoch, and the state between them; `fit` drives it."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vtk.data.loading.samplers import mix
from vtk.errors import DataError, UsageError, VtkError
from vtk.training.engine.callback_list import Callbacks
from vtk.training.engine.callbacks import StepInfo
from vtk.training.engine.compile_passes import steps_of
from vtk.training.engine.gradients import Gradients, Means
from vtk.training.engine.learner import Learner, LearnerConfig
from vtk.training.engine.loss_scale import SMALLEST
from vtk.training.engine.partial_epoch import Midway, copy_into, to_cpu
from vtk.training.engine.precision import Precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.result import FitState
from vtk.training.engine.save_schedule import Interrupted, Saves
from vtk.training.engine.static_step.make import make_static_step
from vtk.training.engine.static_step.rules import GraphChoice
from vtk.training.engine.step_plan import Feed, Step, plan_joint, plan_steps, planned_epochs
from vtk.training.engine.step_rule import StepRule
from vtk.training.engine.streams import Stream, batches
from vtk.training.objectives.base import Batch, Objective, Stateful
from vtk.training.policies.policy import live_buffers, train_mode
from vtk.training.random_states import random_states, set_random_states

PATIENCE = 10
"""Steps in a row without finite gradients after which a run ends: skipping more would not bring it back."""
_INTERVAL = 10  # steps between two looks at the loss on a GPU, where looking waits for all work that is queued
_SLOW = 1.0  # seconds of a step from which every one is looked at: who sends a signal does not wait for long


class DivergedError(VtkError):
    """The loss became infinite or not a number."""


@dataclass
class _Heard:
    """What was heard since the step before: a signal; that it is time to save; that steps are slow."""

    signal: bool
    late: bool
    slow: bool


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


class Loop:
    """A run between its epochs; `fit` drives it.

    Attributes:
        epochs: planned.
        epoch: epochs done.
        step: steps done of the whole run.
        seen: images of the epoch's steps.
        stopped: whether a callback ended the run.
        midway: what is done of the epoch in progress, which lasts until it was evaluated and saved; None after that.
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
        self.sizes = [stream.sizes for stream in streams]
        self.max_steps: int | None = None
        self.groups = self._plan(0)
        self.count = len(self.groups)  # steps of a whole epoch
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not trained or not self.groups:
            raise UsageError("there is nothing to train: no parameter requires gradients, or no stream has a batch")
        self.epochs, self.max_steps = planned_epochs(config.epochs, self.count, max_steps), max_steps
        model.to(ranks.device)
        precision.prepare(model, trained)
        if learners is None:
            self.learners = [Learner("", model, config, self._steps(0))]
        else:
            self.learners = [
                Learner(name, part, config, self._steps(stream)) for stream, (name, part) in enumerate(learners.items())
            ]
            last = {stream for step in self._plan(self.epochs - 1) for stream, _ in step}
            if lacking := [name for stream, name in enumerate(learners) if stream not in last]:
                raise UsageError(
                    f"`--max-steps` {max_steps}: task `{lacking[0]}` has no step in epoch {self.epochs} before that; "
                    f"give {self.epochs * self.count}"
                )
        # gradients of several learners are summed here: which of them have any changes from step to step
        self.wrapped = model if self.joint else ranks.wrap(model)
        self.steps_of = steps_of(model, self.sizes, compile=config.compile, checkpointing=config.grad_checkpointing)
        self.means = Means(model, self.wrapped, objective, precision, ranks, self.joint)
        images = [sum(sum(sizes) for _, sizes in step) for step in self.groups]
        self.static = make_static_step(config, self.means, self.learners[0], step_rule, images)
        self.epoch = self.step = self.seen = 0
        self.stopped = False
        self.midway: Midway | None = None
        self._going_on: dict[str, Any] = {}  # what a run that goes on within an epoch starts from

    def load(self, state: FitState) -> None:
        """Go on from ``state``."""
        for learner in self.learners:
            optimizer, schedule = state.optimizer, state.schedule
            parts = (optimizer, schedule, state.ema)
            learner.load(*(part[learner.name] if self.joint and part else part for part in parts))
        self.precision.scaler.load_state_dict(state.scaler)
        self.epoch, self.step = state.epoch, state.epoch * self.count + state.step
        if state.step:
            self._load_midway(state)
        if self.static is not None:
            self.static.load()

    def _load_midway(self, state: FitState) -> None:
        try:
            own = state.parts[self.ranks.rank]
            self.midway = Midway.of_state(own["midway"], self.ranks.device)
            if not 0 < self.midway.step == state.step <= self.count or self.midway.epoch != state.epoch:
                raise ValueError(f"step {state.step} of {self.count}")
            self._going_on = {name: own[name] for name in ("objective", "random")}
            copy_into(self._own_buffers(), own["buffers"])
            for learner, (lr, in_row) in zip(self.learners, own["learners"], strict=True):
                learner.lr, learner.in_row = lr, in_row
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DataError(
                f"`--resume`: the state within epoch {state.epoch + 1} is damaged ({type(error).__name__}: {error}); "
                "give --overwrite in place of --resume to restart"
            ) from error

    def save_midway(self, rows: list[dict[str, float]]) -> FitState:
        """Return the state within the epoch in progress; ``rows`` are of those before. All processes take part."""
        part = self.midway
        assert part is not None
        self._settle(part)
        own = {
            "midway": part.state_dict(), "random": random_states(self.ranks.device), "buffers": self._own_buffers(),
            "objective": self.objective.state_dict() if isinstance(self.objective, Stateful) else {},
            "learners": [[learner.lr, learner.in_row] for learner in self.learners],
        }  # fmt: skip
        state = dataclasses.replace(self.save(rows), epoch=part.epoch, step=part.step)
        state.parts.extend(self.ranks.gather(to_cpu(own)))
        return state

    def _own_buffers(self) -> list[Tensor]:
        """Return what each process counts of its own images until the end of an epoch."""
        live = live_buffers(self.model)
        averages = [t for own in self.learners if own.ema is not None for t in own.ema.buffers()]
        return [b for n, b in self.model.named_buffers() if n in live] + averages

    def save(self, rows: list[dict[str, float]]) -> FitState:
        """Return the state after the epochs done, whose numbers are ``rows``."""
        optimizers = {
            learner.name: self.static.update.state_dict() if self.static else learner.optimizer.state_dict()
            for learner in self.learners
        }
        schedules = {learner.name: learner.schedule.state_dict() for learner in self.learners}
        scaler = self.precision.scaler.state_dict()
        averages = {learner.name: learner.ema.state_dict() for learner in self.learners if learner.ema is not None}
        if not self.joint:
            return FitState(self.epoch, optimizers[""], schedules[""], rows, scaler, averages.get("", {}))
        return FitState(self.epoch, optimizers, schedules, rows, scaler, averages)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model hold the averages of its weights inside of the context, where averages are kept."""
        with contextlib.ExitStack() as stack:
            for learner in self.learners:
                if learner.ema is not None:
                    stack.enter_context(learner.ema.applied())
            yield

    def end(self) -> None:
        """Leave the averages in the model: they are what the run is for."""
        for learner in self.learners:
            if learner.ema is not None:
                learner.ema.exchange()

    def run_epoch(
        self, show: bool, saves: Saves | None = None, save: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Train for one epoch, or for what is left of it; return its row of numbers.

        Args:
            show: say what was compiled.
            saves: when to save within the epoch.
            save: does it.

        Raises:
            Interrupted: a signal has asked the run to end.
        """
        ranks, epoch = self.ranks, self.epoch
        # all that is random in an epoch follows from the seed, its number and the rank: a resumed run draws the same
        torch.manual_seed(mix(self.config.seed, epoch, ranks.rank))
        self.objective.start_epoch(mix(self.config.seed, epoch, ranks.rank, 1))
        train_mode(self.model)
        self.groups = self._plan(epoch)
        if self.midway is not None and self.midway.epoch != epoch:  # of an epoch that nobody saved
            self.midway = None
        part = self.midway = self.midway or Midway.start(epoch, len(self.learners), ranks.device)
        sources = [batches(stream, epoch, done) for stream, done in zip(self.streams, self._done(), strict=True)]
        self._go_on()
        try:
            self._run_steps(part, sources, show, saves or Saves(lambda state: None), save or (lambda: None))
        finally:
            for source in sources:
                source.close() if hasattr(source, "close") else None
        self.seen = part.seen
        if ranks.world > 1:
            ranks.broadcast(self._own_buffers())
        self.precision.before_eval(self.model)
        self.model.eval()
        self.epoch += 1
        sums, lr = ranks.sum(part.totals).tolist(), self.learners[0].lr
        taking = {stream if self.joint else 0 for step in self.groups[: part.step] for stream, _ in step}
        for i, (learner, count) in enumerate(zip(self.learners, part.counted, strict=True)):
            if not count and i in taking:
                raise DivergedError(self._advice(learner, f"in all steps of epoch {self.epoch}"))
        row = {"epoch": float(self.epoch), "loss": sum(sums) / sum(part.counted), "lr": lr}
        if self.joint:
            for learner, loss, count in zip(self.learners, sums, part.counted, strict=True):
                row |= {f"loss {learner.name}": loss / count, f"lr {learner.name}": learner.lr}
        row |= {k: float(ranks.sum(v)) / sum(part.counted) for k, v in part.logs.items()}
        row |= self._perturbed(part)
        if part.skipped or self.precision.scaler.skips:
            row["skipped_steps"] = float(part.skipped)
        return row | {"seconds": part.seconds, "images_per_second": part.seen / part.seconds}

    def _run_steps(
        self, part: Midway, sources: Sequence[Iterator[Batch]], show: bool, saves: Saves, save: Callable[[], None]
    ) -> None:
        """Do the steps of the epoch that are left."""
        ranks, count = self.ranks, len(self.groups)
        interval = 1 if ranks.device.type == "cpu" and ranks.world == 1 and self.static is None else _INTERVAL
        total = sum(sum(sizes) for step in self.groups for _, sizes in step)
        before, begin = part.seconds, time.perf_counter()
        progress = self.callbacks.steps(part.epoch + 1, self.epochs, count, total, part.step, part.seen)
        with self.steps_of(show), progress:
            for i, step in enumerate(self.groups[part.step :], part.step):
                losses = (self._step if self.static is None else self._static_step)(sources, step, part)
                part.totals += losses
                images = sum(sum(sizes) for _, sizes in step)
                part.seen += images
                part.step = i + 1
                look = (i + 1) % interval == 0 or i + 1 == count
                seconds = before + time.perf_counter() - begin
                if look:
                    self._settle(part)
                heard = _Heard(bool(saves.signals.number), saves.late(), seconds > _SLOW * part.step)
                known = self._finite(part.totals, losses, i, heard) / images if look else None
                self._tell(i, images, known, losses)
                part.seconds = before + time.perf_counter() - begin
                interval = 1 if look and heard.slow else interval
                if self.stopped:
                    if not look:
                        self._settle(part)
                        self._finite(part.totals, losses, i, heard)
                    break
                saves.signals.check()  # alone, a process need not look
                if look and heard.signal:
                    raise Interrupted
                # of several processes, all have heard the same where they look
                if ((look or ranks.world == 1) and heard.late) or saves.at(self.step):
                    began = time.perf_counter()
                    save()
                    saves.saved()
                    begin += time.perf_counter() - began  # is no time of training

    def _done(self) -> list[int]:
        """Return how many batches of each stream are done of the epoch in progress."""
        done = [0] * len(self.streams)
        for step in self.groups[: self.midway.step if self.midway else 0]:
            for stream, sizes in step:
                done[stream] += len(sizes)
        return done

    def _go_on(self) -> None:
        """Let what draws random numbers go on where the state within this epoch was written."""
        state, self._going_on = self._going_on, {}
        if state:
            if isinstance(self.objective, Stateful):
                self.objective.load_state_dict(state["objective"])
            set_random_states(state["random"], self.ranks.device)

    def _perturbed(self, part: Midway) -> dict[str, float]:
        """Return the mean loss where a rule of two passes led, of the steps that were taken."""
        if self.step_rule.passes == 1:
            return {}
        losses, counts = self.ranks.sum(part.perturbed[0]).tolist(), part.perturbed[1].tolist()
        row = {"perturbed_loss": sum(losses) / sum(counts)} if sum(counts) else {}
        if self.joint:
            pairs = zip(self.learners, losses, counts, strict=True)
            row |= {f"perturbed_loss {learner.name}": loss / count for learner, loss, count in pairs if count}
        return row

    def _tell(self, index: int, images: int, known: float | None, losses: Tensor) -> None:
        """Tell the callbacks of a step; reading the loss from the device is left to who wants it."""
        if self.callbacks.all:
            lr, scale, control = self.learners[0].lr, self.ranks.world / images, self.callbacks.control
            self.callbacks.step(
                StepInfo(self.epoch + 1, control, self.step, index + 1, images, lr, known, scale, losses.detach())
            )
        if self.ranks.world == 1:
            self.stopped = self.callbacks.control.stop

    def _plan(self, epoch: int) -> list[Step]:
        """Return the steps of an epoch, the last of which may be cut off by the most steps of the run."""
        if self.joint:
            steps = plan_joint(self.sizes, self.config.accumulate, mix(self.config.seed, epoch))
        else:
            steps = [((stream, sizes),) for stream, sizes in plan_steps(self.sizes, self.config.accumulate)]
        return steps if self.max_steps is None else steps[: max(0, self.max_steps - epoch * self.count)]

    def _steps(self, stream: int) -> int:
        """Return the steps of the run that the learner of a stream takes part in."""
        if not self.joint:
            total = self.config.epochs * self.count
            return total if self.max_steps is None else min(total, self.max_steps)
        plans = (self.groups if self.max_steps is None else self._plan(epoch) for epoch in range(self.epochs))
        return sum(any(i == stream for i, _ in step) for steps in plans for step in steps)

    def _step(self, sources: Sequence[Iterator[Batch]], step: Step, part: Midway) -> Tensor:
        """Do one optimiser step; return this process's part of each learner's loss, summed over images."""
        feed = Feed([(i, sources[i], len(sizes)) for i, sizes in step], self._prepare, keep=self.step_rule.passes > 1)
        images = {stream: sum(sizes) for stream, sizes in step}
        gradients = Gradients(self.means, self.learners, list(images) if self.joint else [0], feed, images)
        learners, losses, told = gradients.learners, gradients.losses, gradients.told
        for learner in learners:
            learner.begin()

        def update() -> None:
            scaler = self.precision.scaler
            taken = [learner.update(scaler) for learner in learners]
            scaler.update()
            left_out = taken.count(False)
            part.skipped += left_out
            for i, learner, done in zip(images if self.joint else (0,), learners, taken, strict=True):
                count = images[i] if self.joint else sum(images.values())
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
                        self._advice(learner, f"in {PATIENCE} steps in a row, in epoch {self.epoch + 1}")
                    )
            if all(taken) or scaler.skips:
                for key, number in told.items():
                    part.logs[key] = part.logs.get(key, torch.zeros_like(number)) + number
            if left_out and scaler.factor < SMALLEST:
                raise DivergedError(
                    f"gradients are not finite in epoch {self.epoch + 1}, even with a loss that is not multiplied; use "
                    "a lower --lr, a longer --warmup, or --precision bf16"
                )

        self.step_rule.step(gradients, update)
        self.step += 1
        return losses

    def _static_step(self, sources: Sequence[Iterator[Batch]], step: Step, part: Midway) -> Tensor:
        """Do the same without a look at the device; `_settle` finds out later what came of it."""
        assert self.static is not None
        ((stream, sizes),) = step
        batches = [self._prepare(dataclasses.replace(next(sources[stream]), stream=stream)) for _ in sizes]
        losses = self.static(batches)
        for key, number in self.static.told.items():
            part.logs[key] = part.logs[key] + number if key in part.logs else number.clone()
        self.step += 1
        return losses.clone() if self.callbacks.all else losses  # a callback may read it later

    def _settle(self, part: Midway) -> None:
        """Bring what the host knows of the static steps up to date; waits for the device."""
        if self.static is None:
            return
        counts = self.static.settle()
        part.skipped += counts.skipped
        part.counted[0] += counts.images
        if counts.in_row >= PATIENCE:
            raise DivergedError(
                self._advice(self.learners[0], f"in {PATIENCE} steps in a row, in epoch {self.epoch + 1}")
            )

    def _prepare(self, batch: Batch) -> Batch:
        return self.objective.prepare(batch.to(self.ranks.device))

    def _advice(self, learner: Learner, when: str) -> str:
        whose = f"the loss of task {learner.name}" if learner.name else "the loss"
        return f"{whose} or its gradients are not finite {when} (learning rate {learner.lr:.2g}); use {self._milder}"

    @property
    def _milder(self) -> str:
        """What to change of a run that diverged; a rule with a second pass may have gone too far in the first."""
        further = "a smaller --sam or --adversarial, " if self.step_rule.passes > 1 else ""
        return f"{further}a lower --lr, a longer --warmup or a smaller --clip-grad"

    def _finite(self, totals: Tensor, losses: Tensor, index: int, heard: "_Heard") -> float:
        """Return the loss of the step over all images; all processes call this at the same steps, and hear the same."""
        flags = self.callbacks.control.stop, heard.signal, heard.late and self.ranks.main, heard.slow
        asked = [torch.full_like(totals, float(flag)) for flag in flags]
        both = self.ranks.sum(torch.stack([totals, losses, *asked])).tolist()
        stopped, heard.signal, heard.late, heard.slow = (row[0] > 0 for row in both[2:])
        self.stopped = self.stopped or stopped
        for learner, total in zip(self.learners, both[0], strict=True):
            if not math.isfinite(total):
                whose = f"the loss of task {learner.name}" if learner.name else "the loss"
                raise DivergedError(
                    f"{whose} is {total} after step {index + 1} of epoch {self.epoch + 1} (learning rate "
                    f"{learner.lr:.2g}); use {self._milder}"
                )
        return float(sum(both[1]))

"""The inside of a run: the steps of an epoch, and the state between two epochs. `vtk.training.engine.fit` drives it."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from vtk.data.loader import mix
from vtk.errors import UsageError, VtkError
from vtk.training.callbacks import Callbacks, StepInfo
from vtk.training.compiled import steps_of
from vtk.training.gradients import Gradients, Means
from vtk.training.learner import Learner, LearnerConfig
from vtk.training.loss_scale import SMALLEST
from vtk.training.objective import Batch, Objective
from vtk.training.parallel import Ranks
from vtk.training.policy import live_buffers, train_mode
from vtk.training.precision import Precision
from vtk.training.result import FitState
from vtk.training.rules import StepRule
from vtk.training.steps import Feed, Step, plan_joint, plan_steps
from vtk.training.streams import Stream

PATIENCE = 10
"""Steps in a row without finite gradients after which a run ends: skipping more would not bring it back."""
_INTERVAL = 10  # steps between two looks at the loss on a GPU, where looking waits for all work that is queued


class DivergedError(VtkError):
    """The loss became infinite or not a number."""


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
    def seed(self) -> int: ...  # noqa: D102
    @property
    def stop_after(self) -> int | None: ...  # noqa: D102


class Loop:
    """A run between its epochs; `fit` drives it."""

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
    ) -> None:
        self.model, self.objective, self.streams, self.config = model, objective, streams, config
        self.precision, self.step_rule, self.ranks, self.joint = precision, step_rule, ranks, learners is not None
        self.callbacks = callbacks or Callbacks()
        self.sizes = [stream.sizes for stream in streams]
        self.groups = self._plan(0)
        self.images = sum(map(sum, self.sizes))
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not trained or not self.groups:
            raise UsageError("there is nothing to train: no parameter requires gradients, or no stream has a batch")
        model.to(ranks.device)
        precision.prepare(model, trained)
        if learners is None:
            self.learners = [Learner("", model, config, config.epochs * len(self.groups))]
        else:
            counts = [sum(any(i == stream for i, _ in step) for step in self.groups) for stream in range(len(streams))]
            self.learners = [
                Learner(name, part, config, config.epochs * count)
                for (name, part), count in zip(learners.items(), counts, strict=True)
            ]
        # gradients of several learners are summed here: which of them have any changes from step to step
        self.wrapped = model if self.joint else ranks.wrap(model)
        self.steps_of = steps_of(model, self.sizes, compile=config.compile, checkpointing=config.grad_checkpointing)
        self.means = Means(model, self.wrapped, objective, precision, ranks, self.joint)
        self.epoch = self.step = self.skipped = self.seen = 0
        self.stopped = False  # whether a callback ended the run
        self.counted = [0] * len(self.learners)  # images of the steps of this epoch that were taken
        # losses of a rule's second pass, times images, and those images
        self.perturbed = torch.zeros(2, len(self.learners), device=ranks.device)

    def load(self, state: FitState) -> None:
        """Go on from ``state``."""
        for learner in self.learners:
            optimizer, schedule = state.optimizer, state.schedule
            parts = (optimizer, schedule, state.ema)
            learner.load(*(part[learner.name] if self.joint and part else part for part in parts))
        self.precision.scaler.load_state_dict(state.scaler)
        self.epoch, self.step = state.epoch, state.epoch * len(self.groups)

    def save(self, rows: list[dict[str, float]]) -> FitState:
        """Return the state after the epochs done, whose numbers are ``rows``."""
        optimizers = {learner.name: learner.optimizer.state_dict() for learner in self.learners}
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

    def run_epoch(self, show: bool) -> dict[str, float]:
        """Train for one epoch; return its row of numbers."""
        ranks, epoch = self.ranks, self.epoch
        # all that is random in an epoch follows from the seed, its number and the rank: a resumed run draws the same
        torch.manual_seed(mix(self.config.seed, epoch, ranks.rank))
        self.objective.start_epoch(mix(self.config.seed, epoch, ranks.rank, 1))
        train_mode(self.model)
        self.groups, self.skipped, self.counted = self._plan(epoch), 0, [0] * len(self.learners)
        self.perturbed.zero_()
        sources = [stream.epoch(epoch) for stream in self.streams]
        totals = torch.zeros(len(self.learners), device=ranks.device)  # losses, times images
        logs: dict[str, Tensor] = {}
        interval = 1 if ranks.device.type == "cpu" and ranks.world == 1 else _INTERVAL
        self.seen, count = 0, len(self.groups)
        begin = time.perf_counter()
        with self.steps_of(show), self.callbacks.steps(epoch + 1, self.config.epochs, count, self.images):
            for i, step in enumerate(self.groups):
                losses = self._step(sources, step, logs)
                totals += losses
                images = sum(sum(sizes) for _, sizes in step)
                self.seen += images
                look = (i + 1) % interval == 0 or i + 1 == count
                known = self._finite(totals, losses, i) / images if look else None
                self._tell(i, images, known, losses)
                if self.stopped:
                    if not look:
                        self._finite(totals, losses, i)
                    break
        for source in sources:
            source.close() if hasattr(source, "close") else None
        seconds = time.perf_counter() - begin
        if ranks.world > 1:
            live = live_buffers(self.model)
            averages = [t for own in self.learners if own.ema is not None for t in own.ema.buffers()]
            ranks.broadcast([b for n, b in self.model.named_buffers() if n in live] + averages)
        self.precision.before_eval(self.model)
        self.model.eval()
        self.epoch += 1
        sums, lr = ranks.sum(totals).tolist(), self.learners[0].lr
        for learner, count in zip(self.learners, self.counted, strict=True):
            if not count:
                raise DivergedError(self._advice(learner, f"in all steps of epoch {self.epoch}"))
        row = {"epoch": float(self.epoch), "loss": sum(sums) / sum(self.counted), "lr": lr}
        if self.joint:
            for learner, loss, count in zip(self.learners, sums, self.counted, strict=True):
                row |= {f"loss {learner.name}": loss / count, f"lr {learner.name}": learner.lr}
        row |= {k: float(ranks.sum(v)) / sum(self.counted) for k, v in logs.items()}
        row |= self._perturbed()
        if self.skipped or self.precision.scaler.skips:
            row["skipped_steps"] = float(self.skipped)
        return row | {"seconds": seconds, "images_per_second": self.seen / seconds}

    def _perturbed(self) -> dict[str, float]:
        """Return the mean loss where a rule of two passes led, of the steps that were taken."""
        if self.step_rule.passes == 1:
            return {}
        losses, counts = self.ranks.sum(self.perturbed[0]).tolist(), self.perturbed[1].tolist()
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
            self.stopped = self.callbacks.control.asked

    def _plan(self, epoch: int) -> list[Step]:
        if self.joint:
            return plan_joint(self.sizes, self.config.accumulate, mix(self.config.seed, epoch))
        return [((stream, sizes),) for stream, sizes in plan_steps(self.sizes, self.config.accumulate)]

    def _step(self, sources: Sequence[Iterator[Batch]], step: Step, logs: dict[str, Tensor]) -> Tensor:
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
            self.skipped += left_out
            for i, learner, done in zip(images if self.joint else (0,), learners, taken, strict=True):
                count = images[i] if self.joint else sum(images.values())
                # a loss that is not finite is no part of the epoch's; a scaler's overflow says nothing of the loss
                if done or scaler.skips:
                    self.counted[i] += count
                else:
                    losses[i] = 0.0
                if done:  # without them, the loss where the rule led says nothing
                    self.perturbed[0][i] += gradients.again[i]
                    self.perturbed[1][i] += count
                if learner.in_row >= PATIENCE and not scaler.skips:
                    raise DivergedError(
                        self._advice(learner, f"in {PATIENCE} steps in a row, in epoch {self.epoch + 1}")
                    )
            if all(taken) or scaler.skips:
                for key, number in told.items():
                    logs[key] = logs.get(key, torch.zeros_like(number)) + number
            if left_out and scaler.factor < SMALLEST:
                raise DivergedError(
                    f"gradients are not finite in epoch {self.epoch + 1}, even with a loss that is not multiplied; use "
                    "a lower --lr, a longer --warmup, or --precision bf16"
                )

        self.step_rule.step(gradients, update)
        self.step += 1
        return losses

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

    def _finite(self, totals: Tensor, losses: Tensor, index: int) -> float:
        """Return the loss of the step over all images; all processes call this at the same steps."""
        asked = torch.full_like(totals, float(self.callbacks.control.asked))
        both = self.ranks.sum(torch.stack([totals, losses, asked])).tolist()
        self.stopped = self.stopped or both[2][0] > 0
        for learner, total in zip(self.learners, both[0], strict=True):
            if not math.isfinite(total):
                whose = f"the loss of task {learner.name}" if learner.name else "the loss"
                raise DivergedError(
                    f"{whose} is {total} after step {index + 1} of epoch {self.epoch + 1} (learning rate "
                    f"{learner.lr:.2g}); use {self._milder}"
                )
        return float(sum(both[1]))

"""The one training loop. New kinds of training are an objective, a stream or a step rule, never a second loop.

Several tasks that share frozen weights are several learners in one loop: each has its parameters, optimiser, clipping
and learning rate, and a step updates those whose images it holds.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from vtk import console
from vtk.data.loader import mix
from vtk.errors import UsageError, VtkError
from vtk.training.learner import Learner
from vtk.training.loss_scale import SMALLEST
from vtk.training.objective import Batch, JointObjective, Objective
from vtk.training.optim import OptimConfig
from vtk.training.parallel import Ranks
from vtk.training.policy import live_buffers, train_mode
from vtk.training.precision import Precision
from vtk.training.result import EpochEnd, FitResult, FitState
from vtk.training.steps import Feed, PlainStep, Step, StepRule, plan_joint, plan_steps
from vtk.training.streams import Stream

_INTERVAL = 10  # steps between two looks at the loss on a GPU, where looking waits for all work that is queued


class DivergedError(VtkError):
    """The loss became infinite or not a number."""


class FitConfig(OptimConfig, Protocol):
    """What the engine reads of a config."""

    @property
    def epochs(self) -> int: ...  # noqa: D102
    @property
    def accumulate(self) -> int: ...  # noqa: D102
    @property
    def clip_grad(self) -> float: ...  # noqa: D102
    @property
    def grad_checkpointing(self) -> bool: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def stop_after(self) -> int | None: ...  # noqa: D102


def fit(
    model: nn.Module,
    objective: Objective,
    streams: Sequence[Stream],
    config: FitConfig,
    precision: Precision,
    *,
    step_rule: StepRule | None = None,
    ranks: Ranks | None = None,
    start: FitState | None = None,
    on_epoch: Callable[[EpochEnd], Mapping[str, float]] | None = None,
    show_progress: bool = True,
    learners: Mapping[str, nn.Module] | None = None,
) -> FitResult:
    """Train the parameters of ``model`` that require gradients.

    Args:
        model: fp32; it is moved to the device and prepared for ``precision`` in place.
        objective: what to minimise.
        streams: sources of batches; each optimiser step takes ``accumulate`` batches of one stream, and streams take
            turns in proportion to their length.
        config: epochs, learning rate and the like.
        precision: number formats.
        step_rule: by default `PlainStep`.
        ranks: this process and its device, by default alone on the CPU.
        start: state to go on from; the model's tensors must already be those of that state.
        on_epoch: called after each epoch with the model in eval mode; returns numbers to add to the epoch's row.
        show_progress: draw a bar.
        learners: parts of ``model``, one for each stream, by name: each learns from its own stream only, and a step
            holds images of several. By default the whole model learns from all streams, one at a time.

    Raises:
        UsageError: nothing is trainable, no stream has a batch, or the model cannot checkpoint its gradients.
        DivergedError: the loss is not finite.
    """
    ranks = ranks or Ranks(torch.device("cpu"))
    loop = Loop(model, objective, streams, config, precision, step_rule or PlainStep(), ranks, learners)
    result = FitResult()
    if start is not None:
        loop.load(start)
        result.rows = [dict(row) for row in start.rows]
    last = config.epochs if config.stop_after is None else min(config.epochs, loop.epoch + config.stop_after)
    while loop.epoch < last:
        row = loop.run_epoch(show_progress and ranks.main)
        result.rows.append(row)
        result.images += loop.images
        result.seconds += row["seconds"]

        def state(extra: Mapping[str, float]) -> FitState:
            return loop.save([*result.rows[:-1], {**result.rows[-1], **extra}])

        if on_epoch is not None:
            row.update(on_epoch(EpochEnd(loop.epoch, row, state)))
    result.steps = loop.step
    return result


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
    ) -> None:
        self.model, self.objective, self.streams, self.config = model, objective, streams, config
        self.precision, self.step_rule, self.ranks, self.joint = precision, step_rule, ranks, learners is not None
        self.sizes = [stream.sizes for stream in streams]
        self.groups = self._plan(0)
        self.images = sum(map(sum, self.sizes))
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not trained or not self.groups:
            raise UsageError("there is nothing to train: no parameter requires gradients, or no stream has a batch")
        model.to(ranks.device)
        precision.prepare(model, trained)
        if config.grad_checkpointing:
            _checkpoint_gradients(model)
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
        self.epoch = self.step = self.skipped = 0

    def load(self, state: FitState) -> None:
        """Go on from ``state``."""
        for learner in self.learners:
            optimizer, schedule = state.optimizer, state.schedule
            learner.load(*((optimizer[learner.name], schedule[learner.name]) if self.joint else (optimizer, schedule)))
        self.precision.scaler.load_state_dict(state.scaler)
        self.epoch, self.step = state.epoch, state.epoch * len(self.groups)

    def save(self, rows: list[dict[str, float]]) -> FitState:
        """Return the state after the epochs done, whose numbers are ``rows``."""
        optimizers = {learner.name: learner.optimizer.state_dict() for learner in self.learners}
        schedules = {learner.name: learner.schedule.state_dict() for learner in self.learners}
        scaler = self.precision.scaler.state_dict()
        if not self.joint:
            return FitState(self.epoch, optimizers[""], schedules[""], rows, scaler)
        return FitState(self.epoch, optimizers, schedules, rows, scaler)

    def run_epoch(self, show: bool) -> dict[str, float]:
        """Train for one epoch; return its row of numbers."""
        ranks, epoch = self.ranks, self.epoch
        # all that is random in an epoch follows from the seed, its number and the rank: a resumed run draws the same
        torch.manual_seed(mix(self.config.seed, epoch, ranks.rank))
        self.objective.start_epoch(mix(self.config.seed, epoch, ranks.rank, 1))
        train_mode(self.model)
        self.groups, self.skipped = self._plan(epoch), 0
        sources = [stream.epoch(epoch) for stream in self.streams]
        totals = torch.zeros(len(self.learners), device=ranks.device)  # losses, times images
        logs: dict[str, Tensor] = {}
        interval = 1 if ranks.device.type == "cpu" and ranks.world == 1 else _INTERVAL
        title = f"epoch {epoch + 1}/{self.config.epochs}"
        begin = time.perf_counter()
        with console.progress(title, self.images, enabled=show) as bar:
            for i, step in enumerate(self.groups):
                losses = self._step(sources, step, logs)
                totals += losses
                images = sum(sum(sizes) for _, sizes in step)
                look = (i + 1) % interval == 0 or i + 1 == len(self.groups)
                note = f"loss {self._finite(totals, losses, i) / images:.3f}" if look else ""
                bar.advance(images, note)
        for source in sources:
            source.close() if hasattr(source, "close") else None
        seconds = time.perf_counter() - begin
        if ranks.world > 1:
            live = live_buffers(self.model)
            ranks.broadcast([b for n, b in self.model.named_buffers() if n in live])
        self.precision.before_eval(self.model)
        self.model.eval()
        self.epoch += 1
        sums, lr = ranks.sum(totals).tolist(), self.learners[0].lr
        row = {"epoch": float(self.epoch), "loss": sum(sums) / self.images, "lr": lr}
        if self.joint:
            for learner, loss, sizes in zip(self.learners, sums, self.sizes, strict=True):
                row |= {f"loss {learner.name}": loss / sum(sizes), f"lr {learner.name}": learner.lr}
        row |= {k: float(ranks.sum(v)) / self.images for k, v in logs.items()}
        if self.precision.scaler.skips:
            row["skipped_steps"] = float(self.skipped)
        return row | {"seconds": seconds, "images_per_second": self.images / seconds}

    def _plan(self, epoch: int) -> list[Step]:
        if self.joint:
            return plan_joint(self.sizes, self.config.accumulate, mix(self.config.seed, epoch))
        return [((stream, sizes),) for stream, sizes in plan_steps(self.sizes, self.config.accumulate)]

    def _step(self, sources: Sequence[Iterator[Batch]], step: Step, logs: dict[str, Tensor]) -> Tensor:
        """Do one optimiser step; return this process's part of each learner's loss, summed over images."""
        feed = Feed([(i, sources[i], len(sizes)) for i, sizes in step], self._prepare, keep=self.step_rule.passes > 1)
        images = {stream: sum(sizes) for stream, sizes in step}
        learners = [self.learners[i] for i in images] if self.joint else self.learners
        # DDP averages over processes what is a sum over their images, hence the factor `world`
        factor = 1 if self.joint else self.ranks.world
        losses = torch.zeros(len(self.learners), device=self.ranks.device)
        first = True

        def gradients() -> Tensor:
            nonlocal first
            for learner in learners:
                learner.optimizer.zero_grad(set_to_none=True)
            losses.zero_()
            for batches, last in feed:
                with contextlib.nullcontext() if last else self.ranks.no_sync(self.wrapped):
                    parts = []
                    for batch, (loss, numbers) in zip(batches, self._losses(batches), strict=True):
                        # every image of the step weighs the same, also in a last batch or group that is not full
                        share = len(batch.images) / images[batch.stream]
                        parts.append(loss * (share * factor))
                        losses[batch.stream if self.joint else 0] += loss.detach() * len(batch.images)
                        if first:
                            self._note(logs, numbers, len(batch.images))
                    self.precision.scaler.scale(torch.stack(parts).sum()).backward()
            first = False
            if self.joint:
                self.ranks.add([p.grad for learner in learners for p in learner.parameters if p.grad is not None])
            for learner in learners:
                self.precision.after_backward(learner.optimizer)
            return losses.sum() / sum(images.values())

        def update() -> None:
            scaler = self.precision.scaler
            left_out = sum(not learner.update(scaler) for learner in learners)
            scaler.update()
            self.skipped += left_out
            if left_out and scaler.factor < SMALLEST:
                raise DivergedError(
                    f"gradients are not finite in epoch {self.epoch + 1}, even with a loss that is not multiplied; use "
                    "a lower --lr, a longer --warmup, or --precision bf16"
                )

        self.step_rule.step(gradients, update)
        self.step += 1
        return losses

    def _losses(self, batches: Sequence[Batch]) -> Sequence[tuple[Tensor, Mapping[str, Tensor | float]]]:
        if isinstance(self.objective, JointObjective):
            return self.objective.losses(self.wrapped, batches)
        return [self.objective.loss(self.wrapped, batch) for batch in batches]

    def _note(self, logs: dict[str, Tensor], numbers: Mapping[str, Tensor | float], images: int) -> None:
        for key, value in numbers.items():
            number = torch.as_tensor(value, dtype=torch.float32, device=self.ranks.device).detach()
            logs[key] = logs.get(key, torch.zeros_like(number)) + number * images

    def _prepare(self, batch: Batch) -> Batch:
        return self.objective.prepare(batch.to(self.ranks.device))

    def _finite(self, totals: Tensor, losses: Tensor, index: int) -> float:
        """Return the loss of the step over all images; all processes call this at the same steps."""
        both = self.ranks.sum(torch.stack([totals, losses])).tolist()
        for learner, total in zip(self.learners, both[0], strict=True):
            if not math.isfinite(total):
                whose = f"the loss of task {learner.name}" if learner.name else "the loss"
                raise DivergedError(
                    f"{whose} is {total} after step {index + 1} of epoch {self.epoch + 1} (learning rate "
                    f"{learner.lr:.2g}); use a lower --lr, a longer --warmup or a smaller --clip-grad"
                )
        return float(sum(both[1]))


def _checkpoint_gradients(model: nn.Module) -> None:
    from timm.layers import set_reentrant_ckpt

    switch = getattr(model, "set_grad_checkpointing", None)
    if switch is None:
        raise UsageError(f"{type(model).__name__} cannot recompute blocks; leave out --grad-checkpointing")
    # the reentrant kind drops the first block's gradients when its input needs none (frozen patch embedding)
    set_reentrant_ckpt(False)
    try:
        switch(True)
    except AssertionError as error:
        raise UsageError(f"{type(model).__name__} cannot recompute blocks; leave out --grad-checkpointing") from error

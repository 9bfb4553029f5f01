"""The one training loop. New kinds of training are an objective, a stream or a step rule, never a second loop."""

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
from vtk.training.objective import Batch, Objective
from vtk.training.optim import OptimConfig, make_optimizer, make_schedule
from vtk.training.parallel import Ranks
from vtk.training.policy import live_buffers, train_mode
from vtk.training.precision import Precision
from vtk.training.result import EpochEnd, FitResult, FitState
from vtk.training.steps import Feed, PlainStep, StepRule, plan_steps
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

    Raises:
        UsageError: nothing is trainable, no stream has a batch, or the model cannot checkpoint its gradients.
        DivergedError: the loss is not finite.
    """
    ranks = ranks or Ranks(torch.device("cpu"))
    loop = Loop(model, objective, streams, config, precision, step_rule or PlainStep(), ranks)
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
    ) -> None:
        self.model, self.objective, self.streams, self.config = model, objective, streams, config
        self.precision, self.step_rule, self.ranks = precision, step_rule, ranks
        self.groups = plan_steps([stream.sizes for stream in streams], config.accumulate)
        self.images = sum(sum(sizes) for _, sizes in self.groups)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not trained or not self.groups:
            raise UsageError("there is nothing to train: no parameter requires gradients, or no stream has a batch")
        model.to(ranks.device)
        precision.prepare(model, trained)
        if config.grad_checkpointing:
            _checkpoint_gradients(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(model, config)
        self.schedule = make_schedule(self.optimizer, config, config.epochs * len(self.groups))
        self.wrapped = ranks.wrap(model)
        self.epoch = self.step = 0

    def load(self, state: FitState) -> None:
        """Go on from ``state``."""
        self.optimizer.load_state_dict(state.optimizer)
        self.schedule.load_state_dict(state.schedule)
        self.epoch, self.step = state.epoch, state.epoch * len(self.groups)

    def save(self, rows: list[dict[str, float]]) -> FitState:
        """Return the state after the epochs done, whose numbers are ``rows``."""
        return FitState(self.epoch, self.optimizer.state_dict(), self.schedule.state_dict(), rows)

    def run_epoch(self, show: bool) -> dict[str, float]:
        """Train for one epoch; return its row of numbers."""
        ranks, epoch = self.ranks, self.epoch
        # all that is random in an epoch follows from the seed, its number and the rank: a resumed run draws the same
        torch.manual_seed(mix(self.config.seed, epoch, ranks.rank))
        self.objective.start_epoch(mix(self.config.seed, epoch, ranks.rank, 1))
        train_mode(self.model)
        sources = [stream.epoch(epoch) for stream in self.streams]
        total = torch.zeros((), device=ranks.device)
        logs: dict[str, Tensor] = {}
        interval = 1 if ranks.device.type == "cpu" and ranks.world == 1 else _INTERVAL
        title = f"epoch {epoch + 1}/{self.config.epochs}"
        begin = time.perf_counter()
        with console.progress(title, self.images, enabled=show) as bar:
            for i, (stream, sizes) in enumerate(self.groups):
                loss, lr = self._step(sources[stream], sizes, logs)
                total += loss * sum(sizes)
                look = (i + 1) % interval == 0 or i + 1 == len(self.groups)
                note = f"loss {self._finite(total, loss, i, lr):.3f}" if look else ""
                bar.advance(sum(sizes), note)
        for source in sources:
            source.close() if hasattr(source, "close") else None
        seconds = time.perf_counter() - begin
        if ranks.world > 1:
            live = live_buffers(self.model)
            ranks.broadcast([b for n, b in self.model.named_buffers() if n in live])
        self.precision.before_eval(self.model)
        self.model.eval()
        self.epoch += 1
        row = {"epoch": float(self.epoch), "loss": float(ranks.sum(total)) / self.images, "lr": lr}
        row |= {k: float(ranks.sum(v)) / self.images for k, v in logs.items()}
        return row | {"seconds": seconds, "images_per_second": self.images / seconds}

    def _step(self, source: Iterator[Batch], sizes: list[int], logs: dict[str, Tensor]) -> tuple[Tensor, float]:
        """Do one optimiser step; return this process's part of the mean loss, and the learning rate used."""
        feed = Feed(source, len(sizes), self._prepare, keep=self.step_rule.passes > 1)
        first = True

        def gradients() -> Tensor:
            nonlocal first
            self.optimizer.zero_grad(set_to_none=True)
            loss_sum = torch.zeros((), device=self.ranks.device)
            for i, batch in enumerate(feed):
                last = i + 1 == len(sizes)
                with contextlib.nullcontext() if last else self.ranks.no_sync(self.wrapped):
                    loss, numbers = self.objective.loss(self.wrapped, batch)
                    # every image of the step weighs the same, also in a last batch or group that is not full
                    share = len(batch.images) / sum(sizes)
                    # DDP averages over processes what is a sum over their images, hence the factor `world`
                    (loss * (share * self.ranks.world)).backward()
                loss_sum += loss.detach() * share
                if first:
                    for key, value in numbers.items():
                        number = torch.as_tensor(value, dtype=torch.float32, device=self.ranks.device).detach()
                        logs[key] = logs.get(key, torch.zeros_like(number)) + number * len(batch.images)
            first = False
            self.precision.after_backward(self.optimizer)
            return loss_sum

        group = self.optimizer.param_groups[0]
        lr = self.config.lr * float(group["lr"]) / float(group["initial_lr"])  # without the head's factor
        loss = self.step_rule.step(gradients, self._update)
        self.step += 1
        return loss, lr

    def _prepare(self, batch: Batch) -> Batch:
        return self.objective.prepare(batch.to(self.ranks.device))

    def _update(self) -> None:
        if self.config.clip_grad:
            torch.nn.utils.clip_grad_norm_(self.trained, self.config.clip_grad)
        self.optimizer.step()
        self.schedule.step()

    def _finite(self, total: Tensor, loss: Tensor, index: int, lr: float) -> float:
        """Return the loss of the step over all processes; all processes call this at the same steps."""
        both = self.ranks.sum(torch.stack([total, loss])).tolist()
        if not math.isfinite(both[0]):
            raise DivergedError(
                f"the loss is {both[0]} after step {index + 1} of epoch {self.epoch + 1} (learning rate {lr:.2g}); "
                "use a lower --lr, a longer --warmup or a smaller --clip-grad"
            )
        return float(both[1])


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

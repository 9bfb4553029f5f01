"""The one training loop. New kinds of training are an objective, a stream or a step rule, never a second loop.

Several tasks that share frozen weights are several learners in one loop: each has its parameters, optimizer, clipping
and learning rate, and a step updates those whose images it holds.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from vtk import console
from vtk.errors import UsageError
from vtk.training.engine.callback_list import Callbacks
from vtk.training.engine.learner import FitConfig
from vtk.training.engine.loop import Loop
from vtk.training.engine.precision import Precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.progress import ProgressBar
from vtk.training.engine.result import EpochEnd, FitResult, FitState
from vtk.training.engine.save_schedule import Interrupted, Saves
from vtk.training.engine.step_rule import PlainStep, StepRule
from vtk.training.engine.stepper import DivergedError
from vtk.training.engine.streams import Stream
from vtk.training.objectives.base import Objective

__all__ = ["DivergedError", "FitConfig", "Loop", "fit"]


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
    enough: Callable[[], bool] | None = None,
    callbacks: Callbacks | None = None,
    max_steps: int | None = None,
    saves: Saves | None = None,
) -> FitResult:
    """Train the parameters of ``model`` that require gradients.

    Args:
        model: fp32; it is moved to the device and prepared for ``precision`` in place.
        objective: what to minimise.
        streams: sources of batches; each optimizer step takes ``accumulate`` batches of one stream, and streams take
            turns in proportion to their length.
        config: epochs, learning rate and the like.
        precision: number formats.
        step_rule: by default `PlainStep`.
        ranks: this process and its device, by default alone on the CPU.
        start: state to continue from; the model's tensors must already be those of that state.
        on_epoch: called after each epoch with the model in eval mode; returns numbers to add to the epoch's row.
            With ``config.ema`` the model holds the averaged weights inside of its ``averaged()``, and after the run.
        show_progress: draw a bar.
        learners: parts of ``model``, one for each stream, by name: each learns from its own stream only, and a step
            holds images of several. By default the whole model learns from all streams, one at a time.
        enough: called before each epoch; true ends the run. All processes must return the same.
        callbacks: called after every step; their calls after epochs and files are of the caller. They may stop the run.
        max_steps: optimizer steps of the whole run, if its epochs have more; the learning rate falls within them.
        saves: when and how to save within an epoch, and the signals that end the run; by default neither.

    Returns:
        The numbers of the epochs. Where a signal ended the run, ``saves.write`` was given its state.

    Raises:
        UsageError: nothing is trainable, no stream has a batch, or the model cannot checkpoint its gradients.
        DivergedError: the loss is not finite.
    """
    ranks = ranks or Ranks(torch.device("cpu"))
    if config.grad_checkpointing:
        _checkpoint_gradients(model)
    callbacks = callbacks or Callbacks()
    bars = (ProgressBar(),) if show_progress and ranks.main else ()
    rule = step_rule or PlainStep()
    with_bar = callbacks.beside(*bars)
    loop = Loop(model, objective, streams, config, precision, rule, ranks, learners, with_bar, max_steps=max_steps)
    result = FitResult()
    if start is not None:
        loop.load(start)
        if ranks.main:
            within = f"step {start.step} of epoch {start.epoch + 1}" if start.step else f"epoch {start.epoch}"
            console.say(f"continues after {within}")
        result.rows = [dict(row) for row in start.rows]
    saves = saves or Saves(lambda state: None)
    last = loop.epochs if config.stop_after is None else min(loop.epochs, loop.epoch + config.stop_after)

    def save() -> None:
        assert loop.midway is not None
        saves.write(loop.save_midway(result.rows[: loop.midway.epoch]))

    def state(extra: Mapping[str, float]) -> FitState:
        return loop.save([*result.rows[:-1], {**result.rows[-1], **extra}])

    try:
        # what was begun of an epoch is finished, whatever there is enough of
        while loop.epoch < last and not loop.stopped and (loop.midway or enough is None or not enough()):
            row = loop.run_epoch(show_progress and ranks.main, saves, save)
            result.rows.append(row)
            result.images += loop.seen
            result.seconds += row["seconds"]
            if on_epoch is not None:
                row.update(on_epoch(EpochEnd(loop.epoch, row, state, loop.averaged)))
            loop.midway = None
            saves.saved()
            loop.stopped = loop.stopped or callbacks.stopped(ranks)
            if loop.epoch < last and not loop.stopped and saves.signals.agreed(ranks):
                raise Interrupted
    except Interrupted:
        if loop.midway is not None:
            save()
        result.signal = max(ranks.gather(saves.signals.number))
        result.epoch, result.step = (loop.midway.epoch, loop.midway.step) if loop.midway else (loop.epoch, 0)
        return result
    loop.end()
    result.steps, result.stopped, result.epoch = loop.step, loop.stopped, loop.epoch
    return result


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

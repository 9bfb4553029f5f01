"""``pretrain``: trains the backbone of a model on a folder of images; a stopped run can be resumed."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from vtk import console
from vtk.data.loading.loader import make_loader
from vtk.data.sources.layout import refuse_inside
from vtk.errors import UsageError
from vtk.options import expect
from vtk.training.engine.callback_list import Callbacks, main_callbacks
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.fitting import DivergedError, fit
from vtk.training.engine.precision import Fp32
from vtk.training.engine.processes import Ranks, open_ranks
from vtk.training.engine.progress import EpochLines
from vtk.training.engine.result import EpochEnd, FitState
from vtk.training.engine.save_schedule import Saves, StopSignals, refuse_stopped
from vtk.training.objectives.base import Objective
from vtk.training.options.running import parse_interval
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.feature_probe import METRICS, describe_scores
from vtk.training.pretrain.held_out_loss import HeldOut
from vtk.training.pretrain.prepare import Inputs, Plan, make_plan, make_trainee, read_inputs
from vtk.training.pretrain.records import Records
from vtk.training.pretrain.result import PretrainResult
from vtk.training.pretrain.seeds import number_images
from vtk.training.runs import outputs as run_outputs
from vtk.training.runs import resume_state
from vtk.training.runs.command_line import command_line, config_values
from vtk.training.runs.identity import check_identity
from vtk.training.runs.image_list import describe_change
from vtk.training.runs.tracking import open_trackers


def pretrain(config: PretrainConfig, *, callbacks: Sequence[Callback] = ()) -> PretrainResult:
    """Pre-train a timm model on a folder of images, and write its backbone, metrics and plots to ``config.out``.

    Args:
        config: of the run.
        callbacks: called at every step, epoch and file (`vtk.Callback`); not for those of BEiT's tokenizer.

    Raises:
        UsageError: flags that are wrong, contradict each other or, on resume, differ from the run's.
        DataError: the folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not available.
        DivergedError: the loss became infinite or NaN; the backbone of the epoch before is kept.
    """
    expect(config, PretrainConfig, "pretrain")
    if config.data is None:
        raise UsageError("no data: give a folder of images")
    out = config.out or Path("runs") / f"{config.data.resolve().name}-{config.method}"
    config, ranks = config.resolved(), open_ranks(config.device)
    handlers = main_callbacks(callbacks, ranks)
    command = command_line(cast(Any, config))
    with run_outputs.hold_run([out], command, main=ranks.main):
        try:
            records, saved = _prepare(config, out, ranks)
            if ranks.main:
                trackers = open_trackers(
                    config.track, out, command, records.rows, values=config_values(cast(Any, config))
                )  # fmt: skip
                handlers = handlers.beside(*trackers, EpochLines("", records.inputs.epochs))
            return _train(records, saved, handlers)
        finally:
            handlers.end()


def _prepare(config: PretrainConfig, out: Path, ranks: Ranks) -> tuple[Records, resume_state.Saved | None]:
    """Prepare a run and write its first files; also return the state of the run that is resumed."""
    plan = make_plan(config, ranks)
    saved = resume_state.load_state(out / run_outputs.LAST) if config.resume else None
    if config.data is not None:
        refuse_inside(out, config.data)
    if ranks.main:
        run_outputs.check_run(out, overwrite=config.overwrite, resume=config.resume)
    inputs = read_inputs(plan, saved)
    trainee = make_trainee(plan, inputs, out)
    records = Records(plan, inputs, trainee, list(saved.fit.rows) if saved else [])
    if saved is not None:
        check_identity(
            saved.identity,
            records.identity,
            cast(Any, PretrainConfig),
            change=lambda: describe_change(out, inputs.audit),
        )
        resume_state.restore(trainee.model, saved.tensors, trainee.trained)
    if ranks.main:
        records.start()
    return records, saved


def _train(records: Records, saved: resume_state.Saved | None, callbacks: Callbacks) -> PretrainResult:
    plan, inputs, trainee, out = records.plan, records.inputs, records.trainee, records.out
    config, ranks = plan.config, plan.ranks
    ranks.wait()
    objective = plan.method.objective(trainee.setting)  # BEiT writes its tokenizer here
    if inputs.probe is not None and saved is None:
        before = inputs.probe.score(trainee.model.to(ranks.device).eval(), Fp32())
        if ranks.main:
            console.say(f"{inputs.probe}; before training {describe_scores(before)}")
    epochs = Epochs(records, _held_out(plan, inputs, objective), callbacks)
    with StopSignals().listen(ranks) as signals:
        result = fit(
            trainee.model, objective, [inputs.stream], config, plan.precision, ranks=ranks,
            step_rule=trainee.rule or plan.method.step_rule(trainee.model),
            start=saved.fit if saved else None, on_epoch=epochs.end, callbacks=callbacks,
            max_steps=config.max_steps, saves=Saves(epochs.save, parse_interval(config.save_every), signals),
        )  # fmt: skip
        refuse_stopped(result, out / run_outputs.LAST, ranks)
    if ranks.main:
        _finish(records)
    ranks.wait()
    tokenizer = out / run_outputs.TOKENIZER
    return PretrainResult(
        out, out / run_outputs.BACKBONE, config.method, records.rows, plan.method.numbers(), result.images_per_second,
        plan.precision.name, tokenizer if tokenizer.is_file() else None, config.trial, config.train_share,
    )  # fmt: skip


def _held_out(plan: Plan, inputs: Inputs, objective: Objective) -> HeldOut:
    config, labelled, val = plan.config, plan.method.labelled, inputs.audit.val
    loader = make_loader(
        val if labelled else number_images(val), inputs.views[1],
        # contrasts are between the images of a batch, which in order would be of one class
        batch_size=config.eval_batch_size, shuffle=labelled, seed=config.seed, workers=inputs.workers,
        max_pixels=config.max_pixels,
    )  # fmt: skip
    return HeldOut(loader, objective, plan.ranks, seed=None if labelled else config.seed)


class Epochs:
    """Scores and saves a run, at the end of each epoch and between.

    Args:
        records: of the run.
        held_out: the loss on held-out images.
        callbacks: of the run.
    """

    def __init__(self, records: Records, held_out: HeldOut, callbacks: Callbacks) -> None:
        self.records, self.held_out, self.callbacks = records, held_out, callbacks
        self.plan, self.out = records.plan, records.out

    def end(self, end: EpochEnd) -> Mapping[str, float]:
        """Score the epoch, write its backbone, and what a resume needs."""
        model, main = self.records.trainee.model, self.plan.ranks.main
        with end.averaged():
            scores = self.held_out.score(model)
            self.plan.precision.before_eval(model)
            probe = self.records.inputs.probe
            probed = {} if probe is None else probe.score(model, self.plan.precision)
            numbers = {f"val_{name}": value for name, value in scores.items()}
            if not math.isfinite(numbers["val_loss"]):
                raise DivergedError(
                    f"the held-out loss is {numbers['val_loss']} after epoch {end.epoch}; use a lower --lr or a longer "
                    "--warmup"
                )
            numbers |= probed | {key: float(value) for key, value in self.plan.config.trial.items()}
            self.records.rows.append({**end.row, **numbers})
            if main:
                self.records.save_backbone()
                self.callbacks.save("backbone", self.out / run_outputs.BACKBONE, end.epoch)
        if main:
            others = "".join(f", {name} {value:.3f}" for name, value in scores.items() if name != "loss")
            others += f", {describe_scores(probed)}" if probed else ""
            summary = (
                f"loss {end.row['loss']:.4f}, held-out {numbers['val_loss']:.4f}{others}, "
                f"{end.row['images_per_second']:,.0f} images/s"
            )
            self.callbacks.epoch(self.records.rows[-1], summary, best=False)
            self._save(end.state(numbers), end.epoch)
        return numbers

    def save(self, state: FitState) -> None:
        """Write what a resume needs, within an epoch; the backbone stays that of the last whole one."""
        if self.plan.ranks.main:
            self._save(state, state.epoch + 1)

    def _save(self, state: FitState, epoch: int) -> None:
        self.records.save_state(state)
        self.callbacks.save("state", self.out / run_outputs.LAST, epoch)
        self.callbacks.flush()


def _finish(records: Records) -> None:
    """Draw, and print where the backbone is."""
    records.draw()
    records.plan.precision.before_eval(records.trainee.model)
    path, rows, epochs = records.out / run_outputs.BACKBONE, records.rows, records.inputs.epochs
    scores = {name: rows[-1][name] for name in METRICS if name in rows[-1]}
    scored = f"; {describe_scores(scores)}" if scores else ""
    console.say(f"held-out loss {rows[-1]['val_loss']:.4f}{scored}; backbone {path}")
    for remark in records.plan.method.remarks(rows[-1]):
        console.warn(remark)
    if len(rows) < epochs:
        console.say(f"stopped after {len(rows)} of {epochs} epochs; continue with --resume")
    else:
        console.say(f"fine-tune from it: {_next_command(path, records.plan.config)}")


def _next_command(path: Path, config: PretrainConfig) -> str:
    """Return the command that starts from the backbone, whose card holds model, size and stem."""
    channels = [] if config.in_chans == 3 else ["--in-chans", str(config.in_chans)]
    return shlex.join(["vtk", "finetune", "DATA", *channels, "--weights", str(path)])

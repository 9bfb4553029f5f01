"""``--dry-run``: images, memory and duration of a run, before it is started.

The time is measured on a few real steps, loading included, and on a few batches of the evaluation. What these steps
change is thrown away: nothing is written.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vtk import console
from vtk.data.audit.result import DataAudit
from vtk.training.engine.callback_list import Callbacks
from vtk.training.engine.callbacks import Callback, StepInfo
from vtk.training.engine.loop import Loop
from vtk.training.engine.processes import open_ranks
from vtk.training.engine.step_rule import PlainStep
from vtk.training.engine.stepper import DivergedError
from vtk.training.memory import MemoryChoice
from vtk.training.run_config import RunConfig
from vtk.training.runs.joint_tasks import joint_folder, prepare_joint
from vtk.training.runs.plan import plan_run, run_folder
from vtk.training.runs.prepare import PreparedRun, PreparedTask, load_saved, prepare_run

STEPS, SECONDS = 40, 10.0
"""A measurement ends after so many steps or seconds, but not before the third step."""


@dataclass(frozen=True)
class Estimate:
    """Estimated duration of a run.

    Attributes:
        seconds: of all its epochs and evaluations.
        steps: optimizer steps it has.
        measured_steps: those that it was measured on.
        images_per_second: of training, loading included.
        eval_images_per_second: of evaluation.
    """

    seconds: float
    steps: int
    measured_steps: int
    images_per_second: float
    eval_images_per_second: float


@dataclass(frozen=True)
class DryRun:
    """Preview of a run.

    Attributes:
        memory: in each mode.
        audits: of the images, by task; of a single task its name is empty.
        lines: what is done to the images and to classes of unequal size.
        epochs: planned.
        estimate: None where no step could be measured.
        why: there is none.
    """

    memory: MemoryChoice
    audits: Mapping[str, DataAudit]
    lines: tuple[str, ...]
    epochs: int
    estimate: Estimate | None
    why: str = ""

    @property
    def images(self) -> dict[str, dict[str, int]]:
        """Numbers of images to train on, of held-out ones and of classes, by task."""
        return {
            name: {"train": len(audit.train), "val": len(audit.val), "classes": len(audit.classes)}
            for name, audit in self.audits.items()
        }

    def print(self) -> None:
        """Print all of it for people."""
        for name, audit in self.audits.items():
            if name:
                console.say(f"{name}: {audit.root}", style="bold")
            audit.print()
        for line in self.lines:
            console.say(line)
        self.memory.print()
        time = self.estimate
        if time is None:
            console.say(f"time: not measured, {self.why}")
            return
        epochs = f"{self.epochs} epoch{'s' * (self.epochs > 1)}"
        console.say(f"time: about {duration(time.seconds)} for {epochs}, {time.steps:,} steps in all (an estimate,")
        console.say(
            f"by {time.measured_steps} steps: {time.images_per_second:,.0f} images/s with loading, "
            f"{time.eval_images_per_second:,.0f} in evaluation)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: those of the memory, and the others beside them."""
        estimate = None if self.estimate is None else {**vars(self.estimate), "estimate": True}
        images: Any = self.images
        return {
            **self.memory.to_dict(), "images": images.get("", images), "training": list(self.lines),
            "epochs": self.epochs, "time": estimate, **({"time_unknown": self.why} if self.why else {}),
        }  # fmt: skip


def dry_run(config: RunConfig) -> DryRun:
    """Return images, memory and duration of a run of ``config``; nothing is written.

    Raises:
        UsageError: flags that are wrong or contradict each other.
        DataError: the folder or the weights cannot be used.
        UnavailableError: the device is not available.
    """
    if config.tasks:
        prepared = prepare_joint(config, joint_folder(config), open_ranks(config.device))
    else:
        out = run_folder(config)
        plan = plan_run(config, out, open_ranks(config.device))
        prepared = prepare_run(plan, load_saved(config, out))
    tasks = prepared.tasks
    estimate, why = _try_estimate(prepared)
    audits = {name: part.task.audit for name, part in tasks.items()}
    lines = tuple(f"{part.task.plan.title}{line}" for part in tasks.values() for line in part.describe())
    return DryRun(prepared.settled.memory, audits, lines, prepared.planned, estimate, why)


def _try_estimate(prepared: PreparedRun) -> tuple[Estimate | None, str]:
    """Return the estimate, or the reason why there is none."""
    memory = prepared.settled.memory
    counted = next((f for f in memory.counted if f.mode == memory.mode), None)
    if prepared.precision.name == "fp16" and prepared.ranks.device.type != "cuda":
        return None, "fp16 trains on CUDA only"
    if counted is not None and counted.total(memory.each) > memory.free:
        return None, "a step takes more memory than is free"
    try:
        return _estimate(prepared), ""
    except torch.OutOfMemoryError:
        return None, "a step takes more memory than there is"
    except DivergedError as error:
        return None, str(error)


def _estimate(prepared: PreparedRun) -> Estimate:
    clock = _Clock()
    begin = time.perf_counter()
    loop = Loop(
        prepared.model, prepared.objective, prepared.streams, prepared.config, prepared.precision,
        prepared.settled.step_rule or PlainStep(), prepared.ranks, prepared.learners, Callbacks(own=(clock,)),
        max_steps=prepared.config.max_steps,
    )  # fmt: skip
    loop.run_epoch(False)
    steps = loop.steps.total()
    # the first steps wait for loading processes to start, or use what these have loaded in the meantime
    k = len(clock.times) // 3
    before, seen = (clock.times[k - 1], sum(clock.images[:k])) if k else (begin, 0)
    each = (clock.times[-1] - before) / (len(clock.times) - k)
    rate = (sum(clock.images) - seen) / (clock.times[-1] - before)
    evaluations = [(_eval_rate(part), len(part.task.audit.val)) for part in prepared.tasks.values()]
    evaluation = sum(count / rate for rate, count in evaluations)
    total = steps * each + loop.epochs * evaluation
    return Estimate(total, steps, len(clock.times), rate, sum(count for _, count in evaluations) / evaluation)


@torch.no_grad()
def _eval_rate(part: PreparedTask) -> float:
    """Return the images per second of an evaluation, by its first batches."""
    plan, model = part.task.plan, part.task.model.eval()
    rate = 0.0
    for _ in range(2):  # the first pass waits for loading processes to start
        begin, count, seconds = time.perf_counter(), 0, 0.0
        for images, _ in part.val_loader:
            model(images.to(plan.ranks.device)).float().cpu()
            count, seconds = count + len(images), time.perf_counter() - begin
            if seconds > SECONDS / 4:
                break
        rate = count / seconds
    plan.precision.before_eval(model)
    return rate


@dataclass
class _Clock(Callback):
    """Records the end and the images of each step, and ends the epoch after enough of them."""

    times: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    begin: float = field(default_factory=time.perf_counter)

    def on_step(self, info: StepInfo) -> None:
        """Take the time; reading the loss waits until the device has done the step."""
        float(info.loss)
        self.times.append(time.perf_counter())
        self.images.append(info.images)
        if len(self.times) >= STEPS or (len(self.times) >= 3 and self.times[-1] - self.begin > SECONDS):
            info.stop()


def duration(seconds: float) -> str:
    """Format a time in the largest unit that gives a number above 1.5, with two digits at most."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{max(seconds, 1):.0f} s"

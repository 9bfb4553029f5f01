"""Prepares a run: memory, batches, objective and step rule of its tasks, all that the engine takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.evaluation.metrics import evaluate
from vtk.evaluation.multilabel import evaluate_labels
from vtk.training.engine.precision import Precision
from vtk.training.engine.processes import Ranks, open_ranks
from vtk.training.engine.step_plan import plan_steps, planned_epochs
from vtk.training.engine.step_rule import StepRule
from vtk.training.engine.streams import ImageStream, Stream
from vtk.training.memory import MemoryChoice, Subject, choose_memory
from vtk.training.objectives.base import Classification, Objective
from vtk.training.objectives.distillation import Trained, describe_teacher, distill
from vtk.training.run_config import RunConfig
from vtk.training.runs.identity import decoding_of, init_of, run_identity
from vtk.training.runs.label_kinds import Scores, describe, make_objective, make_sampler
from vtk.training.runs.outputs import LAST
from vtk.training.runs.plan import RunPlan, plan_run, run_folder
from vtk.training.runs.resume_state import Saved, load_state
from vtk.training.runs.scoring import default_workers, evaluate_ranks
from vtk.training.runs.task import Task, build_task
from vtk.training.runs.views import describe_views
from vtk.training.step_rules.sharpness import make_step_rule


@dataclass(frozen=True)
class PreparedTask:
    """A task with its batches and its objective.

    Attributes:
        task: images and model.
        config: its options, with the memory mode and the batch size that were chosen.
        stream: training batches.
        val_loader: held-out batches.
        labelled: objective of the labels.
        objective: the same with the teacher, if there is one.
    """

    task: Task
    config: RunConfig
    stream: ImageStream
    val_loader: DataLoader[Any]
    labelled: Classification
    objective: Objective

    def score(
        self, model: nn.Module, ranks: Ranks, *, show_progress: bool, keep: Callable[[Tensor, Tensor], None]
    ) -> Scores:
        """Evaluate ``model`` on the held-out images; ``keep`` gets logits and labels where an image has one label."""
        kind = evaluate_labels if self.config.multi_label else partial(evaluate, keep=keep)
        classes = self.task.audit.classes
        scores: Scores = evaluate_ranks(model, self.val_loader, classes, ranks, show_progress=show_progress, score=kind)
        return scores

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one it continues."""
        task, plan = self.task, self.task.plan
        values = run_identity(
            self.config, base_id=task.created.base.ref.id, audit=task.audit, precision=plan.precision.name,
            world=plan.ranks.world,
        )  # fmt: skip
        values["flags"] |= {"hflip": task.mirroring.probability, "init": task.created.init}
        if task.teacher is not None:  # it may have moved
            values["flags"]["distill_from"] = task.teacher.identity
        return values

    def describe(self) -> list[str]:
        """Return the lines on augmentation, class balance and the teacher."""
        task = self.task
        lines = [describe_views(self.config, task.mirroring), *describe(self.config, self.labelled, task.audit)]
        return lines + (describe_teacher(task.teacher, self.config) if task.teacher is not None else [])


@dataclass(frozen=True)
class Settled:
    """What is chosen once for all tasks of a run.

    Attributes:
        memory: mode and batch size.
        config: options of the run, with both.
        step_rule: how gradients become an update; None for a plain step.
        rule_line: the rule, for people.
    """

    memory: MemoryChoice
    config: RunConfig
    step_rule: StepRule | None
    rule_line: str


@dataclass(frozen=True)
class PreparedRun:
    """All that the engine takes to train one task, or several.

    Attributes:
        tasks: by name; of a run of one task the name is empty.
        model: to train; of several tasks one model that holds those of all.
        objective: to minimise.
        streams: training batches, in the order of the tasks.
        config: options as the engine takes them.
        precision: number formats.
        ranks: this process and the others.
        settled: memory mode, batch size and step rule.
        planned: epochs of the run.
        learners: model of each task, by name; None in a run of one task.
    """

    tasks: Mapping[str, PreparedTask]
    model: nn.Module
    objective: Objective
    streams: Sequence[Stream]
    config: RunConfig
    precision: Precision
    ranks: Ranks
    settled: Settled
    planned: int
    learners: Mapping[str, nn.Module] | None = None


def settle(tasks: Sequence[Task], config: RunConfig, ranks: Ranks, saved: Saved | None = None) -> Settled:
    """Choose the memory mode, the batch size where it is ``auto``, and the step rule.

    Args:
        tasks: of one architecture; their models are changed in place.
        config: options of the run.
        ranks: this process and the others.
        saved: state of the run that is resumed.

    Raises:
        UsageError: not even one image fits, or a step rule that the batch size excludes.
    """
    memory = choose_memory(
        [Subject(task.model, task.image_size) for task in tasks], config, tasks[0].plan.precision.name, ranks,
        images=max(len(task.audit.train) for task in tasks), saved=saved.identity["flags"] if saved else None,
        count_all=config.dry_run,
    )  # fmt: skip
    config = config.settled(memory.mode, memory.batch)
    rule, line = make_step_rule(config, tasks[0].model, [task.created.input for task in tasks], ranks)
    return Settled(memory, config, rule, line)


def prepare_task(task: Task, memory: MemoryChoice, workers: int) -> PreparedTask:
    """Open the images of a task and make its objective; nothing is written.

    Args:
        task: images and model.
        memory: mode and batch size.
        workers: processes that load images.

    Raises:
        UsageError: a batch size or a teacher that does not fit.
    """
    plan, audit, image = task.plan, task.audit, task.created.input
    config = plan.config.settled(memory.mode, memory.batch)
    val_loader = make_loader(
        audit.val, eval_transform(image), batch_size=config.eval_batch_size, shuffle=False, seed=config.seed,
        workers=workers, max_pixels=config.max_pixels,
    )  # fmt: skip
    stream = ImageStream(
        audit.train, task.augment, batch_size=memory.batch, seed=config.seed, workers=workers, ranks=plan.ranks,
        max_pixels=config.max_pixels, sampler=make_sampler(config, audit),
    )  # fmt: skip
    labelled = make_objective(config, audit)
    objective: Objective = labelled
    if task.teacher is not None:
        new = task.new_classifier
        objective = distill(labelled, task.teacher, task.model, config, image, new_classifier=new)
    return PreparedTask(task, config, stream, val_loader, labelled, objective)


def build_resumed(plan: RunPlan, saved: Saved | None, teacher: Trained | None = None) -> Task:
    """Build the task of a run, with decoding, mirroring and initial weights of a resumed one; see `build_task`."""
    flags = saved.identity["flags"] if saved is not None else {}
    return build_task(plan, decoding=decoding_of(saved), hflip=flags.get("hflip"), teacher=teacher, init=init_of(saved))


def prepare_run(plan: RunPlan, saved: Saved | None = None, teacher: Trained | None = None) -> PreparedRun:
    """Prepare a run of one task.

    Args:
        plan: of the run.
        saved: state of the run that is resumed.
        teacher: a loaded model, in place of what ``--distill-from`` names.

    Raises:
        UsageError: options that do not fit the model or the images.
        DataError: the images or the weights cannot be used.
    """
    ranks = plan.ranks
    task = build_resumed(plan, saved, teacher)
    settled = settle([task], plan.config, ranks, saved)
    config = settled.config
    prepared = prepare_task(task, settled.memory, default_workers(config.workers, ranks.world))
    steps = len(plan_steps([prepared.stream.sizes], config.accumulate))
    return PreparedRun(
        {"": prepared}, task.model, prepared.objective, [prepared.stream], config.scaled(), plan.precision, ranks,
        settled, planned_epochs(config.epochs, steps, config.max_steps),
    )  # fmt: skip


def load_saved(config: RunConfig, out: Path) -> Saved | None:
    """Return the state of the run that ``--resume`` continues; None for a new run."""
    return load_state(out / LAST) if config.resume else None


def report_memory(config: RunConfig) -> MemoryChoice:
    """Return the memory that a run of one task would take; nothing is trained and nothing written.

    Raises:
        UsageError: options that are wrong or contradict each other.
        DataError: the folder or the weights cannot be used.
        UnavailableError: the device is missing.
    """
    out = run_folder(config)
    ranks = open_ranks(config.device)
    plan = plan_run(config, out, ranks)
    saved = load_saved(config, out)
    return settle([build_resumed(plan, saved)], config, ranks, saved).memory

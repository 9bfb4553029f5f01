"""``finetune``: from folders of images and a base to task packs."""

from collections.abc import Sequence
from pathlib import Path

from vtk.errors import UsageError
from vtk.options import expect
from vtk.training.engine.callbacks import Callback, Callbacks
from vtk.training.engine.processes import Ranks, open_ranks
from vtk.training.engine.result import FinetuneResult
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.memory import MemoryChoice
from vtk.training.objectives.distillation import Trained
from vtk.training.options.task_spec import parse_tasks
from vtk.training.runs.joint import JointResult, JointRun
from vtk.training.runs.run import Run


def finetune(
    config: FinetuneConfig, *, teacher: Trained | None = None, callbacks: Sequence[Callback] = ()
) -> FinetuneResult:
    """Fine-tune a timm model on a folder of images and write its packs, metrics and plots to ``config.out``.

    Args:
        config: of the run.
        teacher: a model at hand, in place of the one that ``config.distill_from`` names.
        callbacks: told of every step, epoch and file (`vtk.Callback`).

    Raises:
        UsageError: flags that are wrong, contradict each other or, on resume, differ from the run's.
        DataError: the folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not here.
        DivergedError: the loss became infinite or not a number; the best pack so far is kept.
    """
    expect(config, FinetuneConfig, "finetune")
    _refuse_dry_run(config)
    run = open_run(config)
    run.trained_teacher = teacher
    run.callbacks = run_callbacks(callbacks, run.ranks)
    return run.go()


def finetune_tasks(config: FinetuneConfig, *, callbacks: Sequence[Callback] = ()) -> JointResult:
    """Fine-tune a timm model on several folders of images at once, and write a pack for each to ``config.out``.

    What the policy freezes (all but attention, classifier and position table) is in memory once, and a block's FFN runs
    once over the tokens of all tasks. Each task has its own loss, clipping, optimiser and learning rate, and its pack
    is what a run of its own would have made of the same batches.

    Args:
        config: ``tasks`` names two or more; ``batch_size`` counts the images of each.
        callbacks: told of every step, and of every task's epochs and files (`vtk.Callback`).

    Raises:
        UsageError: flags that are wrong or contradict each other, or tasks that cannot share their frozen weights.
        DataError: a folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not here.
        DivergedError: a loss became infinite or not a number; the best packs so far are kept.
    """
    expect(config, FinetuneConfig, "finetune_tasks")
    _refuse_dry_run(config)
    run = open_joint(config)
    run.callbacks = run_callbacks(callbacks, run.ranks)
    return run.go()


def memory_report(config: FinetuneConfig) -> MemoryChoice:
    """Return the memory that a run of ``config`` would take in each mode; nothing is trained and nothing written.

    Raises:
        UsageError: flags that are wrong or contradict each other.
        DataError: the folder or the weights cannot be used.
        UnavailableError: the device is not here.
    """
    if config.tasks:
        joint = open_joint(config)
        joint.build()
        joint.settle(None)
        return joint.memory
    return report_memory(open_run(config))


def report_memory(run: Run) -> MemoryChoice:
    """Return the memory that a run would take, without training; see `memory_report` for what it raises."""
    saved = run.load()
    run.build()
    run.settle(saved)
    return run.memory


def run_callbacks(given: Sequence[Callback], ranks: Ranks) -> Callbacks:
    """Return a user's callbacks for the main process, and none for the others.

    Raises:
        UsageError: they are something else.
    """
    callbacks = Callbacks(given)
    return callbacks if ranks.main else Callbacks()


def _refuse_dry_run(config: FinetuneConfig) -> None:
    if config.dry_run:
        raise UsageError("`--dry-run` trains nothing; call vtk.training.preview or memory_report for its numbers")


def open_joint(config: FinetuneConfig) -> JointRun:
    """Return a run of several tasks that has not begun."""
    if not config.tasks:
        raise UsageError("no tasks: give two or more as NAME=FOLDER")
    names = "+".join(spec.name for spec in parse_tasks(config.tasks))
    return JointRun(config, config.out or Path("runs") / names[:100], open_ranks(config.device))


def open_run(config: FinetuneConfig) -> Run:
    """Return a run that has not begun."""
    if config.data is None:
        if config.tasks:
            raise UsageError("`finetune` trains one task; call finetune_tasks for several")
        raise UsageError("no data: give a folder with train/ and val/, or with one folder per class")
    ranks = open_ranks(config.device)
    return Run(config, config.out or Path("runs") / config.data.resolve().name, ranks)

"""Fine-tunes a timm model: ``finetune`` on one folder of images, ``finetune_tasks`` on several at once."""

from collections.abc import Sequence

from vtk.errors import UsageError
from vtk.options import expect
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.processes import open_ranks
from vtk.training.engine.result import FinetuneResult
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.memory import MemoryChoice
from vtk.training.objectives.distillation import Trained
from vtk.training.runs.joint import JointResult, open_joint_run
from vtk.training.runs.joint_tasks import build_tasks, joint_folder
from vtk.training.runs.pack_writer import PackWriter
from vtk.training.runs.prepare import report_memory, settle
from vtk.training.runs.run import open_run


def finetune(
    config: FinetuneConfig, *, teacher: Trained | None = None, callbacks: Sequence[Callback] = ()
) -> FinetuneResult:
    """Fine-tune a timm model on a folder of images and write its packs, metrics and plots to ``config.out``.

    Args:
        config: of the run.
        teacher: a loaded model, in place of the one that ``config.distill_from`` names.
        callbacks: called after every step, epoch and file (`vtk.Callback`).

    Raises:
        UsageError: flags that are wrong, contradict each other or, on resume, differ from the run's.
        DataError: the folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not available.
        DivergedError: the loss became infinite or not a number; the best pack so far is kept.
    """
    expect(config, FinetuneConfig, "finetune")
    _refuse_dry_run(config)
    with open_run(config, PackWriter, callbacks=callbacks, teacher=teacher) as run:
        return run.go()


def finetune_tasks(config: FinetuneConfig, *, callbacks: Sequence[Callback] = ()) -> JointResult:
    """Fine-tune a timm model on several folders of images at once, and write a pack for each to ``config.out``.

    What the policy freezes (all but attention, classifier and position table) is in memory once, and a block's FFN runs
    once over the tokens of all tasks. Each task has its own loss, clipping, optimizer and learning rate, and its pack
    is what a run of its own would have made of the same batches.

    Args:
        config: ``tasks`` names two or more; ``batch_size`` counts the images of each.
        callbacks: called after every step, and after every task's epochs and files (`vtk.Callback`).

    Raises:
        UsageError: flags that are wrong or contradict each other, or tasks that cannot share their frozen weights.
        DataError: a folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not available.
        DivergedError: a loss became infinite or not a number; the best packs so far are kept.
    """
    expect(config, FinetuneConfig, "finetune_tasks")
    _refuse_dry_run(config)
    with open_joint_run(config, PackWriter, callbacks=callbacks) as run:
        return run.go()


def memory_report(config: FinetuneConfig) -> MemoryChoice:
    """Return the memory that a run of ``config`` would take in each mode; nothing is trained and nothing written.

    Raises:
        UsageError: flags that are wrong or contradict each other.
        DataError: the folder or the weights cannot be used.
        UnavailableError: the device is not available.
    """
    if not config.tasks:
        return report_memory(config)
    out, ranks = joint_folder(config), open_ranks(config.device)
    return settle(list(build_tasks(config, out, ranks).values()), config, ranks).memory


def _refuse_dry_run(config: FinetuneConfig) -> None:
    if config.dry_run:
        raise UsageError("`--dry-run` trains nothing; call vtk.training.preview or memory_report for its numbers")

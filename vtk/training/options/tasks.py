"""Several tasks in one run, and packs to start from."""

from dataclasses import dataclass, field

from vtk.errors import UsageError
from vtk.training.options.checks import require
from vtk.training.options.source import DataOptions
from vtk.training.spec import TaskSpec, parse_starts, parse_tasks


@dataclass(frozen=True)
class TaskOptions(DataOptions):
    """Tasks that share their frozen weights, in place of one folder of images."""

    tasks: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "in place of DATA, once for each task: NAME=FOLDER or NAME=FOLDER@SIZE; all of them are trained "
            "together over one set of frozen weights",
            "flag": "task",
            "metavar": "NAME=FOLDER[@SIZE]",
        },
    )
    sampling: float = field(
        default=1.0,
        metadata={
            "help": "of several tasks: temperature of how often each is drawn; 1 shows every image once an epoch, more "
            "shows small tasks more often, up to equally often"
        },
    )
    init_from: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "start from a trained pack in place of the base, also at another size; with --task give NAME=PACK, "
            "once for each",
            "flag": "init-from",
            "metavar": "PACK",
        },
    )

    def _check_tasks(self) -> tuple[TaskSpec, ...]:
        """Return the tasks of a run of several; none for a run of one."""
        require(self.sampling >= 1, "sampling", self.sampling, "1 or above")
        specs = parse_tasks(self.tasks)
        parse_starts(self.init_from, [spec.name for spec in specs])
        if specs and self.data is not None:
            raise UsageError(f"{self.data} and `--task` {self.tasks[0]}: give one folder, or tasks, not both")
        if len(specs) == 1:
            raise UsageError(f"`--task` {self.tasks[0]} is alone; give another, or its folder without --task")
        if not specs and self.sampling != 1.0:
            raise UsageError("`--sampling` says how often each of several tasks is drawn; give --task")
        return specs

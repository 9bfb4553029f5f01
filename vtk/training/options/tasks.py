"""Options of several tasks in one run, and of packs to start from."""

from dataclasses import dataclass
from typing import Annotated

from vtk.errors import UsageError
from vtk.options import Option
from vtk.training.options.source import DataOptions
from vtk.training.options.task_spec import TaskSpec, parse_starts, parse_tasks


@dataclass(frozen=True, kw_only=True)
class TaskOptions(DataOptions):
    """Tasks that share their frozen weights, in place of one folder of images."""

    tasks: Annotated[
        tuple[str, ...],
        Option(
            "a task, in place of DATA; repeat for several tasks",
            often=True, flag="task", metavar="NAME=FOLDER[@SIZE]",
        ),
    ] = ()  # fmt: skip
    sampling: Annotated[
        float, Option("task-sampling temperature: 1 samples by size, larger values more evenly", least=1)
    ] = 1.0
    init_from: Annotated[
        tuple[str, ...],
        Option(
            "start from a trained pack, also at another size; with --task NAME=PACK, repeated",
            "model", flag="init-from", metavar="PACK",
        ),
    ] = ()  # fmt: skip

    def _check_tasks(self) -> tuple[TaskSpec, ...]:
        """Return the tasks of a run of several; none for a run of one."""
        specs = parse_tasks(self.tasks)
        parse_starts(self.init_from, [spec.name for spec in specs])
        if specs and self.data is not None:
            raise UsageError(f"{self.data} and `--task` {self.tasks[0]}: give one folder, or tasks, not both")
        if len(specs) == 1:
            raise UsageError(f"`--task` {self.tasks[0]} is alone; give another, or its folder without --task")
        if not specs and self.sampling != 1.0:
            raise UsageError("`--sampling` needs several tasks; give --task for each")
        return specs

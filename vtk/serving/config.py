"""The flags of ``vtk tasks bench``; free of torch, so that help is quick."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError

MIN_ROUNDS = 7


@dataclass(frozen=True)
class BenchConfig:
    """What ``vtk tasks bench`` measures."""

    pack: tuple[Path, ...] = field(default=(), metadata={"help": "folder of a pack; once for each task"})
    copies: int = field(default=1, metadata={"help": "load each pack so many times, to see many tasks"})
    images_per_task: int = field(default=1, metadata={"help": "images of each task in one call"})
    batch: tuple[int, ...] = field(
        default=(), metadata={"help": "images of all tasks in one call, evenly spread; in place of --images-per-task"}
    )
    rounds: int = field(default=11, metadata={"help": f"timed calls of each side, in turns; at least {MIN_ROUNDS}"})
    base: Path | None = field(default=None, metadata={"help": "file with the base weights; by default looked up"})
    device: str = field(default="auto", metadata={"help": "auto (CUDA if there is one), cpu, cuda or cuda:N"})
    dtype: Literal["auto", "fp16", "bf16", "fp32", "fp64"] = field(
        default="auto", metadata={"help": "of weights and activations; auto is fp32 on a CPU and bf16 on CUDA"}
    )
    max_gpu_bytes: int | None = field(default=None, metadata={"help": "byte budget of the bank; others are paged in"})

    def __post_init__(self) -> None:
        """Refuse values that cannot be measured.

        Raises:
            UsageError: by name.
        """
        if not self.pack:
            raise UsageError("no packs; give `--pack FOLDER`, once for each task")
        for name, least in (("copies", 1), ("images_per_task", 1), ("rounds", MIN_ROUNDS)):
            if getattr(self, name) < least:
                raise UsageError(f"`{name}` is {getattr(self, name)}; give at least {least}")
        tasks = len(self.pack) * self.copies
        for batch in self.batch:
            if batch < tasks:
                raise UsageError(f"`batch` has {batch}, and there are {tasks} tasks; give at least an image for each")

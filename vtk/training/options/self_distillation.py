"""Self-distillation (DINO): views, teacher, temperatures and head."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import MOST_SIDE
from vtk.training.options.views import check_areas


@dataclass(frozen=True, kw_only=True)
class DinoOptions(Config):
    """Of ``--method dino``; defaults of the authors' code for 100 epochs."""

    GROUP: ClassVar[str] = "self-distillation (dino)"

    local_crops: Annotated[
        int, Option("small crops of an image, which only the student sees; 0 = none", often=True, least=0, most=64)
    ] = 8
    local_size: Annotated[
        int | tuple[int, int] | None,
        Option(
            "size of the small crops: N, or height and width (default: 3/7 of the input's)", least=1, most=MOST_SIDE
        ),
    ] = None
    local_scale: Annotated[
        tuple[float, ...],
        Option("area of the small crops: smallest and largest", above=0, most=1, length=2,
               allowed="two areas, 0 < smallest ≤ largest ≤ 1"),
    ] = (0.05, 0.4)  # fmt: skip
    dino_colors: Annotated[
        bool,
        Option("change colours and sharpness of views: jitter, greyscale, blur, solarisation",
               off="only crop and flip views, or as --color-jitter and --auto-augment say"),
    ] = True  # fmt: skip
    teacher_momentum: Annotated[
        float, Option("share of itself that the teacher keeps in a step; rises to 1", often=True, least=0, below=1)
    ] = 0.996
    teacher_temp: Annotated[float, Option("softmax temperature of the teacher", above=0)] = 0.04
    teacher_temp_start: Annotated[float, Option("softmax temperature of the teacher in the first epoch", above=0)] = (
        0.04
    )
    teacher_temp_epochs: Annotated[int, Option("epochs in which the teacher's temperature rises", least=0)] = 0
    student_temp: Annotated[float, Option("softmax temperature of the student", above=0)] = 0.1
    center_momentum: Annotated[
        float, Option("share of itself that the centre of the teacher's outputs keeps in a step", least=0, below=1)
    ] = 0.9
    dino_prototypes: Annotated[
        int, Option("outputs of the head; fewer for small data sets", often=True, least=2, most=1 << 20)
    ] = 65536
    dino_hidden: Annotated[int, Option("width of the head's two hidden layers", least=1)] = 2048
    dino_bottleneck: Annotated[int, Option("width of the head before its prototypes", least=1)] = 256
    unit_prototypes: Annotated[bool, Option("keep the prototypes' length at 1", off="train the prototypes' length")] = (
        True
    )
    freeze_prototypes: Annotated[int, Option("first epochs in which the prototypes are not trained", least=0)] = 1

    def _check_dino(self, epochs: int) -> None:
        """Refuse what would be of no effect, and a temperature that would not be reached.

        Args:
            epochs: of the run.
        """
        check_areas("local_scale", self.local_scale)
        rising = self.teacher_temp_epochs
        if self.teacher_temp_start != type(self).teacher_temp_start and not rising:
            raise UsageError(
                f"`--teacher-temp-start` {self.teacher_temp_start:g} is of the epochs in which it rises, and "
                "--teacher-temp-epochs is 0; give their number, or leave the start out"
            )
        if rising > epochs:
            raise UsageError(
                f"`--teacher-temp-epochs` {rising} is more than the {epochs} of --epochs; give at most {epochs}"
            )
        for name in ("local_size", "local_scale"):
            if not self.local_crops and getattr(self, name) != getattr(type(self), name):
                flag = name.replace("_", "-")
                raise UsageError(f"`--{flag}` is of the small crops, and --local-crops is 0; leave one of them out")

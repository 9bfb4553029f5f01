"""Options of distillation: the teacher, and what of it is matched."""

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal, get_args

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.config import flag_of

DistillKind = Literal["soft", "hard", "features", "tokens"]
KINDS: tuple[DistillKind, ...] = get_args(DistillKind)
LOGIT_KINDS = ("soft", "hard")
"""Kinds that compare classes, and so need a teacher of the same classes."""

GROUP = "distillation"
Kind = Annotated[
    DistillKind,
    Option("match the teacher's soft probabilities, hard class, pooled features or last tokens", GROUP),
]
Alpha = Annotated[float, Option("weight of the teacher in the loss; 1 − alpha of the labels", GROUP, above=0, most=1)]
Temperature = Annotated[float, Option("softmax temperature of --distill-kind soft", GROUP, above=0)]


@dataclass(frozen=True, kw_only=True)
class DistillOptions(Config):
    """The teacher, the outputs to match, and their weight in the loss."""

    GROUP: ClassVar[str] = GROUP

    distill_from: Annotated[
        str | None,
        Option(
            "teacher: a pack, run folder, .safetensors with a card, or timm name", nonempty=True,
            allowed="a pack, a run folder, a .safetensors or a timm name",
        ),
    ] = None  # fmt: skip
    distill_kind: Kind = "soft"
    distill_alpha: Alpha = 0.5
    distill_temperature: Temperature = 1.0

    def _check_distill(self) -> None:
        if self.distill_from is None:
            for f in fields(DistillOptions):
                if getattr(self, f.name) != f.default:
                    raise UsageError(f"`{flag_of(DistillOptions, f.name)}` needs a teacher; add "
                                     "--distill-from TEACHER")  # fmt: skip
        if self.distill_kind != "soft" and self.distill_temperature != 1:
            raise UsageError(
                f"`--distill-temperature` needs --distill-kind soft, but the kind is {self.distill_kind}; leave it out"
            )

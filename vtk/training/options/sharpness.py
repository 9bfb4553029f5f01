"""What a step does before it descends: the weights climb (sharpness-aware minimisation), or the pixels do."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require


@dataclass(frozen=True)
class SharpnessOptions:
    """Sharpness-aware minimisation, and fast adversarial training."""

    sam: float | Literal["auto"] | None = field(
        default=None,
        metadata={
            "help": "sharpness-aware minimisation: radius ρ, such as 0.1, by which the trained weights climb before "
            "each step; auto is paper D's for the architecture; default none"
        },
    )
    sam_adaptive: bool = field(
        default=False,
        metadata={"help": "of --sam: measure ρ relative to each weight (ASAM), which wants about 10 times as much"},
    )
    sam_m: int | None = field(
        default=None,
        metadata={
            "help": "of --sam: images that climb together; default those of each process in a step, all of the step's "
            "give one ascent for all processes"
        },
    )
    adversarial: float | None = field(
        default=None,
        metadata={
            "help": "train on images changed against the model (fast adversarial training): highest change of a pixel "
            "in 1/255, such as 2; default none"
        },
    )

    def _check_sharpness(self) -> None:
        sam = self.sam
        number = isinstance(sam, (int, float)) and not isinstance(sam, bool)
        require(sam in (None, "auto") or (number and float(sam) > 0), "sam", sam, "a radius above 0, or auto")  # type: ignore[arg-type]
        require(self.sam_m is None or self.sam_m >= 1, "sam_m", self.sam_m, "at least 1")
        if sam is None and (self.sam_adaptive or self.sam_m is not None):
            flag = "sam-adaptive" if self.sam_adaptive else "sam-m"
            raise UsageError(f"`--{flag}` is of --sam, which is not given; add --sam auto or --sam RHO")
        eps = self.adversarial
        require(eps is None or 0 < eps <= 255, "adversarial", eps, "above 0 to 255 (in 1/255 of a pixel's range)")

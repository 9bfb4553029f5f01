"""Options of steps with two passes: sharpness-aware minimisation, and adversarial training."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option


@dataclass(frozen=True, kw_only=True)
class SamOptions(Config):
    """Sharpness-aware minimisation, of any run that has labels."""

    GROUP: ClassVar[str] = "regularisation"

    sam: Annotated[
        float | Literal["auto"] | None,
        Option("sharpness-aware minimisation: radius ρ, such as 0.1; auto: by architecture", above=0,
               allowed="a radius above 0, or auto"),
    ] = None  # fmt: skip
    sam_adaptive: Annotated[bool, Option("adaptive SAM: ρ relative to each weight; typically about 10×")] = False

    def _check_sam(self) -> None:
        if self.sam is None and self.sam_adaptive:
            raise UsageError("`--sam-adaptive` needs --sam; add --sam auto or --sam RHO")


@dataclass(frozen=True, kw_only=True)
class SharpnessOptions(SamOptions):
    """Sharpness-aware minimisation, and fast adversarial training."""

    sam_m: Annotated[int | None, Option("SAM: micro-batch size of the ascent step (m-sharpness)", least=1)] = None
    adversarial: Annotated[
        float | None,
        Option("fast adversarial training: ε of a pixel, in 1/255, such as 2 (default: off)", above=0,
               most=255, allowed="above 0 to 255 (in 1/255 of a pixel's range)"),
    ] = None  # fmt: skip

    def _check_sharpness(self) -> None:
        self._check_sam()
        if self.sam is None and self.sam_m is not None:
            raise UsageError("`--sam-m` needs --sam; add --sam auto or --sam RHO")

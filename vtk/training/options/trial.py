"""A trial: a part of the images, or a few steps."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from vtk.options import Config, Option


@dataclass(frozen=True, kw_only=True)
class TrialOptions(Config):
    """How much of a run is done, to see whether it works at all."""

    GROUP: ClassVar[str] = "schedule"

    limit: Annotated[
        int | None,
        Option(
            "a trial: at most N training and N held-out images, the classes in proportion", "data", least=1, metavar="N"
        ),
    ] = None
    max_steps: Annotated[
        int | None,
        Option("a trial: end after N optimizer steps; the schedule is that of N steps", least=1, metavar="N"),
    ] = None

    @property
    def trial(self) -> dict[str, int]:
        """What cards, metrics and results tell of a trial; empty where all was used."""
        found = {"limit": self.limit, "max_steps": self.max_steps}
        return {name: value for name, value in found.items() if value is not None}

"""Supervised contrastive pre-training: temperature and projection."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from vtk.options import Config, Option


@dataclass(frozen=True, kw_only=True)
class ContrastiveOptions(Config):
    """Of ``--method supcon``."""

    GROUP: ClassVar[str] = "supervised contrastive"

    supcon_temperature: Annotated[
        float, Option("softmax temperature of the cosines; lower weighs hard pairs more", above=0)
    ] = 0.1
    supcon_dim: Annotated[int, Option("width of the projection in which images are compared", least=1)] = 128

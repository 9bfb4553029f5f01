"""Supervised contrastive pre-training: temperature and projection."""

from dataclasses import dataclass, field

from vtk.training.options.checks import require


@dataclass(frozen=True)
class ContrastiveOptions:
    """Of ``--method supcon``."""

    supcon_temperature: float = field(
        default=0.1, metadata={"help": "of --method supcon: cosines are divided by it; lower looks at hard pairs more"}
    )
    supcon_dim: int = field(
        default=128, metadata={"help": "of --method supcon: width of the projection in which images are compared"}
    )

    def _check_contrastive(self) -> None:
        require(self.supcon_temperature > 0, "supcon_temperature", self.supcon_temperature, "above 0")
        require(self.supcon_dim >= 1, "supcon_dim", self.supcon_dim, "at least 1")

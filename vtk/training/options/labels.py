"""What labels are, and how much each class counts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require


@dataclass(frozen=True)
class LabelOptions:
    """Images with several labels, and classes of unequal size."""

    multi_label: bool = field(
        default=False,
        metadata={
            "help": "images with any number of labels: DATA is a table (.csv) of path,label1;label2, or folders named "
            "by the labels of the images in them"
        },
    )
    class_weights: Literal["none", "balanced"] = field(
        default="none",
        metadata={"help": "balanced: an image counts in inverse proportion to the images of its class"},
    )
    sampler: Literal["shuffle", "balanced"] = field(
        default="shuffle",
        metadata={
            "help": "balanced: an epoch shows as many images as there are, of every class equally many; shuffle shows "
            "every image once"
        },
    )

    def _check_labels(self) -> None:
        weights: str = self.class_weights
        sampler: str = self.sampler
        require(weights in ("none", "balanced"), "class_weights", weights, "none or balanced")
        require(sampler in ("shuffle", "balanced"), "sampler", sampler, "shuffle or balanced")
        if self.multi_label and sampler == "balanced":
            raise UsageError(
                "`--sampler` balanced draws by the one label of an image; with --multi-label give --class-weights "
                "balanced"
            )
        if weights == sampler == "balanced":
            raise UsageError(
                "`--class-weights` balanced and `--sampler` balanced both make small classes count for more; give one "
                "of them"
            )

    def _check_table(self, data: Path | None) -> None:
        if data is not None and Path(data).suffix.lower() == ".csv" and not self.multi_label:
            raise UsageError(f"{data} is a table; add --multi-label, or give a folder with one folder per class")

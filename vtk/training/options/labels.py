"""Options of labels: several per image, and the weight of each class."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.data.config import LabelSeparator, MultiLabel
from vtk.errors import UsageError
from vtk.options import Config, Option


@dataclass(frozen=True, kw_only=True)
class LabelOptions(Config):
    """Multi-label images, and class imbalance."""

    GROUP: ClassVar[str] = "data"

    multi_label: MultiLabel = False
    label_separator: LabelSeparator = None
    class_weights: Annotated[
        Literal["none", "balanced"],
        Option("balanced: weight images by the inverse size of their class"),
    ] = "none"
    sampler: Annotated[
        Literal["shuffle", "balanced"],
        Option("shuffle: each image once per epoch; balanced: classes equally often"),
    ] = "shuffle"

    def _check_labels(self) -> None:
        if self.label_separator is not None and not self.multi_label:
            raise UsageError("`--label-separator` needs --multi-label; give both, or leave it out")
        if self.multi_label and self.sampler == "balanced":
            raise UsageError(
                "`--sampler` balanced draws by the one label of an image; with --multi-label give --class-weights "
                "balanced"
            )
        if self.class_weights == self.sampler == "balanced":
            raise UsageError(
                "`--class-weights` balanced and `--sampler` balanced both make small classes count for more; give one "
                "of them"
            )

    def _check_weighted_labels(self, distill_alpha: float) -> None:
        if self.class_weights == "balanced" and distill_alpha == 1:
            raise UsageError(
                "`--class-weights` balanced weighs the loss of the labels, of which --distill-alpha 1 leaves nothing; "
                "give an alpha below 1, or --sampler balanced"
            )

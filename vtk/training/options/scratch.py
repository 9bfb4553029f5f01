"""Options of training from scratch: loss, and stronger regularisation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option


@dataclass(frozen=True, kw_only=True)
class ScratchOptions(Config):
    """Loss, dropout, repeated augmentation, and the batch size of the learning rate."""

    GROUP: ClassVar[str] = "regularisation"

    loss: Annotated[
        Literal["ce", "bce", "bce-sum"],
        Option("cross-entropy, or binary cross-entropy, mean or summed over classes", "schedule", often=True),
    ] = "ce"
    bce_threshold: Annotated[
        float | None,
        Option("bce: threshold that turns mixed targets into 0 and 1 (default: off)", "schedule", least=0,
               below=1),
    ] = None  # fmt: skip
    lr_batch: Annotated[
        int | None,
        Option("batch size of --lr; scaled by batch size × accumulate / N (default: off)", "schedule", least=1),
    ] = None
    head_bias: Annotated[
        float | None, Option("initial bias of a new classifier; negative suits bce with many classes", "schedule")
    ] = None
    aug_repeats: Annotated[int, Option("repeated augmentation: copies of each image in a batch", least=1)] = 1
    crop_pad: Annotated[
        int, Option("random crop after padding by N pixels, in place of a random resized crop", least=0, most=1024)
    ] = 0
    remode: Annotated[
        Literal["const", "rand", "pixel"], Option("random erasing with the mean, a random colour, or noise")
    ] = "const"
    drop: Annotated[
        float, Option("dropout after position embedding, attention projection and in the FFN", least=0, below=1)
    ] = 0.0
    attn_drop: Annotated[float, Option("dropout of attention weights", least=0, below=1)] = 0.0

    def _check_scratch(self) -> None:
        if self.bce_threshold is not None and self.loss == "ce":
            raise UsageError("`--bce-threshold` needs --loss bce; add it, or leave the threshold out")

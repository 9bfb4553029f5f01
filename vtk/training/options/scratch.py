"""What training from scratch needs beyond fine-tuning: the recipe, the loss, and stronger regularisation."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require


@dataclass(frozen=True)
class ScratchOptions:
    """The loss, dropout, repeated augmentation, and what the learning rate is for."""

    recipe: str | None = field(
        default=None,
        metadata={"help": "defaults from a recipe, by its name or its file (.yaml); --config and flags win over it"},
    )
    loss: Literal["ce", "bce", "bce-sum"] = field(
        default="ce",
        metadata={
            "help": "ce: cross-entropy; bce: each class is a decision of its own, the mean over classes and images; "
            "bce-sum: the sum over classes"
        },
    )
    bce_threshold: float | None = field(
        default=None,
        metadata={
            "help": "of bce: targets that mixing made are 1 above this and else 0; default they stay as they are"
        },
    )
    lr_batch: int | None = field(
        default=None,
        metadata={
            "help": "batch that --lr is for: it is multiplied by batch-size × accumulate / this; default --lr is taken "
            "as it is"
        },
    )
    head_bias: float | None = field(
        default=None,
        metadata={"help": "what a new classifier's biases start at; below 0 suits bce with many classes"},
    )
    aug_repeats: int = field(
        default=1,
        metadata={
            "help": "show an image so many times in a batch, each augmented anew, and so many times fewer images"
        },
    )
    crop_pad: int = field(
        default=0,
        metadata={
            "help": "pixels: cut a training image out of itself with such a black border, in place of a random resized "
            "crop (4 is usual for 32×32 images)"
        },
    )
    remode: Literal["const", "rand", "pixel"] = field(
        default="const",
        metadata={"help": "what --reprob erases with: const (the mean), rand (one colour) or pixel (noise)"},
    )
    drop: float = field(
        default=0.0, metadata={"help": "dropout after the position table, the attention's projection and in the FFN"}
    )
    attn_drop: float = field(default=0.0, metadata={"help": "dropout of attention weights"})

    def _check_scratch(self) -> None:
        loss: str = self.loss
        require(loss in ("ce", "bce", "bce-sum"), "loss", loss, "ce, bce or bce-sum")
        threshold = self.bce_threshold
        if threshold is not None and loss == "ce":
            raise UsageError("`--bce-threshold` is of --loss bce; add it, or leave the threshold out")
        require(threshold is None or 0 <= threshold < 1, "bce_threshold", threshold, "from 0 to below 1")
        require(self.lr_batch is None or self.lr_batch >= 1, "lr_batch", self.lr_batch, "at least 1")
        require(self.aug_repeats >= 1, "aug_repeats", self.aug_repeats, "at least 1")
        require(0 <= self.crop_pad <= 1024, "crop_pad", self.crop_pad, "0 to 1024")
        remode: str = self.remode
        require(remode in ("const", "rand", "pixel"), "remode", remode, "const, rand or pixel")
        for name in ("drop", "attn_drop"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")

"""Options of a pre-training run: the groups that other runs have too, with other defaults, and its own."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from vtk.errors import UsageError
from vtk.training.options.architecture import ArchitectureOptions
from vtk.training.options.checks import check_finite, require
from vtk.training.options.contrastive import ContrastiveOptions
from vtk.training.options.images import ImageOptions
from vtk.training.options.recipe import RecipeOptions
from vtk.training.options.running import RunningOptions
from vtk.training.options.sharpness import SharpnessOptions
from vtk.training.options.source import SourceOptions
from vtk.training.pretrain.options import MaskedViewOptions, MaskOptions, PixelOptions, TokenizerOptions

_DEFAULTS: dict[str, dict[str, Any]] = {
    "beit": {"mask_ratio": 0.4, "mask_shape": "block", "norm_pixels": False},
    "mae": {"mask_ratio": 0.75, "mask_shape": "random", "norm_pixels": True},
    "simmim": {"mask_ratio": 0.6, "mask_shape": "random", "norm_pixels": False},
    "supcon": {},
}
"""What a value that was left open is, by method; the methods a config may name."""

_OWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mask_ratio", "mask_shape", "mask_unit", "mask_at"), ("beit", "mae", "simmim")),
    "norm_pixels": ("mae", "simmim"),
    **dict.fromkeys(("decoder_depth", "decoder_dim"), ("mae",)),
    **dict.fromkeys((f.name for f in dataclasses.fields(TokenizerOptions)), ("beit",)),
    **dict.fromkeys((f.name for f in dataclasses.fields(ContrastiveOptions)), ("supcon",)),
    **dict.fromkeys(("sam", "sam_adaptive"), ("supcon",)),
}
"""Flags that only some methods have."""


@dataclass(frozen=True)
class PretrainConfig(
    # fields come in the order of the last parent first
    RunningOptions,
    MaskedViewOptions,
    SharpnessOptions,
    RecipeOptions,
    ContrastiveOptions,
    TokenizerOptions,
    PixelOptions,
    MaskOptions,
    ArchitectureOptions,
    ImageOptions,
    SourceOptions,
):
    """What to pre-train on which images, and how.

    Raises:
        UsageError: a value is out of range, two values contradict each other, or a flag is of another method.
    """

    data: Path | None = field(
        default=None,
        metadata={"help": "folder of images, at any depth; with train/ and val/ in it, val/ is held out"},
    )
    method: Literal["beit", "mae", "simmim", "supcon"] = field(
        default="beit",
        metadata={
            "help": "beit: predict the visual words of hidden patches; mae: encode the visible patches, decode the "
            "hidden pixels; simmim: predict the hidden pixels from a mask token; supcon: bring the images of a class "
            "together (needs a folder with one folder per class)"
        },
    )
    pretrained: bool = field(
        default=False,
        metadata={"help": "start from the hub's weights; by default from random ones"},
    )
    val_split: float = field(
        default=0.1,
        metadata={"help": "share of the images held out, where the folder has no train/ and val/"},
    )
    epochs: int = field(default=100, metadata={"help": "passes over the training images"})
    batch_size: int = field(default=64, metadata={"help": "images per forward pass, all processes together"})
    opt_kwargs: tuple[str, ...] = field(
        default=(),
        metadata={"help": "further arguments of the optimiser as key=value; of adamw by default betas=[0.9,0.95]"},
    )
    lr: float = field(default=1e-3, metadata={"help": "highest learning rate (AdamW; sgd wants about 100 times more)"})
    clip_grad: float = field(default=3.0, metadata={"help": "highest norm of the gradient, 0 for no limit"})

    command: ClassVar[str] = "pretrain"
    # what other runs may choose and this one may not
    memory: ClassVar[str] = "plain"
    tasks: ClassVar[tuple[str, ...]] = ()
    chosen_metric: ClassVar[str] = "loss"
    mixup: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_finite(self)
        known: str = self.method
        require(known in _DEFAULTS, "method", known, " or ".join(_DEFAULTS))
        for name, methods in _OWN.items():
            given = getattr(self, name)
            default = self.__dataclass_fields__[name].default
            if self.method not in methods and given not in (default, _DEFAULTS[self.method].get(name, default)):
                flag = name.replace("_", "-")
                raise UsageError(f"`--{flag}` is of --method {' and '.join(methods)}, but --method is {self.method}")
        if self.weights is not None and self.pretrained:
            raise UsageError("`--weights` gives the weights to start from, --pretrained the hub's; give one of them")
        require(0 < self.val_split < 1, "val_split", self.val_split, "between 0 and 1")
        require(self.crop_pct is None or 0.05 <= self.crop_pct <= 1, "crop_pct", self.crop_pct, "from 0.05 to 1")
        self._check_images()
        self._check_architecture()
        self._check_masks()
        self._check_pixels()
        self._check_tokenizer()
        self._check_contrastive()
        self._check_sharpness()
        self._check_views()
        self._check_recipe()
        self._check_running()
        if not isinstance(self.batch_size, int):
            raise UsageError(f"`--batch-size` is {self.batch_size}; `vtk pretrain` wants a number")
        for name in ("layer_decay", "head_lr_mult", "dry_run", "sam_m", "adversarial"):
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise UsageError(f"`--{name.replace('_', '-')}` is for runs that train a classifier; leave it out")

    def resolved(self) -> "PretrainConfig":
        """Return the config with a value in place of all that depends on the method and was left open."""
        values = {k: v for k, v in self._of_method().items() if getattr(self, k) in (None, ())}
        return dataclasses.replace(self, **values)

    def defaults(self) -> dict[str, Any]:
        """Return what each option is where no flag says otherwise, with this method."""
        return {f.name: f.default for f in dataclasses.fields(self)} | self._of_method()

    def _of_method(self) -> dict[str, Any]:
        betas = {"opt_kwargs": ("betas=[0.9,0.95]",)} if self.optimizer == "adamw" else {}
        return _DEFAULTS[self.method] | betas

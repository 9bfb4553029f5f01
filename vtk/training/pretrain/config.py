"""Options of a pre-training run: groups shared with other runs, with other defaults, and its own."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.data.config import ImageOptions
from vtk.errors import UsageError
from vtk.options import Option
from vtk.options.config import flag_of
from vtk.options.shared import ValSplit
from vtk.training.options.architecture import ArchitectureOptions
from vtk.training.options.contrastive import ContrastiveOptions
from vtk.training.options.outcome import TrackOptions
from vtk.training.options.recipe import ClipGrad, Epochs, FixedBatchSize, LearningRate, OptKwargs, RecipeOptions
from vtk.training.options.running import RunningOptions, TrialOptions
from vtk.training.options.self_distillation import DinoOptions
from vtk.training.options.sharpness import SamOptions
from vtk.training.options.source import Pretrained, SourceOptions
from vtk.training.pretrain.options import (
    DecayOptions,
    MaskedViewOptions,
    MaskOptions,
    PixelOptions,
    ProbeOptions,
    TokenizerOptions,
)
from vtk.training.recipes import recipe_values

_CROP = {"crop_scale": (0.2, 1.0)}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "beit": {"mask_ratio": 0.4, "mask_shape": "block", "norm_pixels": False, **_CROP},
    "dino": {"crop_scale": (0.4, 1.0), "weight_decay_end": 0.4},
    "mae": {"mask_ratio": 0.75, "mask_shape": "random", "norm_pixels": True, **_CROP},
    "simmim": {"mask_ratio": 0.6, "mask_shape": "random", "norm_pixels": False, **_CROP},
    "supcon": _CROP,
}
"""Defaults by method; its keys are the methods."""

_OWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mask_ratio", "mask_shape", "mask_unit", "mask_at"), ("beit", "mae", "simmim")),
    "norm_pixels": ("mae", "simmim"),
    **dict.fromkeys(("decoder_depth", "decoder_dim"), ("mae",)),
    **dict.fromkeys((f.name for f in dataclasses.fields(TokenizerOptions)), ("beit",)),
    **dict.fromkeys((f.name for f in dataclasses.fields(ContrastiveOptions)), ("supcon",)),
    **dict.fromkeys((f.name for f in dataclasses.fields(DinoOptions)), ("dino",)),
    **dict.fromkeys(("sam", "sam_adaptive"), ("supcon",)),
}
"""Options that only some methods have."""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(
    # fields come in the order of the last parent first
    RunningOptions,
    TrialOptions,
    TrackOptions,
    MaskedViewOptions,
    SamOptions,
    ProbeOptions,
    DecayOptions,
    RecipeOptions,
    ContrastiveOptions,
    DinoOptions,
    TokenizerOptions,
    PixelOptions,
    MaskOptions,
    ArchitectureOptions,
    ImageOptions,
    SourceOptions,
):
    """Options of a pre-training run.

    Raises:
        UsageError: a value is out of range, two values contradict each other, or an option is for another method.
    """

    data: Annotated[
        Path | None, Option("folder of images, at any depth; val/ beside train/ is held out", "data", often=True)
    ] = None
    method: Annotated[
        Literal["beit", "mae", "simmim", "dino", "supcon"],
        Option("masked words (beit) or pixels (mae, simmim), self-distillation (dino), or classes (supcon)", "method",
               often=True),
    ] = "beit"  # fmt: skip
    pretrained: Pretrained = False
    val_split: ValSplit = 0.1
    epochs: Epochs = 100
    batch_size: FixedBatchSize = 64
    opt_kwargs: OptKwargs = ()
    lr: LearningRate = 1e-3
    clip_grad: ClipGrad = 3.0

    command: ClassVar[str] = "pretrain"
    # fixed here, but options of other runs
    memory: ClassVar[str] = "plain"
    tasks: ClassVar[tuple[str, ...]] = ()
    chosen_metric: ClassVar[str] = "loss"
    mixup: ClassVar[float] = 0.0
    layer_decay: ClassVar[float | None] = None
    head_lr_mult: ClassVar[float] = 10.0
    dry_run: ClassVar[bool] = False
    cuda_graph: ClassVar[Literal["auto", "on", "off"]] = "off"
    sam_m: ClassVar[int | None] = None
    adversarial: ClassVar[float | None] = None
    RETIRED: ClassVar[Mapping[str, Any]] = {
        "layer_decay": layer_decay, "head_lr_mult": head_lr_mult, "dry_run": dry_run, "sam_m": sam_m,
        "adversarial": adversarial,
    }  # fmt: skip

    def check(self) -> None:
        """Refuse options that contradict each other or are for another method."""
        for name, methods in _OWN.items():
            given = getattr(self, name)
            default = self.__dataclass_fields__[name].default
            if self.method not in methods and given not in (default, _DEFAULTS[self.method].get(name, default)):
                flag = flag_of(type(self), name)
                known = " and ".join(filter(None, (", ".join(methods[:-1]), methods[-1])))
                raise UsageError(f"`{flag}` is for --method {known}; --method is {self.method}, leave it out")
        if self.weights is not None and self.pretrained:
            raise UsageError("`--weights` and --pretrained both give initial weights; give one of them")
        if self.method == "dino" and self.ema is not None:
            raise UsageError(
                "`--ema`: the moving average of --method dino is its teacher, which is kept; give --teacher-momentum"
            )
        self._check_recipe()
        self._check_input()
        self._check_architecture()
        self._check_pixels()
        self._check_dino(self.epochs)
        self._check_probe(self.method)
        self._check_sam()
        self._check_views()
        self._check_running()

    def resolved(self) -> "PretrainConfig":
        """Return the config with the defaults of its method filled in."""
        values = {k: v for k, v in self._of_method().items() if getattr(self, k) in (None, ())}
        return dataclasses.replace(self, **values)

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of all options with this method."""
        own = {f.name: f.default for f in dataclasses.fields(self)} | self._of_method()
        return own | recipe_values(self.recipe, type(self))

    def _of_method(self) -> dict[str, Any]:
        own = self.optimizer == "adamw" and self.method != "dino"  # whose authors keep torch's 0.9 and 0.999
        betas = {"opt_kwargs": ("betas=[0.9,0.95]",)} if own else {}
        return _DEFAULTS[self.method] | betas

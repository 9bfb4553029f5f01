"""Options of pre-training alone: masks, pixel targets, the tokenizer, views of an image, probes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option, require
from vtk.training.options.views import MaybeCropScale, ViewOptions


@dataclass(frozen=True, kw_only=True)
class MaskOptions(Config):
    """Masking of patches; defaults depend on the method."""

    GROUP: ClassVar[str] = "masks"

    mask_ratio: Annotated[
        float | None,
        Option("fraction of patches to mask (default: beit 0.4, mae 0.75, simmim 0.6)", often=True, above=0, below=1),
    ] = None
    mask_shape: Annotated[
        Literal["random", "block"] | None,
        Option("random squares, or BEiT's blocks (default: block for beit, else random)"),
    ] = None
    mask_unit: Annotated[
        int, Option("side of the squares of --mask-shape random, in patches (SimMIM: 2 of 16 px)", least=1)
    ] = 1
    mask_at: Annotated[
        Literal["tokens", "pixels"],
        Option("mask tokens after the stem, or pixels, so that no stem sees masked patches"),
    ] = "tokens"


@dataclass(frozen=True, kw_only=True)
class PixelOptions(Config):
    """Targets and decoder of the methods that predict pixels."""

    GROUP: ClassVar[str] = "predicting pixels (mae, simmim)"

    norm_pixels: Annotated[
        bool | None, Option("normalise each target patch by its mean and standard deviation (default: only mae)")
    ] = None
    decoder_depth: Annotated[int, Option("mae: number of decoder blocks (the decoder is discarded)", least=1)] = 4
    decoder_dim: Annotated[
        int | None,
        Option("mae: width of the decoder, a multiple of 32 (default: half the model's)", least=32,
               allowed="a multiple of 32"),
    ] = None  # fmt: skip

    def _check_pixels(self) -> None:
        dim = self.decoder_dim
        require(dim is None or dim % 32 == 0, "decoder_dim", dim, "a multiple of 32")


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions(Config):
    """The tokenizer of BEiT, which is trained on the same images before the model."""

    GROUP: ClassVar[str] = "tokenizer (beit)"

    tokenizer: Annotated[
        Path | None, Option("use the tokenizer.safetensors of an earlier run instead of training one")
    ] = None
    codes: Annotated[int, Option("number of visual words, the classes to predict", least=2, most=1 << 16)] = 512
    code_dim: Annotated[int, Option("dimension of a visual word", least=1, most=4096)] = 32
    tokenizer_epochs: Annotated[int, Option("epochs of tokenizer training", least=1)] = 10
    tokenizer_lr: Annotated[float, Option("peak learning rate of the tokenizer", above=0)] = 4e-3


@dataclass(frozen=True, kw_only=True)
class DecayOptions(Config):
    """Weight decay that changes."""

    GROUP: ClassVar[str] = "schedule"

    weight_decay_end: Annotated[
        float | None,
        Option("final weight decay, on half a cosine (default: dino 0.4, else constant)", least=0, most=1e6),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Config):
    """Accuracies of the frozen features."""

    GROUP: ClassVar[str] = "evaluation"

    probe: Annotated[
        Literal["auto", "on", "off"],
        Option("k-NN and linear-probe accuracy by class folders, every epoch; auto: for dino", often=True),
    ] = "auto"
    probe_images: Annotated[int, Option("training images for k-NN and linear probe, at most", least=2)] = 10000
    knn_k: Annotated[int, Option("neighbours of the k-NN accuracy", least=1)] = 20

    def _check_probe(self, method: str) -> None:
        if self.probe == "on" or (self.probe == "auto" and method == "dino"):
            return
        for name in ("probe_images", "knn_k"):
            if getattr(self, name) != getattr(type(self), name):
                flag = name.replace("_", "-")
                raise UsageError(
                    f"`--{flag}` is of the scores of --probe on, which is {self.probe}; give it, or neither"
                )


@dataclass(frozen=True, kw_only=True)
class MaskedViewOptions(ViewOptions):
    """Augmentation of training images; without colour jitter, because masking is the stronger change."""

    crop_scale: MaybeCropScale = None  # type: ignore[assignment]  # of the method, once resolved

"""Options of pre-training alone: masks, pixel targets, the tokenizer, views of an image."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.options import Config, Option, require
from vtk.training.options.views import CropScale, ViewOptions


@dataclass(frozen=True, kw_only=True)
class MaskOptions(Config):
    """Which patches are hidden, and where; values left open depend on the method."""

    GROUP: ClassVar[str] = "masks"

    mask_ratio: Annotated[
        float | None,
        Option("fraction of hidden patches (default: 0.4 beit, 0.75 mae, 0.6 simmim)", often=True, above=0, below=1),
    ] = None
    mask_shape: Annotated[
        Literal["random", "block"] | None,
        Option("random squares, or BEiT's rectangles (default: block of beit, else random)"),
    ] = None
    mask_unit: Annotated[
        int, Option("side of the squares of --mask-shape random, in patches (SimMIM: 2 of 16 px)", least=1)
    ] = 1
    mask_at: Annotated[
        Literal["tokens", "pixels"],
        Option("hide tokens behind the stem, or pixels too, so that no stem sees what is hidden"),
    ] = "tokens"


@dataclass(frozen=True, kw_only=True)
class PixelOptions(Config):
    """Targets and decoder of the methods that predict pixels."""

    GROUP: ClassVar[str] = "predicting pixels (mae, simmim)"

    norm_pixels: Annotated[
        bool | None, Option("predict each patch normalised by its own mean and deviation (default: of mae)")
    ] = None
    decoder_depth: Annotated[int, Option("mae: blocks of the decoder, which is thrown away", least=1)] = 4
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
    """The tokenizer of BEiT, which is trained on the same images before the model is."""

    GROUP: ClassVar[str] = "tokenizer (beit)"

    tokenizer: Annotated[Path | None, Option("take the tokenizer.safetensors of an earlier run, and train none")] = None
    codes: Annotated[int, Option("visual words: the classes that are predicted", least=2, most=1 << 16)] = 512
    code_dim: Annotated[int, Option("numbers that make up a visual word", least=1, most=4096)] = 32
    tokenizer_epochs: Annotated[int, Option("passes over the images to train the tokenizer", least=1)] = 10
    tokenizer_lr: Annotated[float, Option("peak learning rate of the tokenizer", above=0)] = 4e-3


@dataclass(frozen=True, kw_only=True)
class MaskedViewOptions(ViewOptions):
    """How training images are varied; masks are the stronger change, so colours stay as they are."""

    crop_scale: CropScale = (0.2, 1.0)

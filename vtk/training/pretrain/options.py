"""The options that only pre-training has: masks, pixel targets, the tokenizer, views of an image."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.training.options.checks import require
from vtk.training.options.views import ViewOptions


@dataclass(frozen=True)
class MaskOptions:
    """Which patches are hidden, and where; values left open depend on the method."""

    mask_ratio: float | None = field(
        default=None,
        metadata={"help": "share of the patches that is hidden; default 0.4 (beit), 0.75 (mae), 0.6 (simmim)"},
    )
    mask_shape: Literal["random", "block"] | None = field(
        default=None,
        metadata={"help": "random squares, or BEiT's rectangles; default block (beit), random (mae, simmim)"},
    )
    mask_unit: int = field(
        default=1, metadata={"help": "side of the squares of --mask-shape random, in patches (SimMIM: 2 of 16 px)"}
    )
    mask_at: Literal["tokens", "pixels"] = field(
        default="tokens",
        metadata={
            "help": "where patches are hidden: tokens, behind the stem; pixels, also in front of it, which is the same "
            "for stems whose patches are independent, and keeps the others from seeing what is hidden"
        },
    )

    def _check_masks(self) -> None:
        ratio, shape, at = self.mask_ratio, self.mask_shape, self.mask_at
        require(ratio is None or 0 < ratio < 1, "mask_ratio", ratio, "above 0 to below 1")
        require(shape in (None, "random", "block"), "mask_shape", shape, "random or block")
        require(self.mask_unit >= 1, "mask_unit", self.mask_unit, "at least 1")
        require(at in ("tokens", "pixels"), "mask_at", at, "tokens or pixels")


@dataclass(frozen=True)
class PixelOptions:
    """Targets and decoder of the methods that predict pixels."""

    norm_pixels: bool | None = field(
        default=None,
        metadata={"help": "of mae and simmim: predict each patch less its mean, over its deviation; default of mae"},
    )
    decoder_depth: int = field(default=4, metadata={"help": "of mae: blocks of the decoder, which is thrown away"})
    decoder_dim: int | None = field(
        default=None,
        metadata={"help": "of mae: width of the decoder; default half of the model's, a multiple of 32"},
    )

    def _check_pixels(self) -> None:
        require(self.decoder_depth >= 1, "decoder_depth", self.decoder_depth, "at least 1")
        dim = self.decoder_dim
        require(dim is None or (dim > 0 and dim % 32 == 0), "decoder_dim", dim, "a multiple of 32")


@dataclass(frozen=True)
class TokenizerOptions:
    """The tokenizer of BEiT, which is trained on the same images before the model is."""

    tokenizer: Path | None = field(
        default=None,
        metadata={"help": "of beit: take this tokenizer (tokenizer.safetensors of an earlier run) and train none"},
    )
    codes: int = field(default=512, metadata={"help": "of beit: visual words, the classes that are predicted"})
    code_dim: int = field(default=32, metadata={"help": "of beit: numbers that make up a visual word"})
    tokenizer_epochs: int = field(default=10, metadata={"help": "of beit: passes over the images for the tokenizer"})
    tokenizer_lr: float = field(default=4e-3, metadata={"help": "of beit: highest learning rate of the tokenizer"})

    def _check_tokenizer(self) -> None:
        require(2 <= self.codes <= 1 << 16, "codes", self.codes, "2 to 65536")
        require(1 <= self.code_dim <= 4096, "code_dim", self.code_dim, "1 to 4096")
        require(self.tokenizer_epochs >= 1, "tokenizer_epochs", self.tokenizer_epochs, "at least 1")
        require(self.tokenizer_lr > 0, "tokenizer_lr", self.tokenizer_lr, "above 0")


@dataclass(frozen=True)
class MaskedViewOptions(ViewOptions):
    """How training images are varied; masks are the stronger change, so colours stay as they are."""

    crop_scale: tuple[float, ...] = field(
        default=(0.2, 1.0),
        metadata={"help": "smallest and largest area of a random training crop"},
    )

"""Tokenizer of BEiT: turns each patch of an image into one of a few hundred visual words, and words into an image.

A vector-quantised autoencoder (van den Oord et al. 2017) of patches. The encoder sees one patch at a time, so that a
word describes its own patch only; the decoder also sees neighbouring words. Words and encodings are compared as
unit vectors (Yu et al. 2022, sec. 3.2), which keeps more of the codebook in use.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.card import InputSpec, from_plain
from vtk.errors import DataError, UsageError
from vtk.files import replace_file
from vtk.formats import parse_json, save_tensors
from vtk.models.weights.base import tensor_hash
from vtk.models.weights.files import read_safetensors
from vtk.training.pretrain.patches import patchify, unpatchify

KEY = "vtk_tokenizer"
"""Key of the description in the file's metadata."""
_LARGEST = 1 << 16


@dataclass(frozen=True)
class TokenizerSpec:
    """Description of a tokenizer, stored in its file.

    Attributes:
        patch_height: pixels.
        patch_width: pixels.
        in_chans: channels of an image.
        codes: number of visual words.
        dim: dimension of a word.
        hidden: width of encoder and decoder.
        mean: per channel, of its input.
        std: per channel.
    """

    patch_height: int
    patch_width: int
    in_chans: int
    codes: int
    dim: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    hidden: int = 256


class Quantized:
    """Encodings of patches and their nearest words."""

    def __init__(self, encoded: Tensor, words: Tensor) -> None:
        """Find the words.

        Args:
            encoded: (B, N, D) unit vectors.
            words: (K, D) unit vectors.
        """
        self.encoded = encoded
        self.ids = (encoded.detach() @ words.detach().T).argmax(-1)
        """(B, N) int64."""
        self.nearest = words[self.ids]
        """(B, N, D)."""

    @property
    def passed(self) -> Tensor:
        """The words; their gradient passes unchanged to the encodings (straight-through)."""
        return self.encoded + (self.nearest - self.encoded).detach()

    @property
    def loss(self) -> Tensor:
        """Mean squared distance, which pulls words to encodings and, with weight ¼, encodings to words.

        The mean is over the numbers of a word, too: their sum would outweigh the error of the pixels, and encodings
        would gather around few words.
        """
        towards = F.mse_loss(self.nearest, self.encoded.detach())
        commitment = F.mse_loss(self.encoded, self.nearest.detach())
        return towards + 0.25 * commitment


class Tokenizer(nn.Module):
    """Patches to visual words and back.

    Args:
        spec: sizes.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        super().__init__()
        self.spec = spec
        pixels, hidden = spec.patch_height * spec.patch_width * spec.in_chans, spec.hidden
        self.encoder = nn.Sequential(
            nn.Linear(pixels, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, spec.dim)
        )
        self.words = nn.Parameter(torch.randn(spec.codes, spec.dim))
        self.decoder = nn.Sequential(
            nn.Conv2d(spec.dim, hidden, 3, padding=1), nn.GELU(), nn.Conv2d(hidden, hidden, 1), nn.GELU(),
            nn.Conv2d(hidden, pixels, 1),
        )  # fmt: skip

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Return the patches of images (B, C, H, W), height and width."""
        return images.shape[-2] // self.spec.patch_height, images.shape[-1] // self.spec.patch_width

    def encode(self, images: Tensor) -> Tensor:
        """Return unit vectors (B, N, D) of the patches of images (B, C, H, W)."""
        return F.normalize(self.encoder(patchify(images, self.grid(images))), dim=-1)

    def quantize(self, images: Tensor) -> Quantized:
        """Return encodings and words of images (B, C, H, W)."""
        return Quantized(self.encode(images), F.normalize(self.words, dim=-1))

    @torch.no_grad()
    def ids(self, images: Tensor) -> Tensor:
        """Return the words (B, N) int64 of images (B, C, H, W)."""
        return self.quantize(images).ids

    def decode(self, words: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return images of words (B, N, D) on a grid."""
        (rows, columns), spec = grid, self.spec
        pixels = self.decoder(words.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)
        size = spec.in_chans, rows * spec.patch_height, columns * spec.patch_width
        return unpatchify(pixels, grid, size)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the reconstructed images, the loss of the words, the words' numbers, and the encodings."""
        quantized = self.quantize(images)
        return self.decode(quantized.passed, self.grid(images)), quantized.loss, quantized.ids, quantized.encoded

    @property
    def id(self) -> str:
        """Hash of the sizes and of all values."""
        digest = hashlib.sha256(json.dumps(asdict(self.spec), sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor_hash(tensor)}\n".encode())
        return digest.hexdigest()


def save_tokenizer(path: Path, tokenizer: Tokenizer, numbers: dict[str, Any]) -> None:
    """Write a tokenizer, whole or not at all; ``numbers`` are its statistics.

    Raises:
        DataError: the file cannot be written.
    """
    description = {"schema": 1, "spec": asdict(tokenizer.spec), "numbers": numbers}
    with replace_file(path) as tmp:
        state = {name: tensor.detach().cpu() for name, tensor in tokenizer.state_dict().items()}
        save_tensors(tmp, state, {KEY: json.dumps(description)})


def load_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Read what `save_tokenizer` wrote: a tokenizer in eval mode, and its numbers.

    Raises:
        DataError: the file is absent, damaged, or not a tokenizer.
    """
    tensors, metadata = read_safetensors(path)
    if KEY not in metadata:
        raise DataError(f"{path} is not a tokenizer; `vtk pretrain --method beit` writes RUN/tokenizer.safetensors")
    description = parse_json(metadata[KEY], f"the description of {path}")
    if not isinstance(description, dict) or description.get("schema") != 1:
        raise DataError(f"{path} is a tokenizer of another version of vtk, or was edited; train a new one")
    spec = from_plain(TokenizerSpec, description.get("spec"), str(path))
    sizes = (spec.patch_height, spec.patch_width, spec.in_chans, spec.codes, spec.dim, spec.hidden)
    if not all(1 <= size <= _LARGEST for size in sizes) or tensors.get("words", torch.empty(0)).numel() == 0:
        raise DataError(f"{path} describes an invalid tokenizer; the file was edited or damaged")
    with torch.device("meta"):
        tokenizer = Tokenizer(spec)
    for name, needed in tokenizer.state_dict().items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != needed.shape or not bool(tensor.isfinite().all()):
            raise DataError(f"{path}: `{name}` is absent, of another shape, or not finite; the file was cut or edited")
    tokenizer.load_state_dict({k: v.float() for k, v in tensors.items()}, assign=True)
    numbers = description.get("numbers")
    return tokenizer.eval().requires_grad_(False), numbers if isinstance(numbers, dict) else {}


def check_fits(tokenizer: Tokenizer, patch: tuple[int, int], spec: InputSpec, path: Path) -> None:
    """Refuse a tokenizer whose words are not of this model's patches.

    Raises:
        UsageError: another size of patch, number of channels, or statistics of pixels.
    """
    own = tokenizer.spec
    if (own.patch_height, own.patch_width) != patch:
        raise UsageError(
            f"`--tokenizer` {path} is for patches of {own.patch_height}×{own.patch_width} px; the model has "
            f"{patch[0]}×{patch[1]}: leave the option out to train one"
        )
    if (own.in_chans, own.mean, own.std) != (spec.in_chans, spec.mean, spec.std):
        raise UsageError(
            f"`--tokenizer` {path} takes {own.in_chans} channels with mean {own.mean} and std {own.std}, the model "
            f"{spec.in_chans} with {spec.mean} and {spec.std}; give --mean and --std, or train another tokenizer"
        )

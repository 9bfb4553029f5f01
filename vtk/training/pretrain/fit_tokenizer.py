"""Trains a tokenizer through the common engine; words that no patch uses are moved to where patches are."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vtk import console
from vtk.data.loading.loader import Transform, make_loader
from vtk.data.loading.samplers import mix
from vtk.errors import UsageError
from vtk.training.engine.fitting import DivergedError, fit
from vtk.training.engine.precision import Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.engine.result import EpochEnd
from vtk.training.engine.streams import ImageStream
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.seeds import number_images
from vtk.training.pretrain.tokenizer import Tokenizer, TokenizerSpec


class Reconstruction:
    """Mean squared error of pixels, and the loss of the words.

    Attributes:
        counts: (K,) how often each word was the nearest in this epoch, by this process.
        encoded: (b, N, D) encodings of the latest batch, of this process.
    """

    def __init__(self, codes: int, device: torch.device) -> None:
        self.counts = torch.zeros(codes, dtype=torch.int64, device=device)
        self.encoded = torch.empty(0)

    def start_epoch(self, seed: int) -> None:
        """Count from zero."""
        self.counts.zero_()

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the loss, and the error of the pixels alone as ``mse``."""
        images, words, ids, encoded = model(batch.images)
        error = F.mse_loss(images, batch.images)
        self.counts += ids.flatten().bincount(minlength=len(self.counts))
        self.encoded = encoded.detach()
        return error + words, {"mse": error.detach()}


def usage(counts: Tensor) -> tuple[float, float]:
    """Return the share of words that are in use, and the perplexity: e to the entropy (in nats) of their use."""
    share = counts.double() / counts.sum().clamp(min=1)
    entropy = -(share * share.clamp(min=1e-300).log()).sum()
    return float((counts > 0).double().mean()), float(entropy.exp())


@torch.no_grad()
def move_words(tokenizer: Tokenizer, which: Tensor, encoded: Tensor, seed: int, ranks: Ranks) -> None:
    """Put the words ``which`` (K,) bool where encodings (b, N, D) of all processes' images are.

    Encodings are drawn with a probability that grows with their distance (1 - cosine) from the nearest word that stays,
    so that words go where they are missed. Where there are fewer encodings than words to move, some get several, each
    a little aside.
    """
    count, words = int(which.sum()), F.normalize(tokenizer.words, dim=-1)
    if count == 0:
        return
    encoded = _together(encoded, ranks).to(words).flatten(0, 1)
    generator = torch.Generator().manual_seed(seed)
    missed = torch.ones(len(encoded))
    if not which.all():
        missed = (1 - (encoded @ words[~which].T).amax(1)).clamp(min=1e-6).cpu()
    order = torch.multinomial(missed, min(count, len(encoded)), generator=generator)
    order = order.repeat(-(-count // len(order)))[:count]
    aside = 1e-2 * torch.randn(count, encoded.shape[1], generator=generator)
    tokenizer.words[which] = encoded[order.to(encoded.device)] + aside.to(encoded.device)
    ranks.broadcast([tokenizer.words.data])


def _together(own: Tensor, ranks: Ranks) -> Tensor:
    """Return the parts of a batch of all processes, in the order of a single process."""
    parts = ranks.gather(own.detach().cpu())
    whole = torch.empty(sum(map(len, parts)), *own.shape[1:], dtype=own.dtype)
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


def fit_tokenizer(
    setting: Setting, patch: tuple[int, int], augment: Transform, plain: Transform
) -> tuple[Tokenizer, dict[str, Any]]:
    """Train a tokenizer on the images of a run; return it, in eval mode on the device, and its statistics.

    Raises:
        UsageError: there are more words than patches.
        DivergedError: its loss became infinite or NaN.
    """
    config, spec, ranks, seed = setting.config, setting.spec, setting.ranks, setting.config.seed
    patches = len(setting.audit.train) * (spec.height // patch[0]) * (spec.width // patch[1])
    if config.codes > patches:
        raise UsageError(
            f"`--codes` {config.codes} exceeds the {patches} patches of the training images; give fewer codes or more "
            "images"
        )
    own = dataclasses.replace(
        config, epochs=config.tokenizer_epochs, lr=config.tokenizer_lr, optimizer="adamw", opt_kwargs=(),
        weight_decay=0.0, accumulate=1, clip_grad=1.0, ema=None, grad_checkpointing=False, compile=False,
        stop_after=None,
    )  # fmt: skip
    torch.manual_seed(mix(seed, 0x70C))
    sizes = TokenizerSpec(*patch, spec.in_chans, config.codes, config.code_dim, spec.mean, spec.std)
    tokenizer = Tokenizer(sizes).to(ranks.device)
    stream = ImageStream(
        number_images(setting.audit.train), augment, batch_size=config.batch_size, seed=mix(seed, 0x70C) & 0xFFFFFFFF,
        workers=setting.workers, ranks=ranks, max_pixels=config.max_pixels,
    )  # fmt: skip
    held_out = make_loader(
        number_images(setting.audit.val), plain, batch_size=config.eval_batch_size, shuffle=False, seed=seed,
        workers=setting.workers, max_pixels=config.max_pixels,
    )  # fmt: skip
    objective = Reconstruction(config.codes, ranks.device)
    first = next(iter(stream.epoch(0))).to(ranks.device)
    every = torch.ones(config.codes, dtype=torch.bool, device=ranks.device)
    move_words(tokenizer, every, tokenizer.encode(first.images), mix(seed, 0x5EED), ranks)
    numbers: dict[str, Any] = {}

    def epoch_end(end: EpochEnd) -> Mapping[str, float]:
        counts = ranks.sum(objective.counts)
        used, perplexity = usage(counts)
        error = _held_out_error(tokenizer, held_out, ranks)
        numbers.update(codes=config.codes, codes_used=used, perplexity=perplexity, val_mse=error)
        moved = 0
        if end.epoch < own.epochs:
            moved = int((counts == 0).sum())
            move_words(tokenizer, counts == 0, objective.encoded, mix(seed, 0x5EED, end.epoch), ranks)
        if ranks.main:
            console.say(
                f"tokenizer epoch {end.epoch}/{own.epochs}: held-out error {error:.4f}, "
                f"{console.percent(used, 0)} of {config.codes} words in use, perplexity {perplexity:.0f}"
                + (f", {moved} moved" if moved else "")
            )
        return {}

    try:
        fit(tokenizer, objective, [stream], own, Fp32(), ranks=ranks, on_epoch=epoch_end)
    except DivergedError as error:
        raise DivergedError(f"the tokenizer: {str(error).replace('--lr', '--tokenizer-lr')}") from error
    return tokenizer.eval().requires_grad_(False), numbers


@torch.no_grad()
def _held_out_error(tokenizer: Tokenizer, loader: DataLoader[Any], ranks: Ranks) -> float:
    """Return the mean squared error over the normalised pixels of the held-out images."""
    total, count = 0.0, 0
    for images in _images(loader, ranks):
        total += float((tokenizer(images)[0] - images).double().square().mean()) * len(images)
        count += len(images)
    return total / count


def _images(loader: DataLoader[Any], ranks: Ranks) -> Iterator[Tensor]:
    for images, _ in loader:
        yield images.to(ranks.device)

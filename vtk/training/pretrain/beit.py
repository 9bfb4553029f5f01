"""BEiT (Bao et al. 2021): predicts the visual words of hidden patches.

The tokenizer that gives the words is trained on the same images (Touvron et al. 2022, sec. 5); nothing is downloaded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk import console
from vtk.card import InputSpec
from vtk.data.loading.loader import Transform
from vtk.errors import DataError
from vtk.training.objectives.base import Batch, Objective
from vtk.training.pretrain import reconstruction_plots
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.fit_tokenizer import fit_tokenizer
from vtk.training.pretrain.masked_method import MaskedMethod, TokenModel
from vtk.training.pretrain.masks import Masks
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.patches import positions_of
from vtk.training.pretrain.tokenizer import Tokenizer, check_fits, load_tokenizer, save_tokenizer
from vtk.training.runs.outputs import RECONSTRUCTION, TOKENIZER

SHOWN = -100
"""Target of visible patches, which torch's cross-entropy ignores."""
_FEW = 0.5  # share of words in use below which a run suggests longer training


class WordObjective:
    """Cross-entropy of the words of hidden patches, in fp32 or wider.

    Args:
        masks: what is hidden.
        tokenizer: on the device.
    """

    def __init__(self, masks: Masks, tokenizer: Tokenizer) -> None:
        self.masks, self.tokenizer = masks, tokenizer

    def start_epoch(self, seed: int) -> None:
        """Do nothing: masks follow from the seed of each image."""

    def prepare(self, batch: Batch) -> Batch:
        """Turn the seeds into the words (B, N) of hidden patches, and `SHOWN` elsewhere."""
        words = self.tokenizer.ids(batch.images)
        return Batch(batch.images, words.masked_fill(~self.masks.draw(batch.labels), SHOWN), batch.stream)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss and top-1 over hidden patches, of which every image has the same number."""
        mask = batch.labels != SHOWN
        logits = model(batch.images, mask, count=self.masks.count).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        words = batch.labels.gather(1, positions_of(mask, self.masks.count)).flatten()
        return F.cross_entropy(logits, words), {"words_top1": (logits.argmax(-1) == words).float().mean()}


class Beit(MaskedMethod):
    """Trains or loads a tokenizer, and predicts its words."""

    tokenizer: Tokenizer | None = None
    patch: tuple[int, int]

    def __init__(self) -> None:
        self.word_numbers: dict[str, Any] = {}

    def check(self, backbone: nn.Module, config: PretrainConfig, spec: InputSpec) -> None:
        """Refuse a backbone that merges its patches, and a tokenizer of other patches.

        Raises:
            UsageError: the backbone or the tokenizer does not fit.
            DataError: the tokenizer cannot be read.
        """
        super().check(backbone, config, spec)
        rows, columns = self.masks.grid
        self.patch = spec.height // rows, spec.width // columns
        if config.tokenizer is not None:
            try:
                self._take(*load_tokenizer(config.tokenizer))
            except DataError as error:
                raise DataError(f"`--tokenizer`: {error}") from error
            assert self.tokenizer is not None
            check_fits(self.tokenizer, self.patch, spec, config.tokenizer)

    def transforms(self, augment: Callable[..., Transform], plain: Transform) -> tuple[Transform, Transform]:
        """Return both unchanged; the tokenizer learns from the same."""
        self._views = augment(), plain
        return self._views

    def model(self, backbone: nn.Module, setting: Setting) -> nn.Module:
        """Return the backbone with a mask token and a layer of logits; train the tokenizer, if there is none."""
        if self.tokenizer is None and setting.config.resume:
            try:
                self._take(*load_tokenizer(setting.out / TOKENIZER))
            except DataError as error:
                raise DataError(
                    f"`--resume`: {error}; restore the tokenizer of the run, or use --overwrite instead of --resume"
                ) from error
        codes = setting.config.codes if self.tokenizer is None else self.tokenizer.spec.codes
        model = self.ready(TokenModel(backbone, codes, setting.config.mask_at), setting)
        if self.tokenizer is None:
            self._take(*fit_tokenizer(setting, self.patch, *self._views))
        return model

    def objective(self, setting: Setting) -> Objective:
        """Return the cross-entropy of hidden words; write the tokenizer."""
        assert self.tokenizer is not None
        kept = setting.out / TOKENIZER
        if setting.ranks.main and not setting.config.resume:
            save_tokenizer(kept, self.tokenizer, self.word_numbers)
            console.say(f"tokenizer {kept}: {self._words()}")
        return WordObjective(self.masks, self.tokenizer.to(setting.ranks.device))

    @torch.no_grad()
    def draw(self, model: nn.Module, images: Tensor, setting: Setting) -> None:
        """Draw images as the tokenizer reconstructs them: the most that words can represent."""
        assert self.tokenizer is not None
        columns = [images, self.tokenizer(images)[0]]
        reconstruction_plots.draw(columns, ("original", "from words"), setting.spec, setting.out / RECONSTRUCTION)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of masked patches and of the tokenizer."""
        assert self.tokenizer is not None
        rows, columns = self.masks.grid
        numbers = {"masked": self.masks.count, "patches": rows * columns}
        return numbers | {"tokenizer": {**self.word_numbers, "id": self.tokenizer.id[:16]}}

    def _take(self, tokenizer: Tokenizer, numbers: dict[str, Any]) -> None:
        self.tokenizer, self.word_numbers = tokenizer, numbers

    def _words(self) -> str:
        used, perplexity = self.word_numbers.get("codes_used"), self.word_numbers.get("perplexity")
        if used is None or perplexity is None:
            return "its file has no statistics on the use of words"
        advice = "; so few carry little information: use more --tokenizer-epochs" if used < _FEW else ""
        return f"{console.percent(used, 0)} of its words in use, perplexity {perplexity:.0f}{advice}"

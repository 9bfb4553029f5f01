"""Training of a model that answers questions about pictures in vtk's loop, and its accuracy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from data import Questions
from torch import Tensor, nn

from vtk.data.loading.samplers import mix
from vtk.training.objectives.base import Batch


@dataclass(frozen=True)
class QuestionBatch(Batch):
    """Pictures with questions; ``labels`` are the answers (B, answers) fp32.

    Attributes:
        words: (B, T) int64.
    """

    words: Tensor = field(default_factory=Tensor)

    def to(self, device: torch.device) -> "QuestionBatch":
        """Return the batch on ``device``."""
        return QuestionBatch(self.images.to(device), self.labels.to(device), self.stream, self.words.to(device))


class QuestionStream:
    """Questions in a seeded order; in memory, since there are few."""

    def __init__(self, questions: Questions, answers: int, batch_size: int, seed: int) -> None:
        self.questions, self.seed, self.batch_size = questions, seed, batch_size
        self.targets = F.one_hot(questions.answers, answers).float()
        full, rest = divmod(len(questions), batch_size)
        self.sizes = [batch_size] * full + [rest] * bool(rest)

    def epoch(self, index: int) -> Iterator[Batch]:
        """Yield the batches of epoch ``index``."""
        order = torch.from_numpy(np.random.default_rng(mix(self.seed, index)).permutation(len(self.questions)))
        for chosen in order.split(self.batch_size):
            images, words = self.questions.images[chosen], self.questions.words[chosen]
            yield QuestionBatch(images, self.targets[chosen], words=words)


class AnswerObjective:
    """ViLT's loss for VQAv2: binary cross-entropy of each answer, summed over the answers."""

    def start_epoch(self, seed: int) -> None:
        """Nothing is drawn here."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean over questions."""
        assert isinstance(batch, QuestionBatch)
        each = F.binary_cross_entropy_with_logits(answer(model, batch.images, batch.words), batch.labels)
        return each * batch.labels.shape[1], {}


def answer(model: nn.Module, images: Tensor, words: Tensor) -> Tensor:
    """Return logits (B, answers)."""
    return model(input_ids=words, attention_mask=(words > 0).long(), pixel_values=images).logits


@torch.no_grad()
def logits(model: nn.Module, questions: Questions) -> Tensor:
    """Return logits (n, answers) in evaluation mode, the same in every call."""
    model.eval()
    torch.manual_seed(0)  # ViLT shuffles the patches of a picture, which changes the last digits of sums over them
    parts = zip(questions.images.split(100), questions.words.split(100), strict=True)
    return torch.cat([answer(model, *part) for part in parts])


def accuracy(found: Tensor, questions: Questions) -> dict[str, float]:
    """Return the share of right answers, of all questions and of each kind."""
    right = found.argmax(1) == questions.answers
    shares = {"all": float(right.float().mean())}
    for kind in dict.fromkeys(questions.kinds):
        shares[kind] = float(right[[k == kind for k in questions.kinds]].float().mean())
    return shares

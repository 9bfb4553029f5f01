"""Held-out images in two halves, and the answers of models for them; training images as model inputs."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vtk.card import Card
from vtk.data.audit.result import Sample
from vtk.data.decoding.decode import pixel_limit
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import Transform, make_loader, set_epoch
from vtk.data.loading.train_pipeline import train_transform
from vtk.errors import UsageError
from vtk.packs.compression.answers import Answers, collect
from vtk.packs.compression.halves import halve, label_sets

_KEPT = 1 << 30
"""Most bytes of decoded images that stay in memory between the candidates."""


class HeldOut:
    """Labelled images that the pack was not trained on.

    Args:
        card: of the model.
        samples: files and labels.
        digests: of the files' bytes, by path; copies of one image stay in one half.
        what: they are, in words.
        device: that models run on.
        dtype: that they run in.
        batch_size: images per forward pass.
        workers: processes that decode.
        seed: of the halves.

    Attributes:
        choosing: places of the images that choose.
        judging: places of those that judge.
        labels: classes of each image.
    """

    def __init__(
        self, card: Card, samples: Sequence[Sample], digests: Mapping[Path, str], what: str, *, device: torch.device,
        dtype: torch.dtype, batch_size: int, workers: int, seed: int,
    ) -> None:  # fmt: skip
        self.card, self.samples, self.what = card, list(samples), what
        self.device, self.dtype, self.batch_size, self.workers = device, dtype, batch_size, workers
        self.labels = label_sets([sample.label for sample in self.samples])
        keys = [digests.get(sample.path) or str(sample.path) for sample in self.samples]
        self.choosing, self.judging = halve(self.labels, keys, seed)
        self._kept: list[tuple[Tensor, Tensor]] | None = None

    def check_halves(self) -> None:
        """Refuse images of which one half would be empty.

        Raises:
            UsageError: says how many there are.
        """
        if not self.choosing or not self.judging:
            raise UsageError(
                f"`--rank auto` needs two different held-out images at least, one to choose and one to judge; there "
                f"are {len(self.samples)} {self.what}: give more, or --rank R"
            )
        for half in (self.choosing, self.judging):
            if not any(self.labels[i] for i in half):
                raise UsageError(
                    f"`--rank auto` needs images with labels in both halves; too few of the {len(self.samples)} "
                    f"{self.what} have one: give more, or --rank R"
                )

    def answers(self, model: nn.Module, title: str) -> Answers:
        """Return the answers of a model for all images, in their order and in the batches of an evaluation."""
        return self._run(model, self._loader(self.samples), title, len(self.samples))

    def choosing_answers(self, model: nn.Module, title: str) -> Answers:
        """Return the answers of a model for the images that choose."""
        if self._kept is None:
            spec = self.card.input
            each = 4 * spec.in_chans * spec.height * spec.width
            loader = self._loader([self.samples[i] for i in self.choosing])
            if each * len(self.choosing) > _KEPT:
                return self._run(model, loader, title, len(self.choosing))
            self._kept = list(loader)
        return self._run(model, self._kept, title, len(self.choosing))

    def _loader(self, samples: Sequence[Sample]) -> "torch.utils.data.DataLoader[tuple[Tensor, Tensor]]":
        return make_loader(
            samples, eval_transform(self.card.input), batch_size=self.batch_size, shuffle=False, seed=0,
            workers=self.workers, max_pixels=pixel_limit(self.card),
        )  # fmt: skip

    def _run(self, model: nn.Module, batches: object, title: str, count: int) -> Answers:
        running = model
        if self.dtype != torch.float32:
            running = copy.deepcopy(model).to(self.dtype)
        predict: Callable[[Tensor], Tensor] = lambda images: running(images.to(self.device, self.dtype))  # noqa: E731
        return collect(predict, batches, self.card.classes, title=title, count=count)  # type: ignore[arg-type]


class TrainingImages:
    """Training images without their labels, as inputs of the model.

    Args:
        card: of the model.
        samples: files.
        what: they are, in words.
        device: where the inputs go.
        workers: processes that decode.
        seed: of the order and of the random crops.
    """

    def __init__(
        self, card: Card, samples: Sequence[Sample], what: str, *, device: torch.device, workers: int, seed: int
    ) -> None:
        self.card, self.samples, self.what = card, list(samples), what
        self.device, self.workers, self.seed = device, workers, seed

    def __len__(self) -> int:
        return len(self.samples)

    def some(self, count: int, batch_size: int) -> Iterator[Tensor]:
        """Yield at most ``count`` images, preprocessed as in evaluation, in batches."""
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.seed)).tolist()
        chosen = [self.samples[i] for i in sorted(order[:count])]
        for images, _ in self._loader(chosen, eval_transform(self.card.input), batch_size, shuffle=False):
            yield images.to(self.device)

    def endless(self, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of random crops without end, every image once before one comes again."""
        # not mirrored: what a class means may depend on it, and its probability in training is not known here
        transform = train_transform(self.card.input, hflip=0.0)
        loader = self._loader(self.samples, transform, batch_size, shuffle=True)
        epoch = 0
        while True:
            set_epoch(loader, epoch)
            for images, _ in loader:
                yield images.to(self.device)
            epoch += 1

    def _loader(
        self, samples: Sequence[Sample], transform: Transform, batch_size: int, *, shuffle: bool
    ) -> "torch.utils.data.DataLoader[tuple[Tensor, Tensor]]":
        return make_loader(
            samples, transform, batch_size=batch_size, shuffle=shuffle, seed=self.seed, workers=self.workers,
            max_pixels=pixel_limit(self.card),
        )  # fmt: skip

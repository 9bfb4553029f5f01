"""Objectives: prepare a batch once, and compute its loss as often as the step rule asks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from vtk.training.random_states import numpy_state, to_numpy


@dataclass(frozen=True)
class Batch:
    """Images of one forward pass.

    Attributes:
        images: (B, C, H, W) fp32.
        labels: (B,) int64, or (B, classes) fp32: how much of each class, or label, an image has.
        stream: index of the stream it came from.
    """

    images: Tensor
    labels: Tensor
    stream: int = 0

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on ``device``; the copy may still be under way (pinned memory)."""
        move = {"device": device, "non_blocking": True}
        return Batch(self.images.to(**move), self.labels.to(**move), self.stream)  # type: ignore[call-overload]


class Objective(Protocol):
    """A training task.

    One whose ``static`` is true computes its loss without looking at a number on the host, so a step may be captured.
    """

    def start_epoch(self, seed: int) -> None:
        """Seed whatever `prepare` draws; called at the start of each epoch so that a resumed run draws the same."""

    def prepare(self, batch: Batch) -> Batch:
        """Change a batch on the device, once per batch (mixing images); the step rule may then use it twice."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss over the batch (scalar, with graph) and further numbers to log, on the device."""


@runtime_checkable
class Stateful(Protocol):
    """An objective that draws random numbers within an epoch, or counts in it."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands: numbers, texts, tensors, and lists and dicts of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class Classification:
    """Cross-entropy with label smoothing, and timm's mixup and cutmix.

    With class weights w, an image of class a costs w_a·CE(a), and a mixed one λ·w_a·CE(a) + (1 − λ)·w_b·CE(b): the
    weight is that of an image's own class, and multiplies its whole loss, smoothing included. torch's weighted
    cross-entropy instead weighs every entry of a smoothed target by the class it stands for, so that an image of a
    frequent class costs most where it does *not* look like a rare one.

    Args:
        num_classes: width of the logits.
        smoothing: fraction of the target spread evenly over all classes.
        mixup: alpha of mixup, 0 for none.
        cutmix: alpha of cutmix, 0 for none; with both, each batch takes one of them by chance.
        prob: fraction of batches that are mixed.
        weights: of each class; None for all alike. The mean is over images, so that neither the batch size nor the
            number of processes changes what an image counts.
    """

    static = True

    def __init__(
        self, num_classes: int, *, smoothing: float = 0.0, mixup: float = 0.0, cutmix: float = 0.0, prob: float = 1.0,
        weights: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        self.num_classes, self.smoothing = num_classes, smoothing
        self.weights = None if weights is None else torch.tensor(weights)
        self._mix: Mixup | None = None
        # weights are of classes: what is smoothed already tells no longer which class was an image's own
        self._smoothed_when_mixed = 0.0 if weights is not None else smoothing
        if mixup > 0 or cutmix > 0:
            spread = self._smoothed_when_mixed
            self._mix = Mixup(mixup, cutmix, prob=prob, label_smoothing=spread, num_classes=num_classes)
        self._random = np.random.RandomState(0).get_state()

    def start_epoch(self, seed: int) -> None:
        """Seed mixup."""
        self._random = np.random.RandomState(seed % 2**32).get_state()

    def state_dict(self) -> dict[str, Any]:
        """Return where the generator of mixup stands."""
        return {"random": numpy_state(self._random)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._random = to_numpy(state["random"])

    def prepare(self, batch: Batch) -> Batch:
        """Mix pairs of images; in an odd batch the last one stays as it is."""
        if self._mix is None:
            return batch
        images, labels = batch.images, batch.labels
        even = len(images) // 2 * 2
        targets = torch.empty(len(labels), self.num_classes, device=labels.device)
        if even:
            mix = self._mix
            # timm draws from numpy's global generator; data loading must not change what is drawn here
            mixed, targets[:even] = self._own_random(lambda: mix(images[:even], labels[:even]))
            images = torch.cat([mixed, images[even:]]) if even < len(images) else mixed
        targets[even:] = smooth(labels[even:], self.num_classes, self._smoothed_when_mixed)
        return Batch(images, targets, batch.stream)

    def _own_random(self, draw: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        outside = np.random.get_state()
        np.random.set_state(self._random)
        try:
            return draw()
        finally:
            self._random = np.random.get_state()
            np.random.set_state(outside)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss in fp32; see `criterion`."""
        return self.criterion(model(batch.images), batch), {}

    def criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of logits (B, classes), in fp32 or wider, of a batch that went through `prepare`."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.weights is None:  # soft labels already hold their smoothing
            smoothing = self.smoothing if batch.labels.ndim == 1 else 0.0
            return F.cross_entropy(wide, batch.labels, label_smoothing=smoothing)
        self.weights = self.weights.to(wide)
        own = one_hot(batch.labels, self.num_classes) if batch.labels.ndim == 1 else batch.labels
        counted = own * self.weights  # λ·w_a at class a and (1 − λ)·w_b at class b
        spread = counted.sum(1, keepdim=True) * (self.smoothing / self.num_classes)
        return F.cross_entropy(wide, counted * (1 - self.smoothing) + spread)


class JointObjective:
    """The objectives of several tasks whose images go through one model together; stream i is task i's.

    Args:
        parts: what each task minimises.
    """

    def __init__(self, parts: Sequence[Classification]) -> None:
        self.parts = parts

    def start_epoch(self, seed: int) -> None:
        """Seed every task alike: each draws what it would in a run of its own."""
        for part in self.parts:
            part.start_epoch(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return where each task's generator stands."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)

    def prepare(self, batch: Batch) -> Batch:
        """Prepare a batch as its task does."""
        return self.parts[batch.stream].prepare(batch)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss of one task's batch."""
        return self.losses(model, [batch])[0]

    def losses(self, model: nn.Module, batches: Sequence[Batch]) -> list[tuple[Tensor, Mapping[str, Tensor | float]]]:
        """Return the mean loss of each batch, from one forward pass; no two batches are of one task."""
        logits = model(*(batch.images for batch in batches), tasks=tuple(batch.stream for batch in batches))
        return [
            (self.parts[batch.stream].criterion(found, batch), {}) for found, batch in zip(logits, batches, strict=True)
        ]


def smooth(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return (B, num_classes) targets: 1 - smoothing on the label plus smoothing / num_classes everywhere."""
    return one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return (B, num_classes) bool; unlike torch's own it looks at no label on the host."""
    return labels[:, None] == torch.arange(num_classes, device=labels.device)

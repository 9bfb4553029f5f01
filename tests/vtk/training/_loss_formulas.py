"""The losses of docs/guides/training.md image by image, in fp64 and without torch's losses; and steps of SGD by them.

Only elementary operations are used, so that autograd can differentiate what is written here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

STEP = 1.25  # of an adversary, in its radius


def log_softmax(z: Tensor) -> Tensor:
    z = z - z.detach().max(1, keepdim=True).values
    return z - z.exp().sum(1, keepdim=True).log()


def log_sigmoid(z: Tensor) -> Tensor:
    return torch.where(z < 0, z, 0.0) - (1 + (-z.abs()).exp()).log()


def bce(z: Tensor, q: Tensor | float) -> Tensor:
    return -q * log_sigmoid(z) - (1 - q) * log_sigmoid(-z)


def class_weights(labels: Tensor, classes: int) -> Tensor:
    """Images / (classes that have images × images of the class)."""
    counts = [int((labels == c).sum()) for c in range(classes)]
    present = sum(count > 0 for count in counts)
    return torch.tensor([len(labels) / (present * n) if n else 0.0 for n in counts], dtype=torch.float64)


def label_weights(labels: Tensor) -> Tensor:
    """Images without the label / images with it; 1 where one of both is none."""
    having = labels.double().sum(0)
    lacking = len(labels) - having
    return torch.where((having > 0) & (lacking > 0), lacking / having.clamp_min(1), 1.0)


@dataclass
class Mixed:
    """Images as they are trained on: ``share`` of each is its own, the rest that of another.

    Attributes:
        images: (B, C, H, W) fp64, mixed.
        own: labels (B,) or (B, n).
        other: labels of the image that was mixed in.
        share: (B,) fp64.
        answer: of the teacher about the mixed images.
    """

    images: Tensor
    own: Tensor
    other: Tensor
    share: Tensor
    answer: dict[str, Tensor]

    def rows(self, rows: Tensor) -> "Mixed":
        """Return some of the images."""
        answer = {key: value[rows] for key, value in self.answer.items()}
        return Mixed(self.images[rows], self.own[rows], self.other[rows], self.share[rows], answer)


class Formulas:
    """The cost of each image, as the options say.

    Args:
        options: of a config, by name.
        labels: of all training images.
        classes: how many.
    """

    def __init__(self, options: Any, labels: Tensor, classes: int) -> None:
        self.options, self.classes = options, classes
        weights = label_weights(labels) if options.multi_label else class_weights(labels, classes)
        self.weights = weights if options.class_weights == "balanced" else torch.ones(classes, dtype=torch.float64)

    def __call__(self, logits: Tensor, inside: dict[str, Tensor], batch: Mixed) -> Tensor:
        """Return (B,) costs.

        Args:
            logits: (B, classes) fp64.
            inside: features (B, C) and tokens (B, N, C) of the model.
            batch: labels, and what the teacher answers.
        """
        alpha = self.options.distill_alpha if self.options.distill_from else 0.0
        found = (1 - alpha) * self.labelled(logits, batch)
        return found + alpha * self.taught(logits, inside, batch) if alpha else found

    def labelled(self, z: Tensor, batch: Mixed) -> Tensor:
        if getattr(self.options, "loss", "ce") != "ce":
            return self.binary(z, batch)
        of_one = self.several if self.options.multi_label else self.single
        return batch.share * of_one(z, batch.own) + (1 - batch.share) * of_one(z, batch.other)

    def target(self, label: Tensor) -> Tensor:
        rows = [[self.options.smoothing / self.classes] * self.classes for _ in label]
        for row, a in zip(rows, label.tolist(), strict=True):
            row[a] += 1 - self.options.smoothing
        return torch.tensor(rows, dtype=torch.float64)

    def single(self, z: Tensor, a: Tensor) -> Tensor:
        return self.weights[a] * -(self.target(a) * log_softmax(z)).sum(1)

    def several(self, z: Tensor, has: Tensor) -> Tensor:
        s, n = self.options.smoothing, self.classes
        costs = torch.where(has > 0.5, self.weights * bce(z, 1 - s + s / n), bce(z, s / n))
        return costs.sum(1) / n

    def binary(self, z: Tensor, batch: Mixed) -> Tensor:
        share = batch.share[:, None]
        q = share * self.target(batch.own) + (1 - share) * self.target(batch.other)
        if self.options.bce_threshold is not None:
            q = (q > self.options.bce_threshold).double()
        costs = bce(z, q).sum(1)
        return costs if self.options.loss == "bce-sum" else costs / self.classes

    def taught(self, z: Tensor, inside: dict[str, Tensor], batch: Mixed) -> Tensor:
        kind, t = self.options.distill_kind, self.options.distill_temperature
        if kind in ("features", "tokens"):
            mine, theirs = inside[kind].flatten(1), batch.answer[kind].flatten(1)
            return ((mine - theirs) ** 2).sum(1) / (theirs**2).sum(1)
        w = batch.answer["logits"]
        if self.options.multi_label and kind == "hard":
            return bce(z, (w > 0).double()).mean(1)
        if self.options.multi_label:
            p = log_sigmoid(w / t).exp()
            return t**2 * (bce(z / t, p) - bce(w / t, p)).mean(1)
        if kind == "hard":
            return -log_softmax(z)[torch.arange(len(z)), w.argmax(1)]
        p = log_softmax(w / t)
        return t**2 * (p.exp() * (p - log_softmax(z / t))).sum(1)


class Descent:
    """SGD by a formula, with the ascents of SAM and of an adversary.

    Args:
        model: an fp64 module that returns (logits, what is inside).
        formula: of an image's cost.
        options: of a config, by name.
    """

    def __init__(self, model: torch.nn.Module, formula: Formulas, options: Any) -> None:
        self.model, self.formula, self.options = model, formula, options
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.losses: list[float] = []  # of each image, where the weights were
        self.perturbed: list[float] = []  # and where the step's ascent led

    def costs(self, weights: dict[str, Tensor], batch: Mixed, images: Tensor) -> Tensor:
        return self.formula(*functional_call(self.model, weights, (images,)), batch)

    def step(self, groups: Sequence[Mixed], started: Sequence[Tensor]) -> list[Tensor]:
        """Do one step.

        Args:
            groups: of images; each climbs by itself.
            started: the images of each group, where an adversary started from.

        Returns:
            The images of each group as the adversary leaves them.
        """
        count, rho = sum(len(group.own) for group in groups), self.options.sam
        total = {name: torch.zeros_like(p) for name, p in self.weights.items()}
        seen = []
        for group, images in zip(groups, started, strict=True):
            here = {name: p.clone().requires_grad_() for name, p in self.weights.items()}
            images = images.clone().requires_grad_()
            costs = self.costs(here, group, images)
            self.losses += costs.tolist()
            *found, change = torch.autograd.grad(costs.sum() / count, [*here.values(), images])
            gradients = dict(zip(here, found, strict=True))
            images, radius = images.detach(), 2 * (self.options.adversarial or 0) / 255  # pixels from −1 to 1
            if radius:
                moved = images + STEP * radius * change.sign()
                moved = moved.clamp(group.images - radius, group.images + radius)
                images = moved.clamp(-1, 1)
            seen.append(images)
            if rho is not None or radius:
                there = {name: p.clone() for name, p in self.weights.items()}
                if rho is not None:
                    scale = {n: p.abs() if self.options.sam_adaptive else torch.ones_like(p) for n, p in there.items()}
                    norm = sum((scale[n] * g).square().sum() for n, g in gradients.items()).sqrt()
                    there = {n: p + rho * scale[n] ** 2 * gradients[n] / norm for n, p in there.items()}
                there = {name: p.requires_grad_() for name, p in there.items()}
                costs = self.costs(there, group, images)
                self.perturbed += costs.tolist()
                found = torch.autograd.grad(costs.sum() / count, list(there.values()))
                gradients = dict(zip(there, found, strict=True))
            for name, gradient in gradients.items():
                total[name] += gradient
        self.weights = {name: p - self.options.lr * total[name] for name, p in self.weights.items()}
        return seen

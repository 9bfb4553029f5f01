"""Sharpness-aware steps written by hand, in fp64, with none of vtk's code; and the small model they are tried on."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from vtk.training.objectives.base import Batch


class Net(nn.Module):
    """A classifier of (B, 3, 4, 4) images with BatchNorm and dropout, in fp64."""

    def __init__(self, drop: float = 0.3, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        # before a norm a bias has no gradient but rounding, which AdamW would make steps of
        self.first = nn.Linear(48, 8, bias=False)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, images):
        return self.head(self.drop(F.gelu(self.norm(self.first(images.flatten(1))))))


class Fixed:
    """A stream of given batches, the same in every epoch."""

    def __init__(self, *sizes: int, seed: int = 0, side: int = 4, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes = sizes
        self.batches = [
            (torch.rand(n, 3, side, side, generator=generator).to(dtype) * 2 - 1, torch.arange(n) % 3) for n in sizes
        ]

    def epoch(self, index):
        for images, labels in self.batches:
            yield Batch(images.clone(), labels.clone())


def ascent(weights, gradients, rho, adaptive):
    """w + ε of one group of images."""
    scaled = [w.abs() * g if adaptive else g for w, g in zip(weights, gradients, strict=True)]
    norm = math.sqrt(sum(float((s * s).sum()) for s in scaled))
    steps = [w * w * g if adaptive else g for w, g in zip(weights, gradients, strict=True)]
    return [w + rho / norm * s for w, s in zip(weights, steps, strict=True)]


def two_pass(model, groups, count, rho, adaptive=False):
    """Gradients at w + ε of one step, and the losses of both passes; the model's weights are not touched.

    Args:
        model: in train mode; the first pass moves its statistics.
        groups: for each group, its (images, labels).
        count: images of the step.
        rho: of the ascent of each group.
        adaptive: elementwise.
    """
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    weights = [dict(model.named_parameters())[n] for n in names]
    total, losses = [torch.zeros_like(w) for w in weights], [0.0, 0.0]

    def loss_of(call, batch):
        images, labels = batch
        return F.cross_entropy(call(images), labels) * len(labels) / count

    for group in groups:
        states, gradients = [], [torch.zeros_like(w) for w in weights]
        for batch in group:
            states.append(torch.get_rng_state())
            loss = loss_of(model, batch)
            losses[0] += float(loss.detach())
            for g, new in zip(gradients, torch.autograd.grad(loss, weights), strict=True):
                g += new
        with torch.no_grad():
            moved = ascent(weights, gradients, rho, adaptive)
        tensors = {n: w.requires_grad_() for n, w in zip(names, moved, strict=True)}
        for batch, state in zip(group, states, strict=True):
            buffers = {n: b.clone() for n, b in model.named_buffers()}
            torch.set_rng_state(state)
            loss = loss_of(lambda x: torch.func.functional_call(model, {**tensors, **buffers}, (x,)), batch)  # noqa: B023
            losses[1] += float(loss.detach())
            for g, new in zip(total, torch.autograd.grad(loss, list(tensors.values())), strict=True):
                g += new
    return dict(zip(names, total, strict=True)), losses


def clip(gradients, highest):
    """torch.nn.utils.clip_grad_norm_, as it is documented."""
    norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
    factor = min(1.0, highest / (norm + 1e-6)) if highest else 1.0
    return {n: g * factor for n, g in gradients.items()}

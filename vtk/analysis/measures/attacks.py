"""Accuracy under FGSM (Hyeon-Woo et al. 2023, Table 8) and PGD with ten steps (Chen et al. 2022, Appendix B)."""

import math
from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk import console
from vtk.analysis.measures.accuracy import (
    AccuracyCurves,
    AccuracyOptions,
    Curve,
    Draws,
    logits_of,
    placed_batches,
)
from vtk.analysis.probes.batches import Batches, eval_mode
from vtk.analysis.probes.share import ALONE, check_keywords
from vtk.card import InputSpec
from vtk.data.loading.normalization import to_input, to_pixels
from vtk.errors import UsageError

EPSILONS = (0.5, 1.0, 2.0, 4.0)
STEPS = 10
STEP = 1 / 8
"""PGD's step in units of the ball's radius: Chen et al.'s 0.25/255 in a ball of 2/255."""


def attack_accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    epsilons: Sequence[float] = EPSILONS,
    steps: int = STEPS,
    **options: Unpack[AccuracyOptions],
) -> AccuracyCurves:
    """Return a model's accuracy under FGSM and PGD in L∞ balls around the pixels.

    The attacker knows the weights and follows the gradient of the cross-entropy through the model in eval mode. An
    image that is wrong without attack counts as wrong. PGD's radii are tried from the smallest on, and an image that
    falls in a small ball counts as fallen in every larger one, which holds the small one: it is not attacked again.
    Changed pixels stay in the ball and from 0 to 1. Parameters get no gradients. The result is the same at any batch
    size, but for gradients so near 0 that rounding decides their sign.

    Memory: the activations of one batch for its backward pass.

    Args:
        model: classifier.
        batches: normalised images and labels (B,).
        epsilons: radii in 1/255 of the pixel range.
        steps: of PGD, each an eighth of the radius, as Chen et al.'s.
        options: see `vtk.analysis.measures.accuracy.AccuracyOptions`.

    Returns:
        Curves ``FGSM`` and ``PGD-10``, the number being that of its steps; strengths in 1/255 of the pixel range.

    Raises:
        UsageError: an option is out of range, or labels are not one number per image.
        DataError: there are no images.
    """
    check_keywords("attack_accuracy", options, AccuracyOptions)
    if not epsilons or not all(math.isfinite(e) and e >= 0 for e in epsilons):
        raise UsageError(f"`epsilons` are {list(epsilons)}; give 0 or more, in 1/255 of the pixel range")
    if steps < 1:
        raise UsageError(f"`steps` is {steps}; give 1 or more")
    spec, share, title = options["spec"], options.get("share", ALONE), options.get("title", "")
    max_images, seed = options.get("max_images"), options.get("seed", 0)
    radii = sorted({float(e) for e in epsilons})
    device = next(model.parameters()).device
    right = torch.zeros(2, len(radii), dtype=torch.int64, device=device)
    clean, seen, classes = 0, 0, 0
    with eval_mode(model), console.progress(title, max_images or 0, enabled=bool(title)) as bar:
        for first, images, labels in placed_batches(model, batches, max_images, share):
            pixels = to_pixels(images, spec)
            start = 2 * Draws(seed, first, pixels).uniform("PGD's start") - 1
            with torch.no_grad():
                logits = logits_of(model, images, labels)
            standing = logits.argmax(dim=1) == labels
            clean, seen, classes = clean + int(standing.sum()), seen + len(labels), logits.shape[1]
            if standing.any():
                pixels, start, truth = pixels[standing], start[standing], labels[standing]
                right[0] += _under_fgsm(model, pixels, truth, radii, spec)
                right[1] += _under_pgd(model, pixels, truth, start, radii, steps, spec)
            bar.advance(len(labels) * share.world)
    totals = torch.tensor([clean, seen, classes * (share.rank == 0)], device=device)
    *hits, clean, seen, classes = share.total(torch.cat([right.flatten(), totals])).tolist()
    rows = (hits[: len(radii)], hits[len(radii) :])
    curves = tuple(
        Curve(name, "radius of the L∞ ball, 255ths of the pixel range", tuple(radii), tuple(n / seen for n in row))
        for name, row in zip(("FGSM", f"PGD-{steps}"), rows, strict=True)
    )
    return AccuracyCurves(clean / seen, curves, classes, seen)


def _under_fgsm(model: nn.Module, pixels: Tensor, labels: Tensor, radii: list[float], spec: InputSpec) -> Tensor:
    signs = gradient(model, pixels, labels, spec=spec).sign()
    with torch.no_grad():
        return torch.stack(
            [(model(to_input((pixels + r / 255 * signs).clamp(0, 1), spec)).argmax(1) == labels).sum() for r in radii]
        )


def _under_pgd(
    model: nn.Module, pixels: Tensor, labels: Tensor, start: Tensor, radii: list[float], steps: int, spec: InputSpec
) -> Tensor:
    counts = torch.zeros(len(radii), dtype=torch.int64, device=pixels.device)
    for number, radius in enumerate(radii):
        attacked = pgd(model, pixels, labels, radius / 255, spec=spec, start=start, steps=steps)
        with torch.no_grad():
            standing = model(to_input(attacked, spec)).argmax(1) == labels
        counts[number] = standing.sum()
        if not standing.any():
            break
        pixels, labels, start = pixels[standing], labels[standing], start[standing]
    return counts


def fgsm(model: nn.Module, pixels: Tensor, labels: Tensor, epsilon: float, *, spec: InputSpec) -> Tensor:
    """Return pixels after one FGSM step: x + ε·sign(∇ₓ L), clipped to 0 and 1 (Goodfellow et al. 2015).

    The arguments are those of `pgd`.
    """
    return (pixels + epsilon * gradient(model, pixels, labels, spec=spec).sign()).clamp(0, 1)


def pgd(
    model: nn.Module, pixels: Tensor, labels: Tensor, epsilon: float, *, spec: InputSpec, start: Tensor,
    steps: int = STEPS, step: float | None = None,
) -> Tensor:  # fmt: skip
    """Return pixels after projected gradient ascent of the loss in the L∞ ball (Madry et al. 2018).

    Args:
        model: classifier in eval mode.
        pixels: (B, C, H, W), 0 to 1.
        labels: (B,).
        epsilon: radius, in units of the pixel range.
        spec: mean and std of the input.
        start: initial perturbation, in units of the radius: (B, C, H, W) from −1 to 1.
        steps: number of steps.
        step: length of a step, in units of the pixel range; by default an eighth of the radius.
    """
    step = STEP * epsilon if step is None else step
    low, high = (pixels - epsilon).clamp(0, 1), (pixels + epsilon).clamp(0, 1)
    changed = (pixels + epsilon * start).clamp(low, high)
    for _ in range(steps):
        changed = (changed + step * gradient(model, changed, labels, spec=spec).sign()).clamp(low, high)
    return changed


def gradient(model: nn.Module, pixels: Tensor, labels: Tensor, *, spec: InputSpec) -> Tensor:
    """Return the gradient (B, C, H, W) of the summed cross-entropy with respect to the pixels, and to nothing else."""
    with torch.enable_grad():
        leaf = pixels.detach().requires_grad_(True)
        logits = model(to_input(leaf, spec))
        loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")
        (of_pixels,) = torch.autograd.grad(loss, leaf)
    return of_pixels

"""Second moments of the gradients of a model's logits, which say how much a change of its matrices matters.

A small error E of a matrix moves the logits by a squared length whose mean over images is that of ⟨E, g⟩², with g the
gradient of v · logits for random signs v. The Kronecker approximation of it is tr(Eᵀ R E C), with R and C the means of
g gᵀ and gᵀ g, each over the root of the mean of ‖g‖² (as in Gupta et al., 2018). Signs of their own make the gradients
of a batch's images independent, so that one backward pass serves them all.

On packs of ViT-S this left half the error in the logits that singular values alone leave at the same size; the second
moment of the layer's input alone, without that of the gradient, left more.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from vtk import console
from vtk.packs.compression.changes import flat

IMAGES, BATCH = 512, 16
"""Most training images, and how many make one gradient."""


def gradient_moments(
    model: nn.Module, names: Sequence[str], batches: Iterable[Tensor], *, multi_label: bool, seed: int, count: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the two sides, (F, F) and (K, K) fp64 on the CPU, of each matrix (F, K).

    Args:
        model: in eval mode, in fp32; only the gradients' flags of its parameters change.
        names: of the matrices among its parameters.
        batches: model inputs (B, C, H, W), on the model's device.
        multi_label: whether its outputs are independent labels.
        seed: of the random signs.
        count: images, for the progress bar.
    """
    parameters = dict(model.named_parameters())
    chosen = [parameters[name] for name in names]
    before = {name: p.requires_grad for name, p in parameters.items()}
    sums: list[tuple[Tensor, Tensor]] = [
        (flat(p).new_zeros(flat(p).shape[0], flat(p).shape[0]), flat(p).new_zeros(p.shape[-1], p.shape[-1]))
        for p in chosen
    ]
    draws = torch.Generator().manual_seed(seed)
    images = 0
    try:
        for p in parameters.values():
            p.requires_grad_(False)
        for p in chosen:
            p.requires_grad_(True)
        with torch.enable_grad(), console.progress("weighing matrices", count) as bar:
            for batch in batches:
                loss = _project(model(batch), draws, multi_label)
                for (rows, columns), g in zip(sums, torch.autograd.grad(loss, chosen), strict=True):
                    matrix = flat(g)
                    rows.addmm_(matrix, matrix.T)
                    columns.addmm_(matrix.T, matrix)
                images += len(batch)
                bar.advance(len(batch))
    finally:
        for name, p in parameters.items():
            p.requires_grad_(before[name])
    found = {}
    for name, (rows, columns) in zip(names, sums, strict=True):
        root = (rows.diagonal().sum(dtype=torch.float64) * images).sqrt().clamp_min(1e-150)
        found[name] = ((rows.double() / root).cpu(), (columns.double() / root).cpu())
    return found


def _project(logits: Tensor, draws: torch.Generator, multi_label: bool) -> Tensor:
    """Return the sum of the logits times random signs; without what moves all classes alike, which changes no class."""
    signs = torch.randint(0, 2, logits.shape, generator=draws).to(logits) * 2 - 1
    if not multi_label:
        signs = signs - signs.mean(dim=1, keepdim=True)
    return (logits * signs).sum()

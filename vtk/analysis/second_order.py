"""Products of a loss's Hessian with vectors, for any model, by differentiating the gradient once more.

Fused attention has no second derivative in torch, so the products run torch's own unfused formula of it. That is
chosen inside of the context; the model is not changed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vtk.analysis.batches import evaluating
from vtk.analysis.losses import Loss
from vtk.errors import UsageError

Product = Callable[[Tensor], Tensor]
"""From a vector (n,) to the Hessian times it (n,)."""


@contextlib.contextmanager
def hessian_product(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[tuple[Tensor, Tensor]],
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> Iterator[Product]:
    """Open a context that yields v ↦ H·v, H the Hessian of the mean loss over all images of the batches.

    The model is in eval mode inside. One product costs less than three gradients. Of a single batch the gradient's
    graph is kept, so that each product but the first costs about one gradient and a half, and the activations of one
    batch stay in memory; of several batches one at a time is in memory.

    Args:
        model: also with frozen weights, which count like others.
        loss: whose Hessian.
        batches: on the model's device.
        parameters: rows and columns of H, in the vector's order; others are held fixed (a diagonal block). Default all.

    Raises:
        UsageError: a part of the model has no second derivative; named.
    """
    chosen = dict(model.named_parameters()) if parameters is None else dict(parameters)
    if not chosen:
        raise UsageError("no parameters to differentiate by; choose at least one")
    tensors = list(chosen.values())
    frozen = [p for p in tensors if not p.requires_grad]
    images = sum(len(batch[0]) for batch in batches)
    kept: tuple[Tensor, ...] | None = None

    def gradient(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        value = loss(model, *batch)
        return torch.autograd.grad(value, tensors, create_graph=True, materialize_grads=True)

    def product(vector: Tensor) -> Tensor:
        nonlocal kept
        parts = [part.view_as(p) for part, p in zip(vector.split([p.numel() for p in tensors]), tensors, strict=True)]
        total = vector * loss.weight_decay
        for batch in batches:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                alone = len(batches) == 1
                first = kept if kept is not None else gradient(batch)
                kept = first if alone else None
                pairs = [(g, v) for g, v in zip(first, parts, strict=True) if g.requires_grad]
                if not pairs:  # the loss is linear in what was chosen
                    continue
                second = _second(pairs, tensors, retain=alone)
            flat = torch.cat([s.reshape(-1) for s in second])
            total = total + flat * (len(batch[0]) / images)
        return total

    for p in frozen:
        p.requires_grad_(True)
    try:
        with evaluating(model):
            yield product
    finally:
        kept = None
        for p in frozen:
            p.requires_grad_(False)


def _second(pairs: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor], retain: bool) -> tuple[Tensor, ...]:
    gradients, vectors = zip(*pairs, strict=True)
    try:
        return torch.autograd.grad(
            gradients, tensors, vectors, retain_graph=retain, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise UsageError(f"a part of the model has no second derivative in torch: {error}".splitlines()[0]) from error


def flat_size(parameters: Mapping[str, nn.Parameter]) -> int:
    """Return the length of the vectors that belong to parameters."""
    return sum(p.numel() for p in parameters.values())

"""Hessian-vector products of a loss, for any model, by differentiating the gradient again.

Fused attention has no second derivative in torch, so the products run torch's own unfused formula of it. That is
chosen within the context; the model is not changed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vtk.analysis.probes.batches import eval_mode
from vtk.analysis.probes.losses import Loss
from vtk.analysis.probes.share import ALONE, Share
from vtk.errors import UsageError

Product = Callable[[Tensor], Tensor]
"""From a vector (n,) to the Hessian times it (n,)."""

KEEP = 2**30
"""Maximum bytes of gradient graphs that are kept between products."""


@contextlib.contextmanager
def hessian_product(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[tuple[Tensor, Tensor]],
    parameters: Mapping[str, nn.Parameter] | None = None,
    *,
    keep: int = KEEP,
    share: Share = ALONE,
) -> Iterator[Product]:
    """Open a context that yields v ↦ H·v, H the Hessian of the mean loss over all images of the batches.

    The model is in eval mode inside, and what was not chosen needs no gradient. A product of a batch costs about three
    gradients, or two where the graph of its gradient is kept from the product before. Graphs are kept as long as they
    take at most ``keep`` bytes; beside them one batch at a time is in memory.

    Args:
        model: also with frozen weights, which count like others.
        loss: whose Hessian.
        batches: on the model's device; all of them, also where processes share them.
        parameters: rows and columns of H, in the vector's order; others are held fixed (a diagonal block). Default all.
        keep: bytes, estimated from above by all that the gradient of a batch computes.
        share: batches are divided between processes; every one gets the whole product.

    Raises:
        UsageError: a part of the model has no second derivative; named.
    """
    chosen = dict(model.named_parameters()) if parameters is None else dict(parameters)
    if not chosen:
        raise UsageError("no parameters to differentiate by; choose at least one")
    tensors = list(chosen.values())
    sizes = [p.numel() for p in tensors]
    images = sum(len(batch[0]) for batch in batches)
    graphs = [_Graph(model, loss, batch, tensors) for batch in share.of(batches)]
    store = _Store(keep)

    def product(vector: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(vector.split(sizes), tensors, strict=True)]
        total = torch.zeros_like(vector)
        slots = total.split(sizes)
        with share.together(vector.device):
            for graph in graphs:
                for slot, second in zip(slots, graph.product(parts, store), strict=True):
                    if second is not None:
                        slot.add_(second.reshape(-1), alpha=len(graph.batch[0]) / images)
        return share.total(total).add_(vector, alpha=loss.weight_decay)

    try:
        with eval_mode(model), _only(model, tensors), sdpa_kernel(SDPBackend.MATH):
            yield product
    finally:
        for graph in graphs:
            graph.first = None


class _Store:
    """The remaining bytes for graphs."""

    def __init__(self, left: int) -> None:
        self.left = left

    def takes(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True


class _Graph:
    """The gradient of a batch's loss with its graph, which is kept if there is room."""

    def __init__(self, model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], tensors: Sequence[Tensor]) -> None:
        self.model, self.loss, self.batch, self.tensors = model, loss, batch, tensors
        self.first: tuple[Tensor, ...] | None = None
        self.asked = False

    def product(self, vectors: Sequence[Tensor], store: _Store) -> Sequence[Tensor | None]:
        """Return the batch's Hessian times a vector, in parts; None for zeros."""
        with torch.enable_grad():
            first, kept = self.first, self.first is not None
            if first is None:
                size = _Bytes()
                with contextlib.nullcontext() if self.asked else size:
                    first = self._gradient()
                if not self.asked and store.takes(size.total):
                    self.first, kept = first, True
                self.asked = True
            pairs = [(g, v) for g, v in zip(first, vectors, strict=True) if g.requires_grad]
            if not pairs:  # the loss is linear in what was chosen
                return [None] * len(self.tensors)
            return _second(pairs, self.tensors, retain=kept)

    def _gradient(self) -> tuple[Tensor, ...]:
        value = self.loss(self.model, *self.batch)
        if not value.requires_grad:  # what was chosen has no part in it
            return tuple(torch.zeros_like(p) for p in self.tensors)
        return torch.autograd.grad(value, self.tensors, create_graph=True, materialize_grads=True)


class _Bytes(TorchDispatchMode):
    """Adds up the sizes of all computed tensors, an upper bound for the graph."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and count its outputs."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


@contextlib.contextmanager
def _only(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Require gradients of these tensors only, so that nothing is computed for others."""
    wanted = {id(p) for p in tensors}
    before = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in before:
        p.requires_grad_(id(p) in wanted)
    try:
        yield
    finally:
        for p, flag in before:
            p.requires_grad_(flag)


def _second(pairs: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor], retain: bool) -> Sequence[Tensor | None]:
    gradients, vectors = zip(*pairs, strict=True)
    try:
        return torch.autograd.grad(gradients, tensors, vectors, retain_graph=retain, allow_unused=True)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise UsageError(f"a part of the model has no second derivative in torch: {error}".splitlines()[0]) from error


def flat_size(parameters: Mapping[str, nn.Parameter]) -> int:
    """Return the length of the vectors that belong to parameters."""
    return sum(p.numel() for p in parameters.values())

"""One task in a bank: its embedding, classifier and attention weights."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.bank.architectures import without_blocks
from vtk.bank.folded import Folding, Weights, n_bytes
from vtk.bank.shared_weights import NUMBERS, Shared, replace_tensors
from vtk.card import Card
from vtk.errors import UsageError
from vtk.models.packed.forward import attention_modules, own_parameters, own_weights
from vtk.packs.load import Task


@dataclass(frozen=True)
class Entry:
    """One version of one task's pack.

    Attributes:
        name: key of the task in calls.
        card: of the pack.
        path: of the pack.
        number: of its attention weights. A reloaded pack has a new one; packs that trained none have the base's.
        end: timm's model without blocks and their norm: stem, tokens, positions, pooling, head. Shared tensors are the
            bank's. None if both ends are folded and concatenated with the other tasks'.
        end_bytes: of the tensors of ``end`` that only this task has.
        tokens: of an image, prefix included.
    """

    name: str
    card: Card
    path: Path
    number: int
    end: Any
    end_bytes: int
    tokens: int

    def check(self, images: Any) -> None:
        """Refuse anything but a batch of this task's images.

        Raises:
            UsageError: not a tensor, a wrong shape, or not a floating type.
        """
        spec = self.card.input
        wanted = f"(B, {spec.in_chans}, {spec.height}, {spec.width})"
        if not isinstance(images, Tensor):
            raise UsageError(f"images of `{self.name}` are a {type(images).__name__}; give a tensor {wanted}")
        if images.ndim != 4 or images.shape[1:] != (spec.in_chans, *spec.size):
            raise UsageError(f"images of `{self.name}` are {tuple(images.shape)}; it takes {wanted}: resize them")
        if not images.is_floating_point():
            raise UsageError(f"images of `{self.name}` are {images.dtype}; give normalised images of a floating type")

    def embed(self, images: Tensor) -> Tensor:
        """Map images to the tokens (B, N, C) that the first block reads."""
        tokens: Tensor = self.end.forward_features(images)  # it has no blocks
        return tokens

    def logits(self, x: Tensor) -> Tensor:
        """Map the last block's tokens (B, N, C), normalised, to logits (B, classes)."""
        logits: Tensor = self.end.forward_head(x)
        return logits


def make_entry(
    name: str, task: Task, shared: Shared, device: torch.device, dtype: torch.dtype, folding: Folding | None = None
) -> tuple[Entry, Weights]:
    """Split a loaded task into its entry and its attention weights; its model is consumed.

    Args:
        name: of the task.
        task: loaded.
        shared: of the bank.
        device: of the bank.
        dtype: of the bank.
        folding: of the task, where the bank is folded.

    Returns:
        The entry, and its attention weights on the CPU in ``dtype``.
    """
    model: Any = task.model
    modules = attention_modules(model.blocks)
    parts: Weights
    if folding is None:
        parts = tuple({key: p.detach().to(dtype) for key, p in own_weights(attn).items()} for _, attn in modules)
    else:
        parts = folding.weights
    trained = any(f"{name}.{key}" in task.carried for name, attn in modules for key in own_parameters(attn))
    number = next(NUMBERS) if trained else shared.number
    if folding is not None and folding.piece.table is not None and folding.piece.w_head is not None:
        return Entry(name, task.card, task.path, number, None, 0, len(folding.piece.table)), parts
    without_blocks(model, norm=False)
    common = shared.tensors()
    named = [*model.named_parameters(), *model.named_buffers()]
    own = {k: t.detach().to(device, dtype if t.is_floating_point() else None) for k, t in named if k not in common}
    replace_tensors(model, {**{k: t for k, t in common.items() if not k.startswith("blocks.")}, **own})
    model.eval()
    entry = Entry(name, task.card, task.path, number, model, n_bytes(list(own.values())), 0)
    with torch.no_grad():
        blank = torch.zeros(1, task.card.input.in_chans, *task.card.input.size, device=device, dtype=dtype)
        return dataclasses.replace(entry, tokens=entry.embed(blank).shape[1]), parts

"""One task in a bank: its embedding, classifier and attention weights."""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.bank.architectures import without_blocks
from vtk.bank.base_model import BaseModel
from vtk.bank.folded import Folding, Piece, Weights, fold_ends, n_bytes, weights_bytes
from vtk.bank.plain_changes import to_change
from vtk.bank.shared_weights import NUMBERS, Shared, replace_tensors
from vtk.bank.tables import low_rank_table
from vtk.card import Card
from vtk.errors import UsageError
from vtk.models.packed.forward import attention_modules, own_parameters, own_weights
from vtk.models.packed.low_rank import LowRankMatrix
from vtk.packs.factors import PackTensors
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
        pos_embed: of ``end``, which then has none, as a low-rank change of the base's; None where it has its own.
    """

    name: str
    card: Card
    path: Path
    number: int
    end: Any
    end_bytes: int
    tokens: int
    pos_embed: LowRankMatrix | None = None

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
        end = self.end
        if self.pos_embed is not None:  # a copy that is this call's alone, since others may run meanwhile
            table = nn.Parameter(self.pos_embed.merged()[None], requires_grad=False)
            end = copy.copy(end)
            end._parameters = {**end._parameters, "pos_embed": table}
        tokens: Tensor = end.forward_features(images)  # it has no blocks
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
    return _with_end(name, task.card, task.path, number, model, shared, device, dtype), parts


def make_factor_entry(
    name: str, pack: PackTensors, model: BaseModel, shared: Shared, device: torch.device, dtype: torch.dtype
) -> tuple[Entry, Piece | None]:
    """Return the entry of a pack of factors; its attention weights are `BaseAttention.weights_of`.

    Args:
        name: of the task.
        pack: that the model has checked.
        model: the base's of this size.
        shared: of the bank.
        device: of the bank.
        dtype: of the bank.

    Returns:
        The entry, and table and classifier of a folded bank.
    """
    end, piece = model.task_end(pack, dtype), None
    if shared.folded is not None and model.reader is not None:
        ends = fold_ends(end, model.reader, pack.card.input.size, dtype)
        piece, factors = ends.piece, pack.factors.get("pos_embed")
        if isinstance(piece.table, Tensor) and model.table is not None and factors is not None:
            table = low_rank_table(model.table, piece.table, factors, ends.embedding, pack.card.input.size)
            piece = dataclasses.replace(piece, table=table)
        if piece.table is not None and piece.w_head is not None:
            return Entry(name, pack.card, pack.path, next(NUMBERS), None, 0, len(piece.table)), piece
    pos_embed, change = None, pack.factors.get("pos_embed")
    if model.pos_embed is not None and change is not None:
        thin = (to_change(change, dtype),) if change.rank else ()
        if weights_bytes([{"pos_embed": LowRankMatrix(model.pos_embed, thin)}]) < model.pos_embed.nbytes:
            pos_embed, end._parameters["pos_embed"] = LowRankMatrix(model.pos_embed, thin), None
    return _with_end(name, pack.card, pack.path, next(NUMBERS), end, shared, device, dtype, pos_embed), piece


def _with_end(
    name: str, card: Card, path: Path, number: int, model: Any, shared: Shared, device: torch.device,
    dtype: torch.dtype, pos_embed: LowRankMatrix | None = None,
) -> Entry:  # fmt: skip
    """Return the entry of a task that embeds its own images or computes its own logits; its model is consumed."""
    without_blocks(model, norm=False)
    common = shared.tensors()
    named = [*model.named_parameters(), *model.named_buffers()]
    own = {k: t.detach().to(device, dtype if t.is_floating_point() else None) for k, t in named if k not in common}
    replace_tensors(model, {**{k: t for k, t in common.items() if not k.startswith("blocks.")}, **own})
    model.eval()
    taken = [*own.values(), *([] if pos_embed is None else pos_embed.own())]
    entry = Entry(name, card, path, number, model, n_bytes(taken), 0, pos_embed)
    with torch.no_grad():
        blank = torch.zeros(1, card.input.in_chans, *card.input.size, device=device, dtype=dtype)
        return dataclasses.replace(entry, tokens=entry.embed(blank).shape[1])

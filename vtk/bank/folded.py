"""Folds a bank's models into fused form: the shared part once, and the own part of each task.

Norms, softmax scale, LayerScale and parallel branches are folded as `vtk.fused` folds a single model. The norm before
attention is shared, but its affine part goes into each task's own qkv; LayerScale goes into each task's own proj. The
FFN is shared and folded once. The ends (embedding and head) are shared too if they are linear: the embedding is a
shared matrix and a task's position table, the head one matrix of the task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.bank.tables import Table
from vtk.errors import UsageError
from vtk.fused.attention_stage import AttentionStage, QkNorm
from vtk.fused.embed import Embedding
from vtk.fused.families import Reader, reader_of
from vtk.fused.head import Head
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.norms import NormSpec
from vtk.fused.stages import Stage
from vtk.models.packed.low_rank import Matrix, own_tensors, whole

Weights = tuple[dict[str, Matrix], ...]
"""Attention weights of one task: one mapping for each attention module of the model, or folded for each block.

A matrix (``qkv.weight``, ``proj.weight``, ``gate.weight``) of a task that has factors is a `LowRankMatrix`, whose
``base`` is the very tensor of the base's own weights, the same for all such tasks; its other tensors (biases, norms of
q and k) are the task's own, as those of any task.
"""

_POOLS = ("token", "avg")


@dataclass(frozen=True)
class Stem:
    """The embedding of all tasks: tokens = patches · matrixᵀ + the task's table, then the norm before the blocks.

    Attributes:
        patch: height and width.
        prefix: rows of an image before its patches.
        pre: of the norm before the first block; None where there is none.
    """

    patch: tuple[int, int]
    prefix: int
    pre: NormSpec | None


@dataclass(frozen=True)
class Pooling:
    """Pooling of all tasks: tokens of an image to one row.

    Attributes:
        kind: "token" or "avg".
        skip: first rows of an image that the mean leaves out.
        norm: of all tokens before pooling, its affine part in the tasks' matrices.
        fc_norm: of the pooled rows, likewise.
    """

    kind: str
    skip: int
    norm: NormSpec | None
    fc_norm: NormSpec | None


@dataclass(frozen=True)
class Piece:
    """Embedding table and classifier of one task.

    Attributes:
        table: (rows of an image, C), added to its tokens, whole or a low-rank change of the base's; None if the stem is
            no product of patches.
        w_head: (classes, C), with the last norm's affine part; None if the head is not linear in a pooled row.
        b_head: (classes), likewise.
    """

    table: Table | None
    w_head: Tensor | None
    b_head: Tensor | None


class Folded(nn.Module):
    """The folded part of the model that all tasks of a bank share.

    Attributes:
        stem: None if each task's own model embeds its images.
        matrix: (C, width) of the stem, with zero columns where the width of a patch is no multiple of 16.
        pre_weight, pre_bias: (C), of the norm before the first block.
        pooling: None if each task's own model computes logits from its tokens.
        pruned: whether the last block is computed for the first token of an image only.
    """

    matrix: Tensor
    pre_weight: Tensor
    pre_bias: Tensor

    def __init__(self, stages: list[Stage], embedding: Embedding, pooling: Pooling | None) -> None:
        super().__init__()
        self.stages, self.pooling = nn.ModuleList(stages), pooling
        self.stem: Stem | None = None
        if embedding.by_patches:
            conv: Any = embedding.stem.proj
            matrix = conv.weight.flatten(1) if embedding.padded is None else embedding.padded
            prefix = 0 if embedding.prefix is None else embedding.prefix.shape[1]
            self.stem = Stem(tuple(conv.kernel_size), prefix, embedding.pre)
            self.register_buffer("matrix", matrix.detach())
            for name in ("pre_weight", "pre_bias"):
                self.register_buffer(name, None if embedding.pre is None else getattr(embedding, name).detach())
        alone = not any(s.front or s.end or (isinstance(s, MlpStage) and s.mid) for s in stages[-2:])
        self.pruned = pooling is not None and pooling.kind == "token" and alone
        self.eval()

    @property
    def blocks(self) -> list[tuple[AttentionStage, MlpStage]]:
        """Pairs of an attention, whose matrices are the tasks', and an FFN."""
        stages: list[Any] = list(self.stages)
        return list(zip(stages[::2], stages[1::2], strict=True))

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [*self.parameters(), *self.buffers()]


@dataclass(frozen=True)
class Folding:
    """A task's folded model, on the CPU.

    Attributes:
        shared: the part that tasks share, in fp32 or fp64; None if it was not requested.
        weights: for each block, of P branches, H heads, K of keys and values, and A = H·D channels ``qkv.weight``
            (P·(H + 2·K)·D, C), ``qkv.bias``, ``proj.weight`` (C, P·A), ``proj.bias`` (C), with qk-norm
            ``q_norm.weight`` (P·H, D) and so on; of gated attention ``gate.weight`` (P·A, C), ``gate.bias``, and with a
            norm before the gate ``norm.weight`` and ``norm.bias`` (P·A).
        piece: embedding table and classifier.
    """

    shared: Folded | None
    weights: Weights
    piece: Piece

    def check(self, shared: Folded, path: object) -> None:
        """Refuse a task whose embedding or head is of another kind than those of the bank's other tasks.

        Raises:
            UsageError: for instance the task has no classifier and the others have one.
        """
        mine, others = (self.piece.table is None, self.piece.w_head is None), (shared.stem, shared.pooling)
        for part, alone, other in zip(("stem", "head"), mine, others, strict=True):
            if alone != (other is None):
                raise UsageError(
                    f"{path}: its {part} is of another kind than that of this bank's tasks; create the bank with "
                    "fused=False, or serve it as a separate model"
                )


def fold(model: Any, size: tuple[int, int], dtype: torch.dtype, *, whole: bool = True) -> Folding:
    """Fold a task's model in fp32 (in fp64 for fp64), and cast the task's own part to ``dtype``.

    Args:
        model: of timm; it is not changed.
        size: of its images, height first.
        dtype: of the bank.
        whole: also fold the shared part, which doubles the time.

    Raises:
        UsageError: a part that `vtk.fused` does not know.
    """
    try:
        reader = reader_of(model)
        with torch.no_grad():
            like = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32))
            stages: list[Stage] = []
            for i in range(len(model.blocks)):
                found = reader.stages(model, i, like, ffn=whole)
                if len(found) != 1 + whole:
                    raise UsageError(f"cannot fold `blocks.{i}`: it has either attention or an FFN, and not both")
                stages += found
            ends = fold_ends(model, reader, size, dtype)
        _check_biases(stages)
    except UsageError as error:
        raise UsageError(f"{str(error).split('; use the back-end')[0]}; create the bank with fused=False") from error
    weights = tuple(_take_matrices(stage, dtype) for stage in stages if isinstance(stage, AttentionStage))
    shared = Folded(stages, ends.embedding, ends.pooling) if whole else None
    return Folding(shared, weights, ends.piece)


@dataclass(frozen=True, eq=False)
class FoldedEnds:
    """Embedding and head of a model, folded.

    Attributes:
        embedding: of the model.
        pooling: None if the head is not linear in a pooled row.
        piece: the task's table and classifier.
    """

    embedding: Embedding
    pooling: Pooling | None
    piece: Piece


def fold_ends(model: Any, reader: Reader, size: tuple[int, int], dtype: torch.dtype) -> FoldedEnds:
    """Fold embedding and head of a model, whose blocks are not read.

    Args:
        model: of timm.
        reader: of the model, with blocks.
        size: of its images, height first.
        dtype: of the bank.

    Raises:
        UsageError: a part that `vtk.fused` does not know.
    """
    like = torch.empty(0, dtype=torch.promote_types(dtype, torch.float32))
    with torch.no_grad():
        embedding, head = reader.embedding(model, like), reader.head(model, like)
        table = None
        if embedding.by_patches:  # a NaFlexVit does not keep the size that it was made for
            found = embedding.table_for(like.new_empty(1, 1, *size))
            table = None if found is None else found[0].to(dtype)
    if not _is_product(model, head) or head.w_head is None or head.b_head is None:
        return FoldedEnds(embedding, None, Piece(table, None, None))
    pooling = Pooling(head.pool, 0 if head.include_prefix else head.prefix, head.norm, head.fc_norm)
    w_head, b_head = head.w_head.detach().to(dtype), head.b_head.detach().to(dtype)
    return FoldedEnds(embedding, pooling, Piece(table, w_head, b_head))


def _check_biases(stages: Sequence[Stage]) -> None:
    """Refuse biases of the scores: kernels add one to all images of a call, and tasks have their own.

    Raises:
        UsageError: there is one.
    """
    for i, stage in enumerate(stages[::2]):
        if isinstance(stage, AttentionStage) and stage.attn_bias is not None:
            raise UsageError(f"cannot fold `blocks.{i}.attn`: each task has its own biases of relative positions")


def _is_product(model: Any, head: Head) -> bool:
    """Whether logits are one matrix times a pooled row, with no weights but those of the matrix."""
    plain = type(head) is Head and head.attn_pool is None and head.pool in _POOLS
    return plain and type(model.head) is nn.Linear and head.weight is None and head.fc_weight is None


def _take_matrices(stage: AttentionStage, dtype: torch.dtype) -> dict[str, Matrix]:
    """Remove the matrices from a stage, which keeps the structure, and return them."""
    names = {
        "qkv.weight": "w_qkv", "qkv.bias": "b_qkv", "proj.weight": "w_out", "proj.bias": "bias",
        "gate.weight": "w_gate", "gate.bias": "b_gate", "norm.weight": "sub_weight", "norm.bias": "sub_bias",
    }  # fmt: skip
    found = {key: getattr(stage, name) for key, name in names.items()}
    for name in names.values():
        setattr(stage, name, None)
    norm = stage.qk_norm
    if isinstance(norm, QkNorm):
        parts = ("weight",) if norm.norm.kind == "rms" else ("weight", "bias")
        for side in "qk":
            for part in ("weight", "bias"):
                if part in parts:
                    found[f"{side}_norm.{part}"] = getattr(norm, f"{side}_{part}")
                setattr(norm, f"{side}_{part}", None)
    return {key: t.detach().to(dtype) for key, t in found.items() if t is not None}


def merge(weights: Weights) -> tuple[dict[str, Tensor], ...]:
    """Return attention weights with every change added to its matrix."""
    return tuple({key: whole(t) for key, t in part.items()} for part in weights)


def n_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def weights_bytes(weights: Sequence[Mapping[str, Matrix]]) -> int:
    """Return the bytes of a task's own attention weights, without the base's matrices that changes refer to."""
    return sum(n_bytes(own_tensors(list(part.values()))) for part in weights)

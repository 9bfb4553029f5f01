"""The base: pretrained weights shared by many tasks, and the id of their values.

Two files have the same base if their tensors have equal names, shapes and values; fp16, bf16 and fp32 files of equal
values are one base. The classifier and the position table belong to the task and are excluded.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vtk.card import BaseRef, Transform


@dataclass(frozen=True)
class Base:
    """Weights under timm's keys, in stored size and dtype, before resampling.

    Attributes:
        ref: their source and the id of their values.
        tensors: all tensors, including classifier and position table.
        hashes: sha256 of each tensor in the id.
        grid: height and width in patches of the stored position table, if a card has it.
        size: image size of the stored model in pixels, height first, if known.
        file: the file they were read from.
        transforms: transforms in the file's card, applied before it was saved; the new model must get the same, since
            `tensors` have the names from before them.
        transform_tensors: new tensors of these transforms in the file, under their final keys.
        classes: names of the classifier's rows, in order; empty if unknown.
    """

    ref: BaseRef
    tensors: Mapping[str, Tensor]
    hashes: Mapping[str, str]
    grid: tuple[int, int] | None = None
    size: tuple[int, int] | None = None
    file: Path | None = None
    transforms: tuple[Transform, ...] = ()
    transform_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


def tensor_hash(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's shape and of its values as little-endian fp32."""
    digest = hashlib.sha256(repr(tuple(tensor.shape)).encode())
    values = tensor.detach().to("cpu", torch.float32).contiguous()
    digest.update(values.numpy().astype("<f4", copy=False).data if values.numel() else b"")
    return digest.hexdigest()


def base_id(hashes: Mapping[str, str]) -> str:
    """Return the id of a base: the sha256 of its tensor names and hashes in sorted order."""
    lines = "\n".join(f"{name} {hashes[name]}" for name in sorted(hashes))
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


def make_base(
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    task_names: Iterable[str],
    grid: tuple[int, int] | None = None,
    size: tuple[int, int] | None = None,
    file: Path | None = None,
) -> Base:
    """Return the `Base` of tensors, with their hashes.

    Args:
        tensors: weights under timm's keys.
        source: ``hub:NAME``, a path, or ``random:SEED``.
        task_names: keys of the task, excluded from the id.
        grid: height and width in patches of the stored position table, if not square.
        size: image size of the stored model in pixels.
        file: the file they were read from.
    """
    skip = frozenset(task_names)
    hashes = {name: tensor_hash(tensor) for name, tensor in tensors.items() if name not in skip}
    return Base(BaseRef(source, base_id(hashes)), dict(tensors), hashes, grid, size, file)

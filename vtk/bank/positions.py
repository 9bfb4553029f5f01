"""Rotary tables and biases of the tasks of a bank; those that are alike, as of one image size, are held once.

A rotary table follows from the grid of patches, so tasks of one size share it, unless its frequencies are learned
(RoPE-mixed) and a task trained them. Biases of relative positions (BEiT) are learned with attention.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vtk.bank.architectures import ALONE
from vtk.errors import UsageError
from vtk.fused.rotary import read_tables
from vtk.models.packed.forward import RowPositions, attention_modules
from vtk.models.weights.base import tensor_hash


@dataclass(frozen=True)
class TaskPositions:
    """Positions that the attention of one task sees.

    Attributes:
        rope: (L, 1 or H, N, D), as of `RowPositions`, of the tokens of an image; None for no rotary embedding.
        bias: (L, H, N, N), a bias for each attention; None for none.
    """

    rope: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Positions:
    """Positions of all tasks; immutable, replaced as a whole when tasks are added or removed.

    Attributes:
        rope: (L, 1 or H, rows of all tables, D); None for no rotary embedding.
        rows: first row and number of rows of each table, by its hash.
        rope_of: hash of each task's table.
        biases: by hash.
        bias_of: hash of each task's bias.
    """

    rope: Tensor | None = None
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rope_of: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    bias_of: Mapping[str, str] = field(default_factory=dict)

    def first_row(self, name: str) -> int | None:
        """Return the first row of a task's table; None where there is none."""
        return self.rows[self.rope_of[name]][0] if name in self.rope_of else None

    def change(
        self, names: Mapping[str, object], device: torch.device, dtype: torch.dtype, name: str | None = None,
        new: TaskPositions | None = None,
    ) -> "Positions":  # fmt: skip
        """Return the positions of these of the tasks and of a new one.

        Args:
            names: of the tasks that stay.
            device: of the bank.
            dtype: of the bank; tables stay in fp32 (fp64).
            name: of the new task.
            new: its positions.
        """
        rope_of = {n: key for n, key in self.rope_of.items() if n in names}
        bias_of = {n: key for n, key in self.bias_of.items() if n in names}
        tables = {key: self._table(key) for key in rope_of.values()}
        biases = {key: self.biases[key] for key in bias_of.values()}
        if name is not None and new is not None and new.rope is not None:
            rope_of[name] = tensor_hash(new.rope)
            tables.setdefault(rope_of[name], new.rope.to(device))
        if name is not None and new is not None and new.bias is not None:
            bias_of[name] = tensor_hash(new.bias)
            biases.setdefault(bias_of[name], new.bias.to(device, dtype))
        rows, end = {}, 0
        for key, table in tables.items():
            rows[key] = (end, table.shape[2])
            end += table.shape[2]
        rope = torch.cat(list(tables.values()), 2) if tables else None
        return Positions(rope, rows, rope_of, biases, bias_of)

    def of_rows(self, parts: Sequence[tuple[str, int, int]], device: torch.device) -> RowPositions:
        """Return the positions of a call's rows.

        Args:
            parts: task, images and tokens of an image, in the order of rows.
            device: of the bank.
        """
        rope_row = None
        if self.rope is not None:
            runs = [(self.first_row(name) or 0, images, tokens) for name, images, tokens in parts]
            row = torch.cat([torch.arange(i, i + tokens, dtype=torch.int32).repeat(n) for i, n, tokens in runs])
            rope_row = row.to(device, non_blocking=True)
        bias = [(n, tokens, self.biases[self.bias_of[name]]) for name, n, tokens in parts if name in self.bias_of]
        return RowPositions(self.rope, rope_row, bias)

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [*([] if self.rope is None else [self.rope]), *self.biases.values()]

    def own_bytes(self, name: str) -> int:
        """Return the bytes of tables and biases that no other task has."""
        found = 0
        for keys, size in ((self.rope_of, self._rope_bytes), (self.bias_of, self._bias_bytes)):
            key = keys.get(name)
            if key is not None and list(keys.values()).count(key) == 1:
                found += size(key)
        return found

    def _table(self, key: str) -> Tensor:
        assert self.rope is not None
        first, count = self.rows[key]
        return self.rope[:, :, first : first + count]

    def _rope_bytes(self, key: str) -> int:
        table = self._table(key)
        return table.numel() * table.element_size()

    def _bias_bytes(self, key: str) -> int:
        return self.biases[key].nbytes


def read_positions(model: Any, size: tuple[int, int], dtype: torch.dtype) -> TaskPositions:
    """Return the positions that the attention of a model sees.

    Args:
        model: of a known family, on the CPU; it is not changed.
        size: of its images, height first.
        dtype: of the bank; tables are computed in fp32, or fp64 for it.

    Raises:
        UsageError: a rotary embedding whose pairs of channels do not share an angle.
    """
    wide = torch.promote_types(dtype, torch.float32)
    modules = [attn for _, attn in attention_modules(model.blocks)]
    with torch.no_grad():
        return TaskPositions(_read_rope(model, modules, size, wide), _read_bias(model, modules, wide))


def _read_rope(model: Any, modules: Sequence[Any], size: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    rope = getattr(model, "rope", None)
    if rope is None:
        return None
    embed: Tensor = _angles(model, copy.deepcopy(rope).to(dtype), size)  # as of a model of this dtype
    half = bool(getattr(modules[0], "rotate_half", False))
    try:
        table = read_tables(embed, half, model.num_prefix_tokens).to(dtype)
    except UsageError as error:
        raise UsageError(f"{str(error).split('; use the back-end')[0]}; {ALONE}") from error
    return table.reshape(-1, table.shape[-3] if table.ndim == 4 else 1, *table.shape[-2:])


def _angles(model: Any, rope: Any, size: tuple[int, int]) -> Tensor:
    """Return sines and cosines as the model's own forward pass asks for them, (N, 2·D) or (L, H, N, 2·D)."""
    embed = getattr(model, "patch_embed", None)
    if embed is None:  # NaFlexVit
        return rope.get_embed(shape=model.embeds.dynamic_feat_size(size))  # type: ignore[no-any-return]
    if model.dynamic_img_size or not hasattr(rope, "feat_shape"):
        return rope.get_embed(shape=embed.grid_size)  # type: ignore[no-any-return]
    return rope.get_embed()  # type: ignore[no-any-return]


def _read_bias(model: Any, modules: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    shared = _bias_of(getattr(model, "rel_pos_bias", None), lambda m: m(), dtype)
    if shared is None:
        shared = _bias_of(getattr(model, "shared_rel_pos", None), lambda m: m.get_bias()[0], dtype)
    found = []
    for attn in modules:
        own = _bias_of(getattr(attn, "rel_pos", None), lambda m: m.get_bias()[0], dtype)
        if getattr(attn, "relative_position_bias_table", None) is not None:
            own = _bias_of(attn, lambda m: m._get_rel_pos_bias()[0], dtype)
        if own is not None and shared is not None:
            own = own + shared
        found.append(shared if own is None else own)
    given = [bias for bias in found if bias is not None]
    if all(bias is shared for bias in given):
        return None if shared is None else shared[None]
    return torch.stack(given)


def _bias_of(module: nn.Module | None, compute: Callable[[Any], Tensor], dtype: torch.dtype) -> Tensor | None:
    return None if module is None else compute(copy.deepcopy(module).to(dtype))

"""Rotary tables and biases of the tasks of a bank; those that are alike, as of one image size, are held once.

A rotary table follows from the grid of patches, so tasks of one size share it, unless its frequencies are learned
(RoPE-mixed) and a task trained them. Biases of relative positions (BEiT) are learned with attention.
"""

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        stacked: whether calls read one tensor of all tables, as CUDA graphs do; else one of the call's tables is made.
        tables: (L, 1 or H, rows of an image, D), by hash.
        rope_of: hash of each task's table.
        biases: by hash.
        bias_of: hash of each task's bias.
    """

    stacked: bool = False
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    rope_of: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    bias_of: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def rope(self) -> Tensor | None:
        """(L, 1 or H, rows of all tables, D); None for no rotary embedding."""
        return _joined(list(self.tables.values()))

    @functools.cached_property
    def rows(self) -> dict[str, int]:
        """First row of each table in ``rope``, by hash."""
        return _first_rows(self.tables)

    @functools.cached_property
    def uses(self) -> Counter[str]:
        """How many tasks have each table and bias."""
        return Counter([*self.rope_of.values(), *self.bias_of.values()])

    def first_row(self, name: str) -> int | None:
        """Return the first row of a task's table in ``rope``; None where there is none."""
        return self.rows[self.rope_of[name]] if name in self.rope_of else None

    def of_call(self, names: Iterable[str]) -> "CallPositions":
        """Return the rotary tables that a call of these tasks reads."""
        keys = {name: self.rope_of[name] for name in names if name in self.rope_of}
        if self.stacked:
            return CallPositions(self.rope, {name: self.rows[key] for name, key in keys.items()})
        tables = {key: self.tables[key] for key in keys.values()}
        rows = _first_rows(tables)
        return CallPositions(_joined(list(tables.values())), {name: rows[key] for name, key in keys.items()})

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
        tables = {key: self.tables[key] for key in dict.fromkeys(rope_of.values())}
        biases = {key: self.biases[key] for key in dict.fromkeys(bias_of.values())}
        if name is not None and new is not None and new.rope is not None:
            rope_of[name] = tensor_hash(new.rope)
            tables.setdefault(rope_of[name], new.rope.to(device))
        if name is not None and new is not None and new.bias is not None:
            bias_of[name] = tensor_hash(new.bias)
            biases.setdefault(bias_of[name], new.bias.to(device, dtype))
        found = Positions(self.stacked, tables, rope_of, biases, bias_of)
        if self.stacked and list(tables) == list(self.tables):
            vars(found)["rope"] = self.rope  # the same rows; graphs that read them stay valid
        return found

    def of_rows(self, parts: Sequence[tuple[str, int, int]], device: torch.device) -> RowPositions:
        """Return the positions of a call's rows.

        Args:
            parts: task, images and tokens of an image, in the order of rows.
            device: of the bank.
        """
        call, rope_row = self.of_call([name for name, _, _ in parts]), None
        if call.rope is not None:
            runs = [(call.first_row.get(name, 0), images, tokens) for name, images, tokens in parts]
            row = torch.cat([torch.arange(i, i + tokens, dtype=torch.int32).repeat(n) for i, n, tokens in runs])
            rope_row = row.to(device, non_blocking=True)
        bias = [(n, tokens, self.biases[self.bias_of[name]]) for name, n, tokens in parts if name in self.bias_of]
        return RowPositions(call.rope, rope_row, bias)

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        if self.stacked:
            return [*([] if self.rope is None else [self.rope]), *self.biases.values()]
        return [*self.tables.values(), *self.biases.values()]

    def own_bytes(self, name: str) -> int:
        """Return the bytes of tables and biases that no other task has."""
        keys = ((self.rope_of.get(name), self.tables), (self.bias_of.get(name), self.biases))
        return sum(found[key].nbytes for key, found in keys if key is not None and self.uses[key] == 1)


@dataclass(frozen=True)
class CallPositions:
    """Rotary tables of one call.

    Attributes:
        rope: (L, 1 or H, rows, D), as of `RowPositions`; None for no rotary embedding.
        first_row: of each task that has such a table.
    """

    rope: Tensor | None
    first_row: Mapping[str, int]


def _joined(tables: Sequence[Tensor]) -> Tensor | None:
    return None if not tables else tables[0] if len(tables) == 1 else torch.cat(list(tables), 2)


def _first_rows(tables: Mapping[str, Tensor]) -> dict[str, int]:
    ends = itertools.accumulate((table.shape[2] for table in tables.values()), initial=0)
    return dict(zip(tables, ends, strict=False))


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

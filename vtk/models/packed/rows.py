"""Operations of a packed pass that depend on the image or task of each row."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.models.packed.low_rank import whole
from vtk.models.packed.products import Layer, Stack, linear, linear_by_runs, stacked
from vtk.models.packed.segments import RowPositions, Segments
from vtk.models.packed.structure import Heads, is_rms
from vtk.models.transforms.context_broadcast import ContextBroadcast
from vtk_kernels.context_broadcast import context_broadcast
from vtk_kernels.grouped_linear import grouped_linear, make_tile_map
from vtk_kernels.packed_attention import packed_attention

TILE = 128
"""Rows of a tile of the grouped product; an image has 197 or more rows."""


class Rows:
    """Operations that depend on the image or task of each row, for one forward pass."""

    def __init__(self, segments: Segments, x: Tensor, kernels: bool, positions: RowPositions | None = None) -> None:
        self.segments, self.kernels, self.total = segments, kernels, len(x)
        self.positions = positions or RowPositions()
        self.longest = max(segments.sizes, default=0)
        self.runs = list(segments.runs())
        self._tiles: Tensor | None = None
        self._row_task: Tensor | None = None

    def linear(self, x: Tensor, layer: Layer, name: str) -> Tensor:
        """Multiply each row (T, K) by its task's matrix: (T, F), 0 in padding rows."""
        w, b = layer[f"{name}.weight"], layer.get(f"{name}.bias")
        if self.kernels:
            weight, offsets = stacked(w), None if b is None else stacked(b)
            return grouped_linear(x, weight, offsets, self._tile_map(len(weight), x.device))
        end = self.runs[-1][2] if self.runs else 0
        if not torch.is_grad_enabled():
            return linear_by_runs(x, w, b, self.runs)
        parts = [linear(x[i:j], w[g], None if b is None else whole(b[g])) for g, i, j in self.runs]
        if end < self.total or not parts:
            parts.append(x.new_zeros(self.total - end, w[0].shape[0]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def head_norms(self, qkv: Tensor, heads: Heads, layer: Layer) -> Tensor:
        """Normalise q and k of (T, (H + 2·kv)·D) over the channels of a head, with each row's own weights."""
        norms = (heads.q_norm, heads.k_norm)
        if all(isinstance(norm, nn.Identity) for norm in norms):
            return qkv
        parts = _split(qkv, heads)
        for i, (side, norm) in enumerate(zip("qk", norms, strict=True)):
            parts[i] = self._norm(parts[i], norm, layer, f"{side}_norm")
        return torch.cat([part.flatten(1) for part in parts], 1)

    def inner_norm(self, o: Tensor, heads: Heads, layer: Layer) -> Tensor:
        """Normalise the heads' outputs (T, H·D), where the attention does, with each row's own weights."""
        return self._norm(o[:, None], heads.inner, layer, "norm")[:, 0]

    def attend(self, qkv: Tensor, heads: Heads, branches: int, index: int) -> Tensor:
        """Return attention within each segment, (T, branches·H·D); 0 in padding rows.

        Args:
            qkv: (T, branches·(H + 2·kv)·D).
            heads: of one branch.
            branches: attentions that run as one.
            index: of the attention in the model, for its positions.
        """
        seen, scale = self.positions, heads.dim**-0.5
        rope = None
        if seen.rope is not None:
            table = seen.rope[min(index, len(seen.rope) - 1)]
            rope = table[0] if len(table) == 1 else table
        count, kv = heads.count * branches, heads.kv * branches
        if not seen.bias:
            return packed_attention(
                qkv, count, self.segments.cu_seqlens, scale=scale, max_seqlen=self.longest, num_kv_heads=kv,
                rope=rope, rotate_half=heads.rotate_half, rope_row=None if rope is None else seen.rope_row,
            )  # fmt: skip
        parts, row = [], 0
        for images, tokens, bias in seen.bias:
            first, row = row, row + images * tokens
            batch = qkv[first:row].unflatten(0, (images, tokens))
            own = bias[min(index, len(bias) - 1)]
            parts.append(packed_attention(batch, count, scale=scale, num_kv_heads=kv, attn_bias=own).flatten(0, 1))
        return torch.cat([*parts, qkv.new_zeros(self.total - row, count * heads.dim)])

    def _norm(self, x: Tensor, norm: Any, layer: Layer, name: str) -> Tensor:
        """Normalise x (T, H, D) over its last axis, with each row's own weights."""
        if isinstance(norm, nn.Identity):
            return x
        normalize = F.rms_norm if is_rms(norm) else F.layer_norm
        y = normalize(x, x.shape[-1:], eps=norm.eps)  # type: ignore[operator]
        if f"{name}.weight" in layer:
            y = y * self._of_rows(layer[f"{name}.weight"])
        if f"{name}.bias" in layer:
            y = y + self._of_rows(layer[f"{name}.bias"])
        return y

    def add(self, x: Tensor, parts: Sequence[Tensor], context: ContextBroadcast | None) -> Tensor:
        """Return x + Σ parts, with Context Broadcasting of the sum if there is a context.

        It commutes with LayerScale: one mixes tokens, the other scales channels.
        """
        m = functools.reduce(torch.add, parts)
        if context is None:
            return x + m if torch.is_grad_enabled() else m.add_(x)  # the sum is not used elsewhere
        if self.kernels:
            return context_broadcast(x, m, context.scale, self.segments.cu_seqlens)
        return x + self.broadcast(m, context)

    def broadcast(self, m: Tensor, context: ContextBroadcast) -> Tensor:
        """Apply Context Broadcasting to m (T, C) within each segment."""
        if self.kernels:
            return context_broadcast(torch.zeros_like(m), m, context.scale, self.segments.cu_seqlens)
        parts, end = [], 0
        for first, count, size in self.segments.equal_runs():
            end = first + count * size
            parts.append(context(m[first:end].unflatten(0, (count, size))).flatten(0, 1))
        return torch.cat([*parts, m[end:]])

    def _tile_map(self, groups: int, device: torch.device) -> Tensor:
        if self._tiles is None:
            ends, end = dict.fromkeys(range(groups), 0), 0
            ends.update({g: last for g, _, last in self.runs})
            bounds = [0, *(end := max(end, ends[g]) for g in range(groups))]
            cu_rows = torch.tensor(bounds, dtype=torch.int32, device=device)
            self._tiles = make_tile_map(cu_rows, TILE, self.total // TILE + groups)
        return self._tiles

    def _of_rows(self, stack: Stack) -> Tensor:
        """(tasks, D) → (T, 1, D)."""
        values = stacked(stack)
        if self._row_task is None:
            task = torch.zeros(self.total, dtype=torch.int64)
            for g, first, last in self.runs:
                task[first:last] = g
            self._row_task = task.to(values.device)
        return values[self._row_task][:, None]


def _split(qkv: Tensor, heads: Heads) -> list[Tensor]:
    """(T, (H + 2·kv)·D) → q (T, H, D), k and v (T, kv, D)."""
    if heads.kv == heads.count:  # also of several branches, one after the other
        return list(qkv.unflatten(1, (3, -1, heads.dim)).unbind(1))
    parts = qkv.unflatten(1, (-1, heads.dim))
    return list(parts.split((heads.count, heads.kv, heads.kv), 1))

"""The forward pass over tokens of many tasks and resolutions, packed into one matrix of rows.

Norms, FFNs and LayerScale act on single rows, so they run once over the rows of all tasks. Three operations do not: the
attention projections, whose weights are the task's; attention, which is within an image and may see the positions of
its tokens; and Context Broadcasting, whose mean is over an image's tokens. Blocks are timm's modules; of their
attention modules only the structure is used, not the weights.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import GELU, Mlp
from torch import Tensor, nn

from vtk.models.packed.products import Layer, Stack
from vtk.models.packed.rows import Rows
from vtk.models.packed.segments import RowPositions, Segments
from vtk.models.packed.structure import Branch, Heads, attention_modules, own_parameters, own_weights, read_block
from vtk.models.transforms.context_broadcast import ContextBroadcast, find_context_broadcast

__all__ = [
    "Layer",
    "RowPositions",
    "Segments",
    "Stack",
    "attention_modules",
    "own_parameters",
    "own_weights",
    "packed_forward",
]


def packed_forward(
    shared: Iterable[nn.Module],
    tasks: Iterable[Layer],
    segments: Segments,
    x: Tensor,
    *,
    positions: RowPositions | None = None,
    kernels: bool = False,
) -> Tensor:
    """Run blocks over packed rows; differentiable, without stochastic depth.

    Args:
        shared: timm's `Block`, `ParallelThingsBlock`, `EvaBlock`, BEiT's `Block` or `RelPosBlock`, also with Context
            Broadcasting.
        tasks: the weights of all tasks for each attention module, as of `own_weights`, in the order of
            `attention_modules`. They are read layer by layer, so an iterator may wait for weights that are still being
            copied.
        segments: of the rows.
        x: (T, C); rows after the last segment are padding: their result is undefined and affects no other row.
        positions: rotary tables and biases of the rows, of models whose attention has these.
        kernels: use the grouped product, variable-length attention and Context Broadcasting of `vtk_kernels` (on a CPU
            their references; needs stacked tensors); otherwise a loop over the tasks' rows.

    Returns:
        (T, C), the output of the last block.
    """
    rows, layers, done = Rows(segments, x, kernels, positions), iter(tasks), 0
    for module in shared:
        block = read_block(module)
        attns = [(branch, next(layers)) for branch in block.attns]
        if attns:
            x = _attention(x, attns, block.after_attns, rows, done)
        if block.ffns:
            x = _ffn(x, block.ffns, block.after_ffns, rows)
        done += len(attns)
    return x


def _attention(
    x: Tensor, branches: Sequence[tuple[Branch, Layer]], end: ContextBroadcast | None, rows: Rows, index: int
) -> Tensor:
    """Return x + Σ attention: P branches as one attention with P·H heads; ``index`` is the first one's in the model."""
    packed, gates = [], []
    heads = Heads.of(branches[0][0].body)
    for branch, layer in branches:
        h = branch.norm(x)
        if _placement(branch.body) == "front":
            h = rows.broadcast(h, branch.body.cb)
        gates.append(rows.linear(h, layer, "gate").sigmoid() if heads.gated else None)
        packed.append(rows.head_norms(rows.linear(h, layer, "qkv"), Heads.of(branch.body), layer))
    # rows of q of all branches, then k, then v
    qkv = packed[0]
    if len(packed) > 1:
        qkv = torch.stack([p.unflatten(1, (3, heads.count * heads.dim)) for p in packed], 2).flatten(1)
    out = rows.attend(qkv, heads, len(branches), index)
    parts = []
    for (branch, layer), gate, o in zip(branches, gates, out.split(heads.count * heads.dim, 1), strict=True):
        o = rows.inner_norm(o, heads, layer)
        y = rows.linear(o if gate is None else o * gate, layer, "proj")
        if _placement(branch.body) == "end":
            cb = branch.body.cb
            y, end = (y, cb) if len(branches) == 1 else (rows.broadcast(y, cb), end)
        parts.append(branch.scale(y))
    return rows.add(x, parts, end)


def _ffn(x: Tensor, branches: Sequence[Branch], end: ContextBroadcast | None, rows: Rows) -> Tensor:
    """Return x + Σ FFN."""
    parts = []
    for branch in branches:
        mlp = branch.body
        h, placement = branch.norm(x), _placement(mlp)
        if placement == "front":
            h = rows.broadcast(h, mlp.cb)
        if placement is None:
            y = _mlp(mlp, h)
        elif placement == "mid":
            y = mlp.drop2(mlp.fc2(rows.broadcast(mlp.norm(mlp.drop1(mlp.act(mlp.fc1(h)))), mlp.cb)))
        else:
            kind: Any = type(mlp).__bases__[0]  # Context Broadcasting is in a subclass
            y = kind.forward(mlp, h)
        if placement == "end":
            y, end = (y, mlp.cb) if len(branches) == 1 else (rows.broadcast(y, mlp.cb), end)
        parts.append(branch.scale(y))
    return rows.add(x, parts, end)


def _mlp(mlp: Any, h: Tensor) -> Tensor:
    """Run an FFN; on a CPU with GELU in place, since a second wide tensor takes longer than the activation."""
    plain = type(mlp) is Mlp and type(mlp.act) in (nn.GELU, GELU) and getattr(mlp.act, "approximate", "none") == "none"
    if not plain or h.is_cuda or torch.is_grad_enabled() or not isinstance(mlp.norm, nn.Identity):
        y: Tensor = mlp(h)
        return y
    return F.linear(torch.ops.aten.gelu_(mlp.fc1(h)), mlp.fc2.weight, mlp.fc2.bias)


def _placement(module: Any) -> str | None:
    return None if find_context_broadcast(module) is None else module.cb_placement

"""The forward pass of a folded bank over packed rows of many tasks: what a CUDA graph captures.

A block is seven kernels: grouped qkv, attention, grouped proj, add and norm, fc1 with GELU, fc2, add and norm. No
length and no offset is read on the host: all are in the vectors of a `Layout`. With class-token pooling the last block
computes, after keys and values, the rows of class tokens only.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.bank.folded import Folded
from vtk.bank.layout import Layout
from vtk.bank.task_heads import Ends
from vtk.fused.attention_stage import AttentionStage
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.norms import NormSpec, normalize
from vtk.fused.stage_output import close_with_norm
from vtk.fused.stages import Plan
from vtk.models.packed.rows import Layer, Stack, linear_by_runs, stacked
from vtk_kernels.add_norm import add_norm
from vtk_kernels.context_broadcast import context_broadcast
from vtk_kernels.grouped_linear import grouped_linear
from vtk_kernels.packed_attention import packed_attention


def fused_forward(
    folded: Folded,
    ends: Ends,
    layers: Iterable[Layer],
    layout: Layout,
    at: Mapping[str, Tensor],
    rows: Tensor,
    plan: Plan,
) -> Tensor:
    """Run the model from rows to logits, or the blocks alone if tasks have their own embedding and head.

    Args:
        folded: shared part of the bank.
        ends: tables and classifiers of the tasks.
        layers: attention weights of all tasks, block by block.
        layout: of the rows.
        at: vectors of ``layout`` on the device.
        rows: (T, width) patches by size, or (T, C) tokens if tasks embed their own images; padding holds any values.
        plan: operations of `vtk_kernels`, or loops over runs of rows.

    Returns:
        (S, Σ widths) logits of all stacks of classifiers, rows in the order of ``ordered``; of a row only the columns
        of its own stack are valid. If tasks compute their own logits: (T, C) tokens of the last block, before the
        last norm.
    """
    work, pooling, blocks = _Work(layout, at, plan), folded.pooling, folded.blocks
    x, h = _embedded(folded, ends, rows, at, blocks[0][0].norm, plan)
    final = None if pooling is None else pooling.norm
    late = pooling is not None and pooling.kind == "token" and not folded.pruned  # only pooled rows are normalised
    following = [*(attention.norm for attention, _ in blocks[1:]), None if late else final]
    for (attention, mlp), norm, layer in zip(blocks, following, layers, strict=True):
        pruned = folded.pruned and mlp is blocks[-1][1]
        x, h = work.attention(attention, layer, x, h, mlp.norm, pruned)
        x, h = work.mlp(mlp, x, h, norm)
    if pooling is None:
        return x
    if pooling.kind == "avg":
        h = work.means(h)
    elif late:
        h = h.index_select(0, at["first_row"])
        h = h if final is None else normalize(h, final, plan.kernels)
    if pooling.fc_norm is not None:
        h = normalize(h, pooling.fc_norm, plan.kernels)
    h = h.index_select(0, at["ordered"])
    found = [work.product(h, stack.w, stack.b, f"head{i}") for i, stack in enumerate(ends.heads)]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _embedded(
    folded: Folded, ends: Ends, rows: Tensor, at: Mapping[str, Tensor], norm: NormSpec, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the tokens that the first block reads, and their normalised form."""
    stem = folded.stem
    if stem is None or ends.table is None:
        return rows, normalize(rows, norm, plan.kernels)
    added = F.linear(rows, folded.matrix).index_select(0, at["patch_row"])
    table = ends.table.index_select(0, at["table_row"])
    if stem.pre is None:
        return _add_and_norm(table, added, norm, plan)
    x, eps = table.add_(added), stem.pre.eps
    if stem.pre.kind == "rms":
        x = F.rms_norm(x, x.shape[-1:], folded.pre_weight, eps)
    else:
        x = F.layer_norm(x, x.shape[-1:], folded.pre_weight, folded.pre_bias, eps)
    return x, normalize(x, norm, plan.kernels)


def _add_and_norm(x: Tensor, m: Tensor, norm: NormSpec | None, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return x + m and its normalised form."""
    if norm is not None and norm.kind == "layer" and plan.kernels:
        return add_norm(x, m, norm.eps)[:2]
    y = m.add_(x)  # callers do not use m afterwards
    return y, (y if norm is None else normalize(y, norm, plan.kernels))


class _Work:
    """The steps of a block on one call's rows."""

    def __init__(self, layout: Layout, at: Mapping[str, Tensor], plan: Plan) -> None:
        self.layout, self.at, self.plan = layout, at, plan
        self.bounds = at["cu_seqlens"]

    def product(self, x: Tensor, w: Stack, b: Stack, which: str) -> Tensor:
        """Multiply each row by its group's matrix; 0 in rows of no group."""
        if self.plan.kernels:
            return grouped_linear(x, stacked(w), stacked(b), self.at[which])
        return linear_by_runs(x, w, b, self.layout.runs[which])

    def attention(
        self, stage: AttentionStage, layer: Layer, x: Tensor, h: Tensor, norm: NormSpec | None, pruned: bool
    ) -> tuple[Tensor, Tensor]:
        """Return x + attention(h) and its normalised form; ``pruned`` for the first row of each segment only."""
        if stage.front:
            h = self.broadcast(h, stage.front_scale)
        qkv = self.product(h, layer["qkv.weight"], layer["qkv.bias"], "rows")
        if stage.qk_norm is not None:
            qkv = self.head_norms(qkv, stage, layer)
        o = packed_attention(
            qkv, stage.num_heads, self.bounds, num_queries=1 if pruned else None,
            max_seqlen=self.layout.bucket.longest,
        )  # fmt: skip
        if pruned:
            x, o = x.index_select(0, self.at["first_row"]), o.squeeze(1)
        m = self.product(o, layer["proj.weight"], layer["proj.bias"], "pooled" if pruned else "rows")
        return self.end(stage, x, m, norm)

    def mlp(self, stage: MlpStage, x: Tensor, h: Tensor, norm: NormSpec | None) -> tuple[Tensor, Tensor]:
        """Return x + FFN(h) and its normalised form."""
        if stage.front:
            h = self.broadcast(h, stage.front_scale)
        u = stage.activated(h[None], stage.w_in, stage.b_in, self.plan)
        if stage.mid:
            u = self.broadcast(u[0], stage.mid_scale)[None]
        if norm is not None and norm.kind == "layer" and self.plan.kernels and not stage.end:
            y, h = close_with_norm(x[None], stage.bias, [(u, stage.w_out)], norm.eps, self.plan)
            return y[0], h[0]
        return self.end(stage, x, F.linear(u[0], stage.w_out, stage.bias), norm)

    def end(self, stage: Any, x: Tensor, m: Tensor, norm: NormSpec | None) -> tuple[Tensor, Tensor]:
        """Return x + m, with Context Broadcasting where the stage ends with it, and its normalised form."""
        if not stage.end:
            return _add_and_norm(x, m, norm, self.plan)
        y = context_broadcast(x, m, stage.end_scale, self.bounds)
        return y, (y if norm is None else normalize(y, norm, self.plan.kernels))

    def broadcast(self, m: Tensor, scale: Tensor | None) -> Tensor:
        """Mix into each row the mean of its segment."""
        return context_broadcast(torch.zeros_like(m), m, scale, self.bounds)

    def head_norms(self, qkv: Tensor, stage: AttentionStage, layer: Layer) -> Tensor:
        """Normalise q and k over the channels of a head, with each row's own weights, which hold 1/√D."""
        spec: NormSpec = stage.qk_norm.norm  # type: ignore[union-attr]
        parts = list(qkv.unflatten(1, (3, stage.num_heads, stage.head_dim)).unbind(1))  # (T, P·H, D) each
        for i, side in enumerate("qk"):
            y = normalize(parts[i], spec, self.plan.kernels)
            y = y * stacked(layer[f"{side}_norm.weight"]).index_select(0, self.at["row_slot"])
            if f"{side}_norm.bias" in layer:
                y = y + stacked(layer[f"{side}_norm.bias"]).index_select(0, self.at["row_slot"])
            parts[i] = y
        return torch.stack(parts, 1).flatten(1)

    def means(self, h: Tensor) -> Tensor:
        """Return the mean of the rows that are pooled of each segment: (S, C)."""
        # Context Broadcasting also gives the means themselves, summed in fp32 and always in the same order
        found: Tensor = torch.ops.vtk_kernels.context_broadcast(h, h, None, self.at["pool_bounds"])[1]
        return found[1::2].to(h.dtype)

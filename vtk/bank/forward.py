"""The forward pass of a folded bank over packed rows of many tasks: what a CUDA graph captures.

A block is seven kernels: grouped qkv, attention, grouped proj, add and norm, fc1 with GELU or SwiGLU, fc2, add and
norm; an eighth where a norm stands before fc2. Where tasks have factors four more add their changes to qkv and proj. No
length and no offset is read on the host: all are in the vectors of a `Layout`. With class-token pooling the last block
computes, after keys and values, the rows of class tokens only. Attention turns queries and keys by a table of all
tasks' positions, of which a vector of the `Layout` gives each row's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.bank.folded import Folded
from vtk.bank.grouped_weights import GroupedMatrix, SmallStack
from vtk.bank.layout import Layout
from vtk.bank.stacked_tables import add_changes
from vtk.bank.task_heads import CallEnds
from vtk.fused.attention_stage import AttentionStage
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.norms import NormSpec, normalize, normalize_parts
from vtk.fused.stage_input import Pair
from vtk.fused.stage_output import accumulate, close_with_norm
from vtk.fused.stages import Plan
from vtk.models.packed.products import Layer, Stack, linear_by_runs, stacked
from vtk_kernels._heads import HeadNorms
from vtk_kernels.add_norm import add_norm
from vtk_kernels.context_broadcast import context_broadcast
from vtk_kernels.grouped_linear import grouped_linear
from vtk_kernels.packed_attention import packed_attention


def fused_forward(
    folded: Folded,
    ends: CallEnds,
    layers: Iterable[Layer],
    layout: Layout,
    at: Mapping[str, Tensor],
    rows: Tensor,
    plan: Plan,
    rope: Tensor | None = None,
) -> Tensor:
    """Run the model from rows to logits, or the blocks alone if tasks have their own embedding and head.

    Args:
        folded: shared part of the bank.
        ends: tables and classifiers of the call.
        layers: attention weights of all tasks, block by block.
        layout: of the rows.
        at: vectors of ``layout`` on the device.
        rows: (T, width) patches by size, or (T, C) tokens if tasks embed their own images; padding holds any values.
        plan: operations of `vtk_kernels`, or loops over runs of rows.
        rope: rotary tables of all tasks, as of `RowPositions`; ``layout`` has each row's row of them.

    Returns:
        (S, Σ widths) logits of all stacks of classifiers, rows in the order of ``ordered``; of a row only the columns
        of its own stack are valid. If tasks compute their own logits: (T, C) tokens of the last block, before the
        last norm.
    """
    work, pooling, blocks = _Work(layout, at, plan, rope), folded.pooling, folded.blocks
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
    folded: Folded, ends: CallEnds, rows: Tensor, at: Mapping[str, Tensor], norm: NormSpec, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the tokens that the first block reads, and their normalised form."""
    stem = folded.stem
    if stem is None or ends.table is None:
        return rows, normalize(rows, norm, plan.kernels)
    added = F.linear(rows, folded.matrix).index_select(0, at["patch_row"])
    table = ends.table.index_select(0, at["table_row"])
    if "thin_table" in at and ends.low_rank is not None and ends.low_rank.factors is not None:
        add_changes(table, ends.low_rank.factors, at["place"], at["table_slot"], at["thin_table"])
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
    if norm is not None and plan.kernels:
        return add_norm(x, m, norm.eps, rms=norm.kind == "rms")[:2]
    y = m.add_(x)  # callers do not use m afterwards
    return y, (y if norm is None else normalize(y, norm, plan.kernels))


class _Work:
    """The steps of a block on one call's rows."""

    def __init__(self, layout: Layout, at: Mapping[str, Tensor], plan: Plan, rope: Tensor | None) -> None:
        self.layout, self.at, self.plan, self.rope = layout, at, plan, rope
        self.bounds = at["cu_seqlens"]

    def product(self, x: Tensor, w: Stack | GroupedMatrix, b: Stack | SmallStack, which: str) -> Tensor:
        """Multiply each row by its group's matrix."""
        if isinstance(w, GroupedMatrix):
            whole = self.at[which] if self.layout.bucket.whole else None
            return w.multiply(x, whole, self.at[f"thin_{which}"], self.plan.device_name)
        assert not isinstance(b, SmallStack)
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
        rope = None
        if stage.rotary is not None and self.rope is not None:
            table = self.rope[min(stage.rotary, len(self.rope) - 1)]
            rope = table[0] if len(table) == 1 else table
        o = packed_attention(
            qkv, stage.num_heads, self.bounds, num_queries=1 if pruned else None,
            max_seqlen=self.layout.bucket.longest, num_kv_heads=stage.num_kv_heads, rope=rope,
            rotate_half=stage.rotate_half, rope_row=None if rope is None else self.at["rope_row"],
            qk_norm=self.head_norms(stage, layer),
        )  # fmt: skip
        if pruned:
            x, o = x.index_select(0, self.at["first_row"]), o.squeeze(1)
            h = h.index_select(0, self.at["first_row"]) if "gate.weight" in layer else h
        o = self.finished(stage, layer, o, h, pruned)
        m = self.product(o, layer["proj.weight"], layer["proj.bias"], "pooled" if pruned else "rows")
        return self.end(stage, x, m, norm)

    def small(self, value: Stack | SmallStack) -> Tensor:
        """Return biases or norms of all tasks, as ``row_slot`` and ``segment_slot`` count them."""
        if isinstance(value, SmallStack):
            return value.of_call(self.layout.bucket.whole)
        return stacked(value)

    def head_norms(self, stage: AttentionStage, layer: Layer) -> HeadNorms | None:
        """Return the norms of q and k, of which each segment has its task's; q's hold 1/√D."""
        if stage.qk_norm is None:
            return None
        spec = stage.qk_norm.norm
        names = [f"{side}_norm.{part}" for side in "qk" for part in ("weight", "bias")]
        q_weight, q_bias, k_weight, k_bias = (self.small(layer[name]) if name in layer else None for name in names)
        return HeadNorms(spec.kind, spec.eps, q_weight, q_bias, k_weight, k_bias, self.at["segment_slot"])

    def finished(self, stage: AttentionStage, layer: Layer, o: Tensor, h: Tensor, pruned: bool) -> Tensor:
        """Return the heads' outputs as the projection reads them: normalised and gated, where the attention does."""
        if stage.sub_norm is not None:
            o = normalize_parts(o, stage.sub_norm, stage.branches, self.plan)
        if "gate.weight" not in layer:
            return o
        if "norm.weight" in layer:
            slot = self.at["segment_slot" if pruned else "row_slot"]
            o = o * self.small(layer["norm.weight"]).index_select(0, slot)
            o = o + self.small(layer["norm.bias"]).index_select(0, slot)
        gate = self.product(h, layer["gate.weight"], layer["gate.bias"], "pooled" if pruned else "rows")
        return o.mul_(gate.sigmoid_())

    def mlp(self, stage: MlpStage, x: Tensor, h: Tensor, norm: NormSpec | None) -> tuple[Tensor, Tensor]:
        """Return x + FFN(h) and its normalised form."""
        if stage.front:
            h = self.broadcast(h, stage.front_scale)
        pairs: list[Pair]
        if stage.mid:
            u = stage.activated(h[None], stage.w_in, stage.b_in, self.plan)
            pairs = [(self.broadcast(u[0], stage.mid_scale)[None], stage.w_out)]
        else:
            pairs = list(stage.pairs(h[None], None, self.plan, split=False))
        if norm is not None and self.plan.kernels and not stage.end:
            y, h = close_with_norm(x[None], stage.bias, pairs, norm.eps, self.plan, rms=norm.kind == "rms")
            return y[0], h[0]
        return self.end(stage, x, accumulate(None, stage.bias, pairs)[0], norm)

    def end(self, stage: Any, x: Tensor, m: Tensor, norm: NormSpec | None) -> tuple[Tensor, Tensor]:
        """Return x + m, with Context Broadcasting where the stage ends with it, and its normalised form."""
        if not stage.end:
            return _add_and_norm(x, m, norm, self.plan)
        y = context_broadcast(x, m, stage.end_scale, self.bounds)
        return y, (y if norm is None else normalize(y, norm, self.plan.kernels))

    def broadcast(self, m: Tensor, scale: Tensor | None) -> Tensor:
        """Mix into each row the mean of its segment."""
        return context_broadcast(torch.zeros_like(m), m, scale, self.bounds)

    def means(self, h: Tensor) -> Tensor:
        """Return the mean of the rows that are pooled of each segment: (S, C)."""
        # Context Broadcasting also gives the means themselves, summed in fp32 and always in the same order
        found: Tensor = torch.ops.vtk_kernels.context_broadcast(h, h, None, self.at["pool_bounds"])[1]
        return found[1::2].to(h.dtype)

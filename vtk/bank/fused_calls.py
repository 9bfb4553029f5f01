"""Runs one call of a folded bank: packs images into rows, computes them, and splits the logits by task."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk.bank.bank_graphs import BucketGraphs
from vtk.bank.folded import Folded
from vtk.bank.forward import fused_forward
from vtk.bank.grouped_weights import Slot
from vtk.bank.layout import Bucket, Layout, Part, lay_out
from vtk.bank.positions import CallPositions, Positions
from vtk.bank.task_entry import Entry
from vtk.bank.task_heads import CallEnds, Ends
from vtk.fused.ring import PinnedRing
from vtk.fused.stages import Plan
from vtk.models.packed.products import Layer
from vtk_kernels.choices import device_name
from vtk_kernels.patchify import patchify


@dataclass(frozen=True)
class FusedCall:
    """The tasks of one call, in the order of their rows.

    Attributes:
        folded: shared part of the bank.
        norm: the model's last norm, if tasks compute their own logits.
        ends: as the call reads them.
        entries: of the call's tasks that have images, by slot.
        parts: of the same tasks.
        kernels: whether operations of `vtk_kernels` run.
        positions: as the call reads them.
    """

    folded: Folded
    norm: Callable[[Tensor], Tensor] | None
    ends: CallEnds
    entries: Sequence[Entry]
    parts: tuple[Part, ...]
    kernels: bool
    positions: CallPositions

    @classmethod
    def of(
        cls,
        folded: Folded,
        norm: Callable[[Tensor], Tensor] | None,
        ends: Ends,
        entries: Mapping[str, Entry],
        counts: Mapping[str, int],
        slots: Mapping[int, Slot],
        kernels: bool,
        positions: Positions,
    ) -> "FusedCall":
        """Order the tasks by slot.

        Args:
            folded: of the bank.
            norm: of the bank.
            ends: of the bank.
            entries: of all tasks with images in this call.
            counts: their images.
            slots: of each number of attention weights.
            kernels: whether operations of `vtk_kernels` run.
            positions: of the bank's tasks.
        """
        order = sorted(entries.values(), key=lambda e: (slots[e.number].group, slots[e.number].own))
        names = [e.name for e in order]
        found, seen = ends.of_call(names), positions.of_call(names)
        low = found.low_rank
        prefix, table_slot = ({}, {}) if low is None else (low.prefix, low.slot)
        sizes = {size: i for i, size in enumerate(sorted({e.card.input.size for e in order}))}
        parts = tuple(
            Part(
                slots[e.number].group, counts[e.name], e.tokens, sizes[e.card.input.size],
                found.table_at.get(e.name, 0), found.head_at.get(e.name), seen.first_row.get(e.name),
                slots[e.number].own, slots[e.number].thin, prefix.get(e.name), table_slot.get(e.name),
            ) for e in order
        )  # fmt: skip
        return cls(folded, norm, found, order, parts, kernels, seen)

    def run(
        self,
        images: Mapping[str, Tensor],
        layers: Iterable[Layer],
        device: torch.device,
        dtype: torch.dtype,
        graphs: BucketGraphs | None = None,
        generation: Hashable = None,
    ) -> dict[str, Tensor]:
        """Compute the logits (B, classes) of each task; they may be views of one tensor.

        Args:
            images: of each task.
            layers: attention weights, block by block; read once, with graphs repeatedly.
            device: of the weights.
            dtype: of the weights.
            graphs: captured graphs; None to launch kernel by kernel.
            generation: of the weights; graphs of another one are dropped.
        """
        rows = self.rows(images, device, dtype, None if graphs is None else graphs.ring)
        bucket = Bucket.exact(self.parts)
        rope = self.positions.rope
        plan = Plan(self.kernels, device_name(rows[0]) if self.kernels else None)
        if graphs is not None and graphs.fits(bucket.up()):
            layout = self.layout(bucket.up(), device)

            def compute(rows: Tensor, values: Tensor) -> Tensor:
                return fused_forward(self.folded, self.ends, layers, layout, layout.views(values), rows, plan, rope)

            return self.split(graphs.replay(layout.bucket, generation, rows, layout.values, compute), layout)
        layout = self.layout(bucket, device)
        at = layout.views(layout.values.to(device, non_blocking=True))
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        return self.split(fused_forward(self.folded, self.ends, layers, layout, at, joined, plan, rope), layout)

    def layout(self, bucket: Bucket, device: torch.device) -> Layout:
        """Return the row layout of the call, padded to ``bucket``."""
        skip = 0 if self.folded.pooling is None else self.folded.pooling.skip
        return lay_out(
            self.parts, bucket, len(self.ends.heads), skip, device.type == "cuda" and torch.cuda.is_available()
        )

    def rows(
        self, images: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, ring: PinnedRing | None = None
    ) -> list[Tensor]:
        """Return the images' patches (n, width) by size, or tokens (n, C) if tasks embed their own images.

        With a ``ring``, images on the host are copied through pinned memory, without waiting.
        """
        stem = self.folded.stem
        if stem is None:
            return [e.embed(images[e.name].to(device, dtype)).flatten(0, 1) for e in self.entries]
        by_size: dict[int, list[Tensor]] = {}
        for entry, part in zip(self.entries, self.parts, strict=True):
            by_size.setdefault(part.size, []).append(images[entry.name])
        width = self.folded.matrix.shape[1]
        return [
            patchify(_concatenate(by_size[size], device, dtype, ring), stem.patch, stem.prefix, width).flatten(0, 1)
            for size in sorted(by_size)
        ]

    def split(self, out: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Return each task's logits from the output of `fused_forward`."""
        if self.folded.pooling is None:
            return self._logits_of_tokens(out)
        columns = [0]
        for stack in self.ends.heads:
            columns.append(columns[-1] + stack.width)
        found = {}
        for entry, part, first in zip(self.entries, self.parts, layout.first, strict=True):
            assert part.head is not None
            column = columns[part.head[0]]
            found[entry.name] = out[first : first + part.images, column : column + self.ends.classes[entry.name]]
        return found

    def _logits_of_tokens(self, x: Tensor) -> dict[str, Tensor]:
        found, row = {}, 0
        h = x if self.norm is None else self.norm(x)
        for entry, part in zip(self.entries, self.parts, strict=True):
            first, row = row, row + part.images * part.tokens
            found[entry.name] = entry.logits(h[first:row].unflatten(0, (part.images, part.tokens)))
        return found


def _concatenate(
    batches: Sequence[Tensor], device: torch.device, dtype: torch.dtype, ring: PinnedRing | None
) -> Tensor:
    """Return all images in one tensor, moved and cast at once if their dtypes and devices agree."""
    if ring is not None and device.type == "cuda" and all(b.device.type == "cpu" for b in batches):
        with torch.inference_mode(False):
            joined = torch.empty(sum(map(len, batches)), *batches[0].shape[1:], dtype=dtype, device=device)
        return ring.send(batches, joined)
    if len({(b.device, b.dtype) for b in batches}) > 1:
        batches = [b.to(device, dtype) for b in batches]
    return (batches[0] if len(batches) == 1 else torch.cat(list(batches))).to(device, dtype)

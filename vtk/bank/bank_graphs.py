"""CUDA graphs of a folded bank, one for each bucket of lengths; one graph serves every mix of tasks that fits."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vtk.bank.layout import Bucket
from vtk.fused.graph_cache import GraphCache

MAX_ROWS = 65536
"""Most rows of a graph: with more, kernels hide the launch overhead, and static inputs only take memory."""


@dataclass
class _Captured:
    graph: Any
    rows: Tensor  # static inputs, written before each replay
    values: Tensor
    out: Tensor


class BucketGraphs(GraphCache):
    """Captured forward passes by bucket, least recently used first; one memory pool for intermediate tensors.

    The caller allows one call at a time and makes streams wait for each other, as a store's `turn` does. Graphs read
    weights at fixed addresses: with another ``generation`` all of them are dropped.

    Args:
        max_graphs: most captured graphs.
    """

    def __init__(self, max_graphs: int = 16) -> None:
        super().__init__(max_graphs)
        self._captured: OrderedDict[Bucket, _Captured] = OrderedDict()
        self._generation: Hashable = None
        self._rows: Tensor | None = None

    def __reduce__(self) -> tuple[type["BucketGraphs"], tuple[int]]:
        """Copy and pickle as an empty cache."""
        return BucketGraphs, (self.max_graphs,)

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and of the static inputs."""
        rows = 0 if self._rows is None else self._rows.nbytes
        return self.pool_bytes() + rows + sum(entry.values.nbytes for entry in self._captured.values())

    def fits(self, bucket: Bucket) -> bool:
        """Return whether calls of this bucket run as a graph, here and now."""
        return bucket.rows <= MAX_ROWS and not torch.cuda.is_current_stream_capturing()

    def replay(
        self,
        bucket: Bucket,
        generation: Hashable,
        inputs: Sequence[Tensor],
        values: Tensor,
        compute: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return ``compute(rows, values)``, captured at the first call of a bucket and replayed later.

        Args:
            bucket: lengths of the call, rounded up.
            generation: of all other tensors that ``compute`` reads.
            inputs: rows (n, K) to concatenate, at most ``bucket.rows`` in total; the remaining rows keep their values.
            values: (M,) int32 on any device, of one length for all calls of a bucket and generation.
            compute: does not wait for the device.
        """
        if generation != self._generation:
            self.clear()
            self._generation = generation
        entry = self._captured.get(bucket)
        if entry is not None:
            self._captured.move_to_end(bucket)
            _fill(entry.rows, inputs)
            entry.values.copy_(values, non_blocking=True)
        else:
            make = partial(self._add, bucket, inputs, values, compute)
            plain = partial(self._plain, bucket, inputs, values, compute)
            if not self._patience.waits(bucket):
                entry = self.attempt(bucket, f"a call of up to {bucket.rows} rows", make, plain)
            if entry is None:
                return plain()
        entry.graph.replay()
        return entry.out.clone()

    def expire(self) -> None:
        """Drop every graph and the static input."""
        super().expire()
        while self._captured:
            self._drop_oldest()
        self._rows = None

    def _plain(
        self, bucket: Bucket, inputs: Sequence[Tensor], values: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Compute the same without a graph."""
        rows = inputs[0].new_zeros(bucket.rows, inputs[0].shape[1])
        _fill(rows, inputs)
        return compute(rows, values.to(rows.device))

    def _add(
        self, bucket: Bucket, inputs: Sequence[Tensor], values: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> _Captured:
        while len(self._captured) >= self.max_graphs:
            self._patience.dropped(self._drop_oldest())  # the pool stays: the next graph takes its memory
        if not self._captured:
            self._pool = None
        with torch.inference_mode(False), torch.no_grad():
            rows = self._static(bucket.rows, inputs[0])
            static_values = values.to(rows.device, copy=True)
            _fill(rows, inputs)
            before = self.pool_bytes()
            graph, out = self._record(lambda x: compute(x, static_values), rows)
        entry = self._captured[bucket] = _Captured(graph, rows, static_values, out)
        if self.notice is not None:
            self.notice(f"CUDA graph of up to {bucket.rows} rows", rows.nbytes + self.pool_bytes() - before)
        return entry

    def _drop_oldest(self) -> Bucket:
        bucket, entry = self._captured.popitem(last=False)
        for tensor in (entry.rows, entry.values):
            if tensor.is_cuda:  # this stream has waited for all calls; the one the memory is of has not
                tensor.record_stream(torch.cuda.current_stream())
        return bucket

    def _static(self, rows: int, like: Tensor) -> Tensor:
        """Return the first rows of an input that all graphs share: calls take turns."""
        if self._rows is None or len(self._rows) < rows:
            self._rows = like.new_zeros(rows, like.shape[1])  # a graph of the one before keeps it
        return self._rows[:rows]


def _fill(rows: Tensor, inputs: Sequence[Tensor]) -> None:
    start = 0
    for part in inputs:
        rows[start : start + len(part)].copy_(part)
        start += len(part)

"""Segments of a packed matrix, consecutive rows of one image, of many sizes and tasks; and positions of its rows."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Rows of each image, and the task of each image.

    Attributes:
        cu_seqlens: (S + 1,) int32 on the device of the rows: 0, and the end row of each segment.
        task: index of each segment's task in the stacks, ascending.
        sizes: number of tokens of each segment, including prefix tokens; as in ``cu_seqlens``, on the host.
    """

    cu_seqlens: Tensor
    task: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, images: Iterable[tuple[int, int, int]], device: torch.device | str = "cpu") -> "Segments":
        """Return segments for (task, number of images, tokens per image), tasks in ascending order."""
        task, sizes = [], []
        for which, count, tokens in images:
            task += [which] * count
            sizes += [tokens] * count
        bounds = list(itertools.accumulate(sizes, initial=0))
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        if torch.device(device).type == "cuda":
            if torch.cuda.is_available():  # without a GPU only kernels are counted, on fake tensors
                cu_seqlens = cu_seqlens.pin_memory()
            cu_seqlens = cu_seqlens.to(device, non_blocking=True)
        return cls(cu_seqlens, tuple(task), tuple(sizes))

    @property
    def rows(self) -> int:
        """Rows of all segments; a matrix may have more, as padding."""
        return sum(self.sizes)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (task, first row, row end) for each task that has rows."""
        row = 0
        for task, group in itertools.groupby(zip(self.task, self.sizes, strict=True), key=lambda pair: pair[0]):
            first, row = row, row + sum(size for _, size in group)
            yield task, first, row

    def equal_runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first row, number of segments, tokens of each) for each run of segments of one length."""
        row = 0
        for size, group in itertools.groupby(self.sizes):
            count = len(list(group))
            yield row, count, size
            row += count * size


@dataclass(frozen=True)
class RowPositions:
    """Positions of packed rows, as attention sees them.

    Attributes:
        rope: (L, 1 or H, R, D), fp32 (fp64 for fp64): a table for each attention of the model, or one for all; for each
            head, or one for all. Row r has the cosines of D/2 angles, then their sines; tokens without a position,
            cosines 1 and sines 0. None for no rotary embedding.
        rope_row: (T,) int32, each row's row of the table.
        bias: for each run of images, as many as the first number, of as many tokens as the second: (L, H, N, N), added
            to the scores.
    """

    rope: Tensor | None = None
    rope_row: Tensor | None = None
    bias: Sequence[tuple[int, int, Tensor]] = ()

"""Row layout of one call as a vector of integers: the task, image and position of each packed row.

Everything is counted on the host, in numpy, and copied to the device at once. Lengths are rounded up to a bucket, so
that one CUDA graph, whose lengths are fixed, serves every call of its bucket: the spare rows repeat row 0 and belong to
no task, the spare segments are empty. Neither affects a row of a task.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk.models.packed.rows import TILE

POOLED_TILE = 16
"""Rows of a tile of a product over pooled rows, of which a task has as many as images."""
Run = tuple[int, int, int]
"""Group, first row, row end."""


@dataclass(frozen=True)
class Part:
    """The images of one task in one call.

    Attributes:
        slot: of its attention weights; parts are in ascending order of it.
        images: B ≥ 1.
        tokens: of an image, prefix included.
        size: of an image, as a number: parts of one number are embedded together, in ascending order of it.
        table: first row of its table.
        head: which stack of classifiers, and its place there; None where tasks make their own logits.
        rope: first row of its rotary table; None for no rotary embedding.
        own: of its biases and norms, among those of all tasks; None for ``slot``.
        thin: of its factors, ascending; None for a task of whole matrices.
        prefix: first row and number of its own rows before the patches, where ``table`` is the base's.
        table_slot: of the factors of its table there; None for a whole table.
    """

    slot: int
    images: int
    tokens: int
    size: int = 0
    table: int = 0
    head: tuple[int, int] | None = None
    rope: int | None = None
    own: int | None = None
    thin: int | None = None
    prefix: tuple[int, int] | None = None
    table_slot: int | None = None


@dataclass(frozen=True)
class Bucket:
    """Lengths that calls are rounded up to, and the kinds of their tasks.

    Attributes:
        rows: T.
        segments: S.
        longest: bound of the tokens of an image.
        whole: whether tasks have whole matrices.
        thin: whether tasks have factors.
        tables: whether tasks have low-rank tables.
    """

    rows: int
    segments: int
    longest: int
    whole: bool = True
    thin: bool = False
    tables: bool = False

    @classmethod
    def exact(cls, parts: Iterable[Part]) -> "Bucket":
        """Return the lengths themselves."""
        parts = tuple(parts)
        rows, segments = sum(p.images * p.tokens for p in parts), sum(p.images for p in parts)
        thin = [p.thin is not None for p in parts]
        tables = any(p.table_slot is not None for p in parts)
        return cls(rows, segments, max(p.tokens for p in parts), not all(thin), any(thin), tables)

    def up(self) -> "Bucket":
        """Round up: rows by at most 1/8 or to the next 256, segments by at most 1/4, tokens by 1/4 or to the next 64.

        Attention takes 64 queries at a time, a product 128 rows: less than that would save nothing.
        """
        rows, segments = _round(self.rows, 256, 3), _round(self.segments, 1, 2)
        return dataclasses.replace(self, rows=rows, segments=segments, longest=_round(self.longest, 64, 2))


@dataclass(frozen=True)
class Layout:
    """Row layout of one call.

    Attributes:
        bucket: the lengths.
        values: (M,) int32 on the host, in pinned memory for CUDA.
        places: of each vector in ``values``: its start and its shape.
        runs: rows of a group for each product, for loops: "rows", "pooled", "head0", "head1" and so on.
        first: of each part, its first row in ``ordered``'s order of pooled rows.
    """

    bucket: Bucket
    values: Tensor
    places: Mapping[str, tuple[int, tuple[int, ...]]]
    runs: Mapping[str, tuple[Run, ...]]
    first: tuple[int, ...]

    def views(self, values: Tensor) -> dict[str, Tensor]:
        """Return the vectors by name, as views of a copy of ``values``."""
        return {
            name: values[start : start + int(np.prod(shape))].view(shape)
            for name, (start, shape) in self.places.items()
        }


@functools.lru_cache(maxsize=64)
def lay_out(parts: tuple[Part, ...], bucket: Bucket, heads: int = 0, skip: int = 0, pin: bool = False) -> Layout:
    """Compute the row layout of a call; cached, since calls of the same tasks and numbers of images repeat.

    Args:
        parts: at least one, in the order of their rows.
        bucket: lengths to pad to.
        heads: number of stacks of classifiers.
        skip: first rows of an image that mean pooling leaves out.
        pin: for a copy to CUDA that does not wait.

    Returns:
        With T rows, S segments and G tiles, padded with 0 or the last end:
        ``cu_seqlens`` (S + 1), first row of each segment and the last end; ``first_row`` (S);
        ``pool_bounds`` (2·S + 1), first row and first pooled row of each segment; ``table_row`` (T), row of the tasks'
        table; ``patch_row`` (T), row among those of all patches by size; ``row_slot`` (T) and ``segment_slot``
        (S), place of biases and norms; ``rope_row`` (T), row of the rotary tables, if there are such;
        ``rows`` (3, G) tile map of the rows by slot, ``pooled`` that of one row a segment; where tasks have factors,
        ``thin_rows`` and ``thin_pooled`` those of such tasks by ``Part.thin``; where tables are of low rank, ``place``
        (T), row among an image's patches or −1, ``table_slot`` (S) of each part and ``thin_table``, tile map by part;
        ``head0`` and so on those of the pooled rows in the order of classifiers; ``ordered`` (S), pooled rows in that
        order.
    """
    t, s = bucket.rows, bucket.segments
    images, tokens = _column(parts, "images"), _column(parts, "tokens")
    ends, pooled_ends = np.cumsum(images * tokens), np.cumsum(images)
    sizes = np.repeat(tokens, images)
    bounds = _spread(np.concatenate([[0], np.cumsum(sizes)]), s + 1, int(ends[-1]))
    firsts = bounds[:-1].copy()
    firsts[len(sizes) :] = 0
    pool_bounds = np.empty(2 * s + 1, np.int64)
    pool_bounds[::2], pool_bounds[1::2] = bounds, np.minimum(bounds[:-1] + skip, bounds[1:])

    local = np.arange(ends[-1]) - np.repeat(bounds[: len(sizes)], sizes)  # row in its image
    by_size = sorted(range(len(parts)), key=lambda i: (parts[i].size, i))
    patches = np.empty(len(parts), np.int64)
    patches[by_size] = np.cumsum([0, *(images * tokens)[by_size]])[:-1]
    rows = images * tokens
    starts = ends - rows
    tables, before = _column(parts, "table"), np.array([(p.prefix or (0, 0))[0] for p in parts], np.int64)
    prefixes = np.repeat([(p.prefix or (0, 0))[1] for p in parts], rows)
    own = np.array([p.slot if p.own is None else p.own for p in parts], np.int64)
    arrays: dict[str, Any] = {
        "cu_seqlens": bounds, "first_row": firsts, "pool_bounds": pool_bounds,
        "table_row": _spread(np.where(local < prefixes, np.repeat(before, rows), np.repeat(tables, rows)) + local, t),
        "patch_row": _spread(np.repeat(patches - starts, rows) + np.arange(ends[-1]), t),
        "row_slot": _spread(np.repeat(own, rows), t),
        "segment_slot": _spread(np.repeat(own, images), s),
    }  # fmt: skip
    if any(p.rope is not None for p in parts):
        arrays["rope_row"] = _spread(np.repeat([p.rope or 0 for p in parts], rows) + local, t)
    slots = [p.slot for p in parts]
    runs = {"rows": _runs(slots, starts, ends), "pooled": _runs(slots, pooled_ends - images, pooled_ends)}
    arrays["rows"] = tile_map(runs["rows"], TILE, t // TILE + s)
    arrays["pooled"] = tile_map(runs["pooled"], POOLED_TILE, s // POOLED_TILE + s)
    if bucket.thin:
        thin = [i for i, p in enumerate(parts) if p.thin is not None]
        slots = [int(parts[i].thin or 0) for i in thin]
        of_rows, of_pooled = (
            _runs(slots, e[thin] - n[thin], e[thin]) for n, e in ((rows, ends), (images, pooled_ends))
        )
        arrays["thin_rows"] = tile_map(of_rows, TILE, t // TILE + s)
        arrays["thin_pooled"] = tile_map(of_pooled, POOLED_TILE, s // POOLED_TILE + s)

    if bucket.tables:
        low = [i for i, p in enumerate(parts) if p.table_slot is not None]
        is_low = np.repeat([p.table_slot is not None for p in parts], rows)
        arrays["place"] = _spread(np.where(is_low & (local >= prefixes), local - prefixes, -1), t, -1)
        arrays["table_slot"] = _spread(np.array([p.table_slot or 0 for p in parts]), s)
        arrays["thin_table"] = tile_map(_runs(low, starts[low], ends[low]), TILE, t // TILE + s)

    by_head = sorted(range(len(parts)), key=lambda i: (parts[i].head or (0, 0), i)) if heads else range(len(parts))
    order = np.concatenate([np.arange(pooled_ends[i] - images[i], pooled_ends[i]) for i in by_head])
    arrays["ordered"] = _spread(order, s)
    at = np.cumsum([0, *images[list(by_head)]])
    first = np.empty(len(parts), np.int64)
    first[list(by_head)] = at[:-1]
    for which in range(heads):
        mine = [i for i in by_head if (parts[i].head or (-1, 0))[0] == which]
        places = [(parts[i].head or (0, 0))[1] for i in mine]
        runs[f"head{which}"] = _runs(places, first[mine], first[mine] + images[mine])
        arrays[f"head{which}"] = tile_map(runs[f"head{which}"], POOLED_TILE, s // POOLED_TILE + s)
    return _concatenate(bucket, arrays, runs, tuple(map(int, first)), pin)


def tile_map(runs: Sequence[Run], block: int, tiles: int) -> Any:
    """Return the map (3, tiles) of `vtk_kernels.grouped_linear.make_tile_map`, computed on the host."""
    table = np.array(runs, np.int64).reshape(-1, 3)
    group, first, last = table.T
    counts = -(-(last - first) // block)
    which = np.repeat(np.arange(len(table)), counts)
    start = first[which] + block * (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts))
    found = np.empty((3, tiles), np.int64)
    found[0], found[1:] = -1, last[-1] if len(table) else 0
    found[:, : len(which)] = group[which], start, np.minimum(start + block, last[which])
    return found


def _concatenate(
    bucket: Bucket, arrays: Mapping[str, Any], runs: Mapping[str, tuple[Run, ...]], first: tuple[int, ...], pin: bool
) -> Layout:
    places, start = {}, 0
    for name, array in arrays.items():
        places[name] = (start, array.shape)
        start += -(-array.size // 4) * 4  # vectors start at multiples of 16 bytes, for aligned loads
    joined = np.zeros(start, np.int32)
    for name, array in arrays.items():
        at = places[name][0]
        joined[at : at + array.size] = array.reshape(-1)
    values = torch.from_numpy(joined)
    return Layout(bucket, values.pin_memory() if pin else values, places, runs, first)


def _runs(groups: Sequence[int], first: Any, last: Any) -> tuple[Run, ...]:
    """Return runs of rows; adjacent runs of one group are merged."""
    found: list[Run] = []
    for group, i, j in zip(groups, first.tolist(), last.tolist(), strict=True):
        if found and found[-1][0] == group:
            found[-1] = (group, found[-1][1], j)
        else:
            found.append((group, i, j))
    return tuple(found)


def _column(parts: Iterable[Part], name: str) -> Any:
    return np.array([getattr(p, name) for p in parts], np.int64)


def _spread(array: Any, length: int, fill: int = 0) -> Any:
    """Return an array padded with ``fill`` at its end."""
    found = np.full(length, fill, np.int64)
    found[: len(array)] = array
    return found


def _round(n: int, step: int, bits: int) -> int:
    """Return the next multiple of ``step``, from 2^(bits + 1) steps on in 2^bits steps for each doubling."""
    step = max(step, 1 << max(0, (n - 1).bit_length() - bits - 1))
    return -(-n // step) * step

"""Tiles of packed rows, made on the device from the offsets of groups."""

import torch
import torch.nn.functional as F
from torch import Tensor


def make_tile_map(cu_seqlens: Tensor, block: int, max_tiles: int | None = None) -> Tensor:
    """Cut the rows of each group into tiles of ``block`` rows, on the device of ``cu_seqlens``.

    Args:
        cu_seqlens: (G + 1,) int32: first row of the first group and the end row of each group, ascending; groups may be
            empty.
        block: rows of a tile; the last of a group may have fewer. 64, or 128 where groups have hundreds of rows.
        max_tiles: tiles of the map, ``T // block + G`` suffices; rows beyond them are left out. None for as many as
            needed, which waits for the device.

    Returns:
        (3, tiles) int32: group, first row, row end of each tile, in ascending order of rows; group −1 and no row for
        tiles that are not needed.

    Raises:
        ValueError: offsets of another type or shape, ``block`` below 1, or on a CPU too small a ``max_tiles``.
    """
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"`cu_seqlens` is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; it must be (G + 1,) torch.int32, G ≥ 1"
        )
    if block < 1:
        raise ValueError(f"`block` ({block}) must be at least 1")
    counts = (cu_seqlens.diff() + (block - 1)) // block
    ends = F.pad(torch.cumsum(counts, 0, dtype=torch.int32), (1, 0))  # tiles of all groups before each, and of all
    if max_tiles is None:
        max_tiles = int(ends[-1])
    elif _on_host(cu_seqlens) and int(ends[-1]) > max_tiles:
        raise ValueError(f"`max_tiles` ({max_tiles}) is too small: these groups need {int(ends[-1])} tiles of {block}")
    tile = torch.arange(max_tiles, dtype=torch.int32, device=cu_seqlens.device)
    group = torch.searchsorted(ends[1:], tile, right=True, out_int32=True)
    used = tile < ends[-1]
    group = torch.where(used, group, 0)
    first = cu_seqlens[group] + (tile - ends[group]) * block
    last = torch.minimum(first + block, cu_seqlens[1:][group])
    end = cu_seqlens[-1]
    return torch.stack([torch.where(used, group, -1), torch.where(used, first, end), torch.where(used, last, end)])


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def runs(tile_map: Tensor, rows: int, groups: int) -> list[tuple[int, int, int]]:
    """Read (group, first row, row end) of each group that has rows from a tile map; waits for the device."""
    found: list[tuple[int, int, int]] = []
    for group, first, last in zip(*tile_map.tolist(), strict=True):
        if group < 0:
            continue
        before = found[-1] if found else (-1, 0, 0)
        follows = first == before[2] if group == before[0] else before[2] <= first
        if not (follows and first <= last <= rows and before[0] <= group < groups):
            raise ValueError(
                f"`tile_map` has the tile (group {group}, rows {first} to {last}) after row {before[2]}; tiles must "
                f"ascend inside {rows} rows and {groups} groups, as `make_tile_map` makes them"
            )
        if before[0] == group:
            found[-1] = (group, before[1], last)
        elif first < last:
            found.append((group, first, last))
    return found

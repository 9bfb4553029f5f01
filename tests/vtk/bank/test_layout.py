"""Integers of a call against counting row by row; buckets; and rows that are padding."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vtk.bank.fused_calls import FusedCall
from vtk.bank.layout import Bucket, Part, lay_out, tile_map
from vtk_kernels.grouped_linear import make_tile_map

PARTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6
)
TOKENS = (5, 3, 9)
"""Tokens of an image by size."""
COUNTED = ("table_row", "patch_row", "row_slot", "rope_row", "first_row", "segment_slot", "pool_bounds")


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.sampled_from([16, 128]))
def test_the_tile_map_is_the_one_made_on_the_device(lengths: list[int], block: int) -> None:
    ends = list(itertools.accumulate(lengths))
    runs = [(g, end - n, end) for g, (n, end) in enumerate(zip(lengths, ends, strict=True)) if n]
    wanted = make_tile_map(torch.tensor([0, *ends], dtype=torch.int32), block, ends[-1] // block + len(lengths))
    assert tile_map(runs, block, wanted.shape[1]).tolist() == wanted.tolist()


@settings(deadline=None)
@given(PARTS, st.integers(0, 40), st.integers(0, 3), st.integers(0, 2))
def test_every_row_finds_its_own(found: list[tuple[int, ...]], rows: int, segments: int, skip: int) -> None:
    parts = tuple(
        Part(slot, images, TOKENS[size], size, 100 * i, (head, i), 1000 * size)
        for i, (slot, images, size, head) in enumerate(sorted(found))
    )
    exact = Bucket.exact(parts)
    layout = lay_out(parts, Bucket(exact.rows + rows, exact.segments + segments, 9), 3, skip)
    at = {name: view.tolist() for name, view in layout.views(layout.values).items()}
    images = [(part, k) for part in parts for k in range(part.images)]
    by_size = sorted(range(len(images)), key=lambda i: (images[i][0].size, i))
    patches = dict(zip(by_size, itertools.accumulate((images[i][0].tokens for i in by_size), initial=0), strict=False))
    row, want = 0, {k: list[int]() for k in COUNTED}
    for i, (part, _) in enumerate(images):
        want["first_row"].append(row)
        want["segment_slot"].append(part.slot)
        want["pool_bounds"] += [row, row + min(skip, part.tokens)]
        for token in range(part.tokens):
            want["table_row"].append(part.table + token)
            want["patch_row"].append(patches[i] + token)
            want["row_slot"].append(part.slot)
            want["rope_row"].append((part.rope or 0) + token)
        row += part.tokens
    for name, values in want.items():
        assert at[name][: len(values)] == values
    assert at["cu_seqlens"] == [*want["first_row"], *[row] * (segments + 1)]
    assert at["pool_bounds"][len(want["pool_bounds"]) :] == [row] * (2 * segments + 1)
    assert set(at["table_row"][row:]) | set(at["patch_row"][row:]) <= {0}

    pooled = at["ordered"][: len(images)]
    assert sorted(pooled) == list(range(len(images)))
    for part, first in zip(parts, layout.first, strict=True):
        assert [images[i][0] for i in pooled[first : first + part.images]] == [part] * part.images
        groups = {(g, r) for g, i, j in zip(*at[f"head{part.head[0]}"], strict=True) for r in range(i, j) if g >= 0}  # type: ignore[index]
        assert all((part.head[1], r) in groups for r in range(first, first + part.images))  # type: ignore[index]


@given(st.integers(1, 10**6), st.integers(1, 2000), st.integers(1, 1500))
def test_buckets_hold_and_waste_little(rows: int, segments: int, longest: int) -> None:
    bucket = Bucket(rows, segments, longest).up()
    assert rows <= bucket.rows <= max(rows + 255, rows * 9 / 8) and bucket.rows % 256 == 0
    assert segments <= bucket.segments <= segments * 5 / 4
    assert longest <= bucket.longest <= max(longest + 63, longest * 5 / 4) and bucket.longest % 64 == 0
    assert bucket.up() == bucket


def test_there_are_few_buckets() -> None:
    assert len({Bucket(n, 1, 1).up().rows for n in range(1, 65537)}) == 16 + 4 * 8


CASES: dict[str, dict[str, Any]] = {
    "class token": {}, "mean": {"global_pool": "avg", "reg_tokens": 1}, "qk-norm": {"qk_norm": True},
    "map pooling": {"global_pool": "map", "class_token": False},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", [False, True], ids=["loop", "operators"])
def test_padding_reaches_no_row(
    make_lab: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, case: str, kernels: bool
) -> None:
    lab = make_lab((tools.CB,), **CASES[case])
    packs = {"a": lab.pack("a", seed=1), "b": lab.pack("b", seed=2, size=48, classes=20)}
    bank = lab.bank(packs, fused=True, kernels=kernels)
    models = {name: lab.alone(path) for name, path in packs.items()}
    images = tools.random_batch(bank, {"b": 2, "a": 1})
    inside = FusedCall.rows

    def padded(self: FusedCall, *args: Any) -> Any:
        rows = inside(self, *args)
        spare = self.layout(Bucket.exact(self.parts), args[1]).bucket.rows - sum(map(len, rows))
        return [*rows, torch.full((spare, rows[0].shape[1]), torch.nan, dtype=rows[0].dtype)] if spare else rows

    exact = Bucket.exact
    # spare rows hold NaN when tasks' tokens are given: nothing may come of it
    monkeypatch.setattr(FusedCall, "rows", padded)
    for rows, segments in ((1, 0), (0, 3), (300, 5)):

        def larger(_: Any, parts: Any, rows: int = rows, segments: int = segments) -> Bucket:
            return Bucket(exact(parts).rows + rows, exact(parts).segments + segments, 64)

        monkeypatch.setattr(Bucket, "exact", classmethod(larger))
        assert tools.worst_error(bank, images, models) <= 1e-12

"""Decisions about CUDA graphs, tested without CUDA: the inputs they take, and the graphs that are kept."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused import GraphCache, fuse
from vtk.fused.model import UNKNOWN, last_level_cache


class _Graph:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class _Event:
    def record(self, stream: "_Stream") -> None:
        stream.seen.append("record")


class _Stream:
    seen: ClassVar[list[str]] = []

    def wait_event(self, event: _Event) -> None:
        self.seen.append("wait")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    """A cache whose captures are made without CUDA: replaying computes the captured function again."""
    import vtk.fused.graph_cache as graph_cache

    def record(self: GraphCache, function: Callable[[Tensor], Tensor], static_in: Tensor) -> Any:
        static_out = function(static_in)
        return _Graph(lambda: static_out.copy_(function(static_in))), static_out

    monkeypatch.setattr(GraphCache, "_record", record)
    monkeypatch.setattr(graph_cache.torch.cuda, "device", lambda _: graph_cache.contextlib.nullcontext())
    monkeypatch.setattr(graph_cache.torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(graph_cache.torch.cuda, "Event", _Event)
    _Stream.seen.clear()
    return GraphCache(max_graphs=2)


def test_results_stay_valid_after_the_next_call(cache: GraphCache) -> None:
    first = cache.run(lambda x: x + 1, torch.zeros(2, 3))
    second = cache.run(lambda x: x + 1, torch.ones(2, 3))
    assert torch.equal(first, torch.ones(2, 3)) and torch.equal(second, torch.full((2, 3), 2.0))
    assert len(cache) == 1


def test_streams_take_turns(cache: GraphCache) -> None:
    """All graphs of a cache write to one memory: a call waits for the end of the one before, whatever its stream."""

    def function(x: Tensor) -> Tensor:
        _Stream.seen.append("run")
        return x + 1

    for batch in (1, 2, 1):
        cache.run(function, torch.zeros(batch, 3))
    turns = " ".join(_Stream.seen).split("record")
    assert [turn.split()[:1] for turn in turns] == [["run"], ["wait"], ["wait"], []]


def test_captured_in_inference_mode_it_runs_outside(cache: GraphCache) -> None:
    with torch.inference_mode():
        cache.run(lambda x: x + 1, torch.zeros(2, 3))
    with torch.no_grad():
        assert torch.equal(cache.run(lambda x: x + 1, torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_other_weights_drop_the_graphs(vit: Callable[..., nn.Module]) -> None:
    fused = fuse(vit())
    fused._graph_cache.keep(torch.Size((1, 3, 16, 16)))
    fused.load_state_dict(fused.state_dict(), assign=True)
    assert not fused._graph_cache._kept
    with pytest.raises(UsageError, match="no source weights"):
        fused.source_state_dict()


def test_the_least_recently_used_graph_goes_and_kept_ones_stay(cache: GraphCache) -> None:
    kept = torch.Size((64, 3))
    cache.keep(kept)
    for batch in (64, 1, 2, 1, 3):  # 2 was used before 1
        cache.run(lambda x: x, torch.zeros(batch, 3))
    assert [cache.has(torch.Size((n, 3))) for n in (64, 1, 2, 3)] == [True, True, False, True]
    cache.clear()
    assert len(cache) == 0


def test_only_plain_cuda_tensors_without_gradient_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = GraphCache()
    assert not cache.takes(torch.zeros(1, 3), on_demand=True)  # on the CPU
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert cache.takes(torch.zeros(1, 3), on_demand=True)
    assert cache.takes(torch.zeros(256, 3), on_demand=True)
    assert not cache.takes(torch.zeros(257, 3), on_demand=True)
    assert not cache.takes(torch.zeros(0, 3), on_demand=True)
    assert not cache.takes(torch.zeros(1, 3), on_demand=False)
    assert not cache.takes(torch.zeros(1, 3, requires_grad=True), on_demand=True)
    assert not cache.takes(nn.Parameter(torch.zeros(1, 3), requires_grad=False), on_demand=True)
    cache.keep(torch.Size((64, 3)))
    assert cache.takes(torch.zeros(64, 3), on_demand=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not cache.takes(torch.zeros(1, 3), on_demand=True)


def test_capture_needs_cuda(vit: Callable[..., nn.Module]) -> None:
    with pytest.raises(UsageError, match="CUDA graphs need a model on a CUDA device; this one is on cpu"):
        fuse(vit()).capture([1])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [(("32K", "512K", "32768K"), 32 << 20), (("48K", "2M"), 2 << 20), (("odd",), UNKNOWN), ((), UNKNOWN)],
)
def test_the_last_cache_is_the_largest(tmp_path: Any, sizes: tuple[str, ...], expected: int) -> None:
    for i, size in enumerate(sizes):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(size + "\n")
    assert last_level_cache(tmp_path) == expected


def test_branches_are_split_where_the_wide_activation_leaves_the_cache(vit: Callable[..., nn.Module]) -> None:
    fused = fuse(vit(branches=2).float())
    h = torch.zeros(2, 17, 64)
    wide = 2 * 17 * 2 * 4 * 64 * 4  # B · N · P · F · bytes
    fused.cache_bytes = 2 * wide
    assert not fused._splits(fused.stages[1], h)
    fused.cache_bytes = 2 * wide - 1
    assert fused._splits(fused.stages[1], h)
    single = fuse(vit().float())
    single.cache_bytes = 0
    assert not single._splits(single.stages[1], h)

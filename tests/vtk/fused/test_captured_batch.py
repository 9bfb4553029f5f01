"""A graph of one caller: an input to fill, one launch a call, an output that is copied unless it is not to be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests._simulated_cuda import SimulatedCuda, Watching
from vtk.errors import UsageError
from vtk.fused import FusedViT, ModelGraph, fuse
from vtk.fused.ring import PinnedRing


@pytest.fixture
def fused(vit: Callable[..., nn.Module], on_a_card: SimulatedCuda) -> FusedViT:
    return fuse(vit(branches=2))


def batch(n: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_filled_input_is_what_the_call_reads(fused: FusedViT) -> None:
    graph = fused.graph(3)
    for seed in range(3):
        graph.input.copy_(batch(seed=seed))
        assert torch.equal(graph(), fused.compute(batch(seed=seed)))
        assert torch.equal(graph(), fused.compute(batch(seed=seed)))  # it stays
    assert torch.equal(graph(batch(seed=7)), fused.compute(batch(seed=7)))
    assert torch.equal(graph(batch(seed=7).float()), fused.compute(batch(seed=7).float()))


def test_a_filled_input_is_one_launch_and_no_copy(fused: FusedViT, on_a_card: SimulatedCuda) -> None:
    graph = fused.graph(3)
    graph.input.copy_(batch())
    graph(copy=False)
    on_a_card.notes.clear()
    with Watching(on_a_card):
        graph(copy=False)
    assert on_a_card.names() == "replay record"
    on_a_card.notes.clear()
    with Watching(on_a_card):
        graph()
    assert on_a_card.names() == "replay clone record"  # copied before anybody else may start


def test_an_output_is_ones_own_unless_it_is_not_to_be_copied(fused: FusedViT) -> None:
    graph = fused.graph(3)
    first, again = graph(batch(seed=1)), graph(batch(seed=2))
    assert torch.equal(first, fused.compute(batch(seed=1))) and torch.equal(again, fused.compute(batch(seed=2)))
    view = graph(batch(seed=1), copy=False)
    assert torch.equal(view, first)
    graph(batch(seed=2))
    assert torch.equal(view, again)  # valid until the next call


def test_calls_of_the_model_leave_the_input_alone(fused: FusedViT) -> None:
    one, other = fused.graph(3), fused.graph(3)
    one.input.copy_(batch(seed=1))
    other.input.copy_(batch(seed=2))
    fused(batch(seed=3))
    fused(batch(2, seed=4))
    assert torch.equal(one(), fused.compute(batch(seed=1))) and torch.equal(other(), fused.compute(batch(seed=2)))


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (batch(2), r"`images` are \(2, 3, 16, 16\); this graph is of \(3, 3, 16, 16\): capture another one"),
        (batch().long(), r"`images` are torch.int64; give normalised images of a floating type"),
        ([1], r"`images` are a list; give a tensor of shape \(3, 3, 16, 16\)"),
        (batch().to_sparse(), r"`images` are torch.sparse_coo; give a dense tensor"),
        (batch().requires_grad_(), r"`images` want a gradient, which a graph has not; call the model, or detach them"),
        (batch().to("meta"), r"`images` are on meta; this graph is on cpu, or takes cpu"),
    ],
)
def test_other_inputs_are_refused_in_one_line(fused: FusedViT, images: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fused.graph(3)(images)


def test_it_is_out_of_date_when_the_weights_are_others(fused: FusedViT) -> None:
    graph = fused.graph(3)
    fused.stages[0].bias.data = fused.stages[0].bias.data + 1
    with pytest.raises(UsageError, match=r"the graph of batch 3 at 16 × 16 px is out of date: .*; make another one"):
        graph(batch())
    graph = fused.graph(3)
    assert torch.equal(graph(batch()), fused.compute(batch()))
    for change in (lambda: fused.float(), lambda: fused.load_state_dict(fused.state_dict()), fused.drop_graphs):
        graph = fused.graph(3)
        change()
        with pytest.raises(UsageError, match="out of date"):
            graph()


def test_sizes_without_a_card_and_without_images_are_refused(
    vit: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="CUDA graphs need a model on a CUDA device; this one is on cpu"):
        fuse(vit()).graph(3)
    monkeypatch.setattr(FusedViT, "device", torch.device("cuda"))
    with pytest.raises(UsageError, match="a graph of batch 0 is of nothing; give 1 or more"):
        fuse(vit()).graph(0)


def test_its_bytes_are_counted(fused: FusedViT) -> None:
    graph = fused.graph(3)
    assert isinstance(graph, ModelGraph) and graph.nbytes == 1000 + graph.input.nbytes
    assert fused.graph_bytes == graph.nbytes


@pytest.fixture
def pinned(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    monkeypatch.setattr("vtk.fused.ring._pinned", lambda n: torch.empty(n, dtype=torch.uint8))
    return simulated_cuda


def test_a_slot_is_filled_again_only_after_its_copy(pinned: SimulatedCuda) -> None:
    ring, out = PinnedRing(slots=2), torch.empty(3, 4)
    with Watching(pinned):
        for i in range(4):
            x = torch.full((3, 4), float(i))
            assert torch.equal(ring.send([x[:1], x[1:]], out), x)
    first, later = "copy_ copy_ copy_ record", "synchronize copy_ copy_ copy_ record"
    assert pinned.names() == " ".join((first, first, later, later))
    events = [slot.done for slot in ring._ring]
    assert len(events) == 2 and events[0] is not events[1]


def test_slots_grow_and_cast_and_work_in_inference_mode(pinned: SimulatedCuda) -> None:
    ring = PinnedRing(slots=1)
    with torch.inference_mode():
        small = torch.ones(1, 5)
    for n, dtype in ((1, torch.bfloat16), (7, torch.float16), (2, torch.float64)):
        x = small.expand(n, 5)
        out = torch.empty(n, 5, dtype=dtype)
        with torch.inference_mode():
            ring.send([x], out)
        assert torch.equal(out, torch.ones(n, 5, dtype=dtype))
    assert ring.nbytes == 7 * 5 * 2 + 10  # grown to the largest: 2 × 5 of fp64


def test_images_on_the_host_go_straight_into_the_graphs_input(
    fused: FusedViT, pinned: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused(batch())
    monkeypatch.setattr(type(fused._graph_cache), "fill", lambda self, static, images: self.ring.send([images], static))
    pinned.notes.clear()
    with Watching(pinned):
        found = fused._replay(batch(seed=5))
    assert torch.equal(found, fused.compute(batch(seed=5)))
    assert pinned.names() == "copy_ copy_ record replay clone record"

"""On a CUDA device: real captures, whatever happens between two calls, from several threads, streams and the host."""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vtk.errors import UnavailableError, UsageError
from vtk.fused import FusedViT, fuse
from vtk.fused import tuning_store as tuned
from vtk.fused.ring import PinnedRing
from vtk.fused.tuning_card import tune_model
from vtk_kernels import choices

pytestmark = pytest.mark.gpu


@pytest.fixture
def fused(vit: Callable[..., nn.Module]) -> FusedViT:
    return fuse(vit(branches=2, dim=128, grid=14, depth=4).float().cuda(), torch.bfloat16)


def images(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 56, 56, generator=generator).bfloat16().cuda()


def near(found: Tensor, wanted: Tensor) -> bool:
    """Whether rounding explains the difference: in a capture cuBLAS may take another algorithm."""
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return found.dtype == wanted.dtype and bool(difference <= 2 * torch.finfo(found.dtype).eps)


def test_replays_are_bitwise_the_same_and_what_the_kernels_give(fused: FusedViT) -> None:
    wanted = {(n, seed): fused.compute(images(n, seed)) for n in (1, 3, 33) for seed in (0, 1)}
    first = {(n, seed): fused(images(n, seed)) for n, seed in wanted}
    assert all(near(first[key], wanted[key]) for key in wanted)
    for _ in range(20):
        for (n, seed), value in first.items():
            assert torch.equal(fused(images(n, seed)), value)
    assert len(fused._graph_cache) == 3


def test_the_least_recently_used_of_eight_goes_and_its_memory_is_taken_again(fused: FusedViT) -> None:
    for n in (*range(1, 9), 1, 9):
        assert near(fused(images(n)), fused.compute(images(n)))
    kept = {n for n in range(1, 10) if fused._graph_cache.has(images(n).shape)}
    assert kept == {1, 3, 4, 5, 6, 7, 8, 9}
    held = fused.graph_bytes
    assert held > 0
    for n in (40, 41, 42):
        assert near(fused(images(n)), fused.compute(images(n)))
    assert fused.graph_bytes < 20 * held
    fused.drop_graphs()
    assert fused.graph_bytes == 0 and near(fused(images(2)), fused.compute(images(2)))


def test_threads_on_streams_of_their_own_get_their_own_answers(fused: FusedViT) -> None:
    wanted = {n: fused(images(n, n)) for n in (1, 2, 3, 5)}
    given = {n: images(n, n) for n in wanted}
    torch.cuda.synchronize()
    wrong: list[int] = []

    def call(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                found = fused(given[n])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(found, wanted[n]):
                    wrong.append(n)

    threads = [threading.Thread(target=call, args=(n,)) for n in wanted for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_models_replay_side_by_side(vit: Callable[..., nn.Module]) -> None:
    """A graph writes to the workspaces of its capture's stream: two models must not have one in common."""
    models = [fuse(vit(dim=256, heads=4, grid=14, depth=4).float().cuda(), torch.bfloat16) for _ in range(2)]
    wanted = [model(images(8)) for model in models]
    streams, x = [torch.cuda.Stream() for _ in models], images(8)
    torch.cuda.synchronize()
    for _ in range(100):
        found = []
        for model, stream in zip(models, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(model(x))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, wanted))


def test_images_of_the_host_through_the_ring(fused: FusedViT) -> None:
    host = [images(5, seed).cpu().float() for seed in range(8)]
    found = [fused(x) for x in host]  # none is waited for
    for x, y in zip(host, found, strict=True):
        assert y.is_cuda and near(y, fused.compute(x.cuda().bfloat16()))
    assert fused(host[0]).dtype == torch.bfloat16


def test_slots_are_not_filled_before_their_copy_is_done() -> None:
    ring, outs = PinnedRing(slots=2), [torch.empty(1 << 22, device="cuda") for _ in range(12)]
    x = torch.empty(1 << 22)
    torch.cuda._sleep(50_000_000)  # the copies queue up behind it
    for i, out in enumerate(outs):
        ring.send([x.fill_(i)], out)
    torch.cuda.synchronize()
    assert [float(out.min()) for out in outs] == [float(out.max()) for out in outs] == list(range(12))


def test_a_graph_of_ones_own(fused: FusedViT) -> None:
    graph, other = fused.graph(3), fused.graph(3)
    for seed in range(5):
        graph.input.copy_(images(3, seed))
        other.input.copy_(images(3, seed + 9))
        fused(images(3, 5)), fused(images(4, 5))
        kept, view = graph(), graph(copy=False)
        before = kept.clone()
        assert torch.equal(view, kept) and near(kept, fused.compute(images(3, seed)))
        assert near(other(), fused.compute(images(3, seed + 9))) and torch.equal(kept, before)
        assert near(graph(images(3, 7).cpu()), fused.compute(images(3, 7)))
    fused.half()
    with pytest.raises(UsageError, match="out of date"):
        graph()


def test_other_weights_of_every_kind(fused: FusedViT) -> None:
    x = images(3)
    for change in (
        lambda: fused.load_state_dict({k: v + 0.1 for k, v in fused.state_dict().items()}, assign=True),
        lambda: setattr(fused.stages[0].bias, "data", fused.stages[0].bias.data + 0.1),
        lambda: fused.stages[1].bias.add_(0.1),
        lambda: setattr(fused, "ln_folded", True),
        lambda: fused.half(),
        lambda: fused.bfloat16(),
    ):
        before = fused(x)
        change()
        torch.cuda.empty_cache()
        for _ in range(2):
            assert near(fused(x), fused.compute(x))
        assert before.isfinite().all()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.abs().max() > 0)


def test_what_cannot_be_captured_leaves_nothing_behind(vit: Callable[..., nn.Module]) -> None:
    fused = fuse(vit(act_layer=Reading, dim=128, grid=14).float().cuda(), torch.bfloat16)
    stream = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="runs without a CUDA graph"):
        found = fused(images(3))
    assert torch.cuda.current_stream() == stream and near(found, fused.compute(images(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fused(images(3)), found)
    with pytest.raises(UnavailableError, match="cannot be captured"):
        fused.graph(3)
    other = fuse(vit(dim=128, grid=14).float().cuda(), torch.bfloat16)
    assert near(other(images(3)), other.compute(images(3))) and len(other._graph_cache) == 1
    del found
    assert torch.rand(3, device="cuda").isfinite().all()  # a generator that a failed capture held would refuse
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_too_little_memory_for_a_graph(fused: FusedViT, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, calls = fused.compute, [0]

    def full(x: Tensor) -> Tensor:
        calls[0] += 1
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(1 << 50, device="cuda")
        return compute(x)

    monkeypatch.setattr(fused, "compute", full)
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError"):
        assert near(fused(images(3)), compute(images(3)))
    monkeypatch.undo()
    for _ in range(70):
        assert near(fused(images(3)), compute(images(3)))
    assert len(fused._graph_cache) == 1


def test_tuning_on_this_card(fused: FusedViT, vtk_home: Path) -> None:
    try:
        first, second = tune_model(fused, [1, 8], seconds=30)
        assert first.measured + second.measured > 0 or first.cut
        entries: list[Any] = choices.read(Path(first.path))
        assert {entry["device"] for entry in entries} == {torch.cuda.get_device_name()}
        assert all(found.cached or found.cut for found in tune_model(fused, [1, 8], seconds=30))
        assert near(fused(images(8)), fused.compute(images(8)))
    finally:
        tuned._loaded.clear()
        choices.use(None)

"""A fused model on a simulated card: its answers stay right whatever happens between two calls."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests._simulated_cuda import SimulatedCuda, Watching
from vtk.errors import UnavailableError, UsageError
from vtk.fused import FusedViT, fuse

Build = Callable[..., nn.Module]


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 16, 16, dtype=torch.float64)


@pytest.fixture
def fused(vit: Build, on_a_card: SimulatedCuda) -> FusedViT:
    return fuse(vit(branches=2))


def right(fused: FusedViT, x: Tensor) -> bool:
    """Whether a call gives, to the last bit, what the same operations give one by one."""
    with torch.no_grad():
        return torch.equal(fused(x), fused.compute(x))


def test_graphs_are_on_by_default_and_can_be_switched_off(vit: Build, images: Tensor, on_a_card: SimulatedCuda) -> None:
    model = vit()
    fused, plain = fuse(model), fuse(model, graphs=False)
    assert fused.graphs and not plain.graphs
    assert right(fused, images) and right(fused, images[:2]) and right(fused, images) and right(plain, images)
    assert (len(fused._graph_cache), len(plain._graph_cache)) == (2, 0)
    assert on_a_card.names().count("replay") == 3
    torch.testing.assert_close(fused(images), model(images), rtol=0, atol=1e-11)


def test_on_a_cpu_nothing_is_captured(vit: Build, images: Tensor) -> None:
    fused = fuse(vit())
    assert right(fused, images) and len(fused._graph_cache) == 0


def test_replays_are_bitwise_the_same_whatever_ran_between(fused: FusedViT, images: Tensor) -> None:
    wanted = {n: fused.compute(images[:n]) for n in (1, 3, 5)}
    for n in (1, 3, 5, 3, 1, 5, 5, 1):
        assert torch.equal(fused(images[:n]), wanted[n])


def test_eight_shapes_are_kept_and_the_least_recently_used_goes(fused: FusedViT, on_a_card: SimulatedCuda) -> None:
    def call(n: int) -> None:
        assert right(fused, torch.randn(n, 3, 16, 16, dtype=torch.float64))

    for n in (*range(1, 9), 1, 9):  # 2 is the least recently used
        call(n)
    shapes = {n for n in range(1, 10) if fused._graph_cache.has(torch.Size((n, 3, 16, 16)))}
    assert shapes == {1, 3, 4, 5, 6, 7, 8, 9} and len(fused._graph_cache) == 8


def test_nine_sizes_in_turns_do_not_capture_at_every_call(fused: FusedViT, on_a_card: SimulatedCuda) -> None:
    fused._graph_cache.max_graphs = 2
    for i in range(60):
        assert right(fused, torch.randn(1 + i % 3, 3, 16, 16, dtype=torch.float64))
    assert len(on_a_card.captures) <= 12  # without patience 60


def move(fused: FusedViT) -> None:
    fused.float().double()


def load(fused: FusedViT) -> None:
    fused.load_state_dict({k: v + 0.5 for k, v in fused.state_dict().items()})


def assign(fused: FusedViT) -> None:
    fused.load_state_dict({k: v + 0.5 for k, v in fused.state_dict().items()}, assign=True)


def load_a_part(fused: FusedViT) -> None:
    fused.head.load_state_dict({k: v + 0.5 for k, v in fused.head.state_dict().items()}, assign=True)


def load_around(fused: FusedViT) -> None:
    around = nn.Sequential(fused)
    around.load_state_dict({k: v + 0.5 for k, v in around.state_dict().items()}, assign=True)


def exchange_data(fused: FusedViT) -> None:
    fused.stages[0].bias.data = fused.stages[0].bias.data + 0.5


def exchange_a_parameter(fused: FusedViT) -> None:
    fused.stages[1].w_out = nn.Parameter(fused.stages[1].w_out * 2, requires_grad=False)


def exchange_a_part(fused: FusedViT) -> None:
    fused.head = copy.deepcopy(fused.head).requires_grad_(False)
    for p in fused.head.parameters():
        p.data.mul_(2)


def change_in_place(fused: FusedViT) -> None:
    with torch.no_grad():
        fused.stages[0].bias += 0.5


def change_the_form(fused: FusedViT) -> None:
    fused.ln_folded = True


CHANGES = (
    move, load, assign, load_a_part, load_around, exchange_data, exchange_a_parameter, exchange_a_part,
    change_in_place, change_the_form,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_no_call_answers_with_old_weights(fused: FusedViT, images: Tensor, change: Callable[[FusedViT], None]) -> None:
    before = fused(images)
    change(fused)
    assert right(fused, images) and right(fused, images)
    moves = change is not change_the_form
    assert moves == (not torch.equal(fused(images), before))
    assert len(fused._graph_cache) > 0  # captured anew


def test_other_weights_for_one_call(fused: FusedViT, images: Tensor) -> None:
    before = fused(images)
    weights = {name: p * 1.5 for name, p in fused.named_parameters()}
    with torch.no_grad():
        other = torch.func.functional_call(fused, weights, (images,))
        again = copy.deepcopy(fused)
        again.load_state_dict(weights, strict=False)
        torch.testing.assert_close(other, again.compute(images), rtol=0, atol=1e-12)
        assert torch.equal(fused(images), before)


@pytest.mark.filterwarnings("ignore")  # of torch.jit's tracer
def test_gradients_transforms_traces_and_hooks_see_the_operations(
    fused: FusedViT, images: Tensor, on_a_card: SimulatedCuda
) -> None:
    fused(images)
    replays = on_a_card.names().count("replay")
    x = images.clone().requires_grad_()
    fused(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    with sdpa_kernel(SDPBackend.MATH):  # the others know no forward-mode differentiation
        value, tangent = torch.func.jvp(fused, (images,), (torch.ones_like(images),))
    assert tangent.abs().sum() > 0 and torch.allclose(value, fused.compute(images))
    torch.testing.assert_close(torch.func.vmap(fused)(images[:, None])[:, 0], fused.compute(images))
    traced = torch.jit.trace(fused, (images,), check_trace=False)
    assert torch.allclose(traced(images * 2), fused.compute(images * 2))
    exported = torch.export.export(fused, (images,)).module()
    assert torch.allclose(exported(images * 2), fused.compute(images * 2))
    with Watching(on_a_card):  # as any mode that counts or records operations
        fused(images)
    assert on_a_card.names().count("replay") == replays
    seen: list[int] = []
    hook = fused.head.register_forward_hook(lambda *_: seen.append(1))
    fused(images), fused(images[:2])
    assert len(seen) == 2
    hook.remove()
    weight = next(fused.head.parameters()).requires_grad_(True)
    fused(images).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0
    weight.requires_grad_(False)
    assert right(fused, images) and len(fused._graph_cache) == 1


def test_inside_another_capture_the_operations_are_captured(
    fused: FusedViT, images: Tensor, on_a_card: SimulatedCuda
) -> None:
    fused(images)
    on_a_card.capturing = threading.get_ident()
    replays = on_a_card.names().count("replay")
    assert torch.equal(fused(images), fused.compute(images)) and on_a_card.names().count("replay") == replays


def test_autocast_and_inference_mode(fused: FusedViT, images: Tensor) -> None:
    wanted = fused.compute(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fused(images), wanted)
    with torch.inference_mode():
        assert torch.equal(fused(images[:2]), fused.compute(images[:2]))
    assert right(fused, images[:2])
    assert torch.equal(fused(images[:2].float()), fused.compute(images[:2].float()))  # cast in the copy


def test_integers_and_wrong_sizes_get_the_models_own_error(fused: FusedViT, images: Tensor) -> None:
    with pytest.raises(UsageError, match="give normalised images of a floating type"):
        fused((images * 100).long())
    with warnings.catch_warnings(), pytest.raises(UsageError, match=r"this model takes \(B, 3, 16, 16\)"):
        warnings.simplefilter("error")
        fused(torch.zeros(1, 3, 12, 16, dtype=torch.float64))
    assert not fused._graph_cache.has(torch.Size((1, 3, 12, 16)))


def test_copies_have_no_graphs_and_make_their_own(fused: FusedViT, images: Tensor) -> None:
    fused(images)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert other.graphs and len(other._graph_cache) == 0
        assert torch.equal(other(images), fused(images)) and len(other._graph_cache) == 1


class Reading(nn.Module):
    """An activation that asks the device for a value, as no graph can."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().abs().max() > 0)


def test_what_cannot_be_captured_runs_plainly_with_one_warning(
    vit: Build, images: Tensor, on_a_card: SimulatedCuda
) -> None:
    fused = fuse(vit(act_layer=Reading))
    with pytest.warns(RuntimeWarning, match="runs without a CUDA graph: RuntimeError: operation not permitted") as seen:
        for n in (5, 5, 2, 5):
            assert right(fused, images[:n])
    assert len(seen) == 1 and len(fused._graph_cache) == 0
    assert on_a_card.current is on_a_card.main  # torch leaves the capture's stream the current one
    with pytest.raises(UnavailableError, match="batch 5 at 16 × 16 px cannot be captured: operation not permitted"):
        fused.graph(5)
    with pytest.raises(UnavailableError, match=r"batch 5 cannot be captured: .*; run it with `graphs` off"):
        fused.capture([5])
    assert on_a_card.current is on_a_card.main and right(fused, images)


class Full(nn.Module):
    """An activation that finds no memory while ``full``, inside captures only."""

    full = True

    def forward(self, x: Tensor) -> Tensor:
        if self.full and torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return torch.tanh(x)


def test_too_little_memory_is_tried_again_later(vit: Build, images: Tensor, on_a_card: SimulatedCuda) -> None:
    fused = fuse(vit(act_layer=Full))
    Full.full = False
    assert right(fused, images[:1])
    Full.full = True
    try:
        with pytest.warns(RuntimeWarning, match="OutOfMemoryError: CUDA out of memory"):
            assert right(fused, images)
        assert len(fused._graph_cache) == 0 and on_a_card.emptied == 1  # what other graphs held is free
        for _ in range(10):
            assert right(fused, images)
        assert len(on_a_card.captures) == 1
    finally:
        Full.full = False
    for _ in range(70):
        fused(images)
    assert len(fused._graph_cache) == 1 and right(fused, images)


def test_an_error_around_the_call_is_not_taken_for_its_own(vit: Build, images: Tensor, on_a_card: Any) -> None:
    fused = fuse(vit(act_layer=Reading))
    try:
        raise torch.OutOfMemoryError("somebody else's")
    except torch.OutOfMemoryError:
        with pytest.warns(RuntimeWarning, match="operation not permitted"):
            fused(images)


def test_threads_get_their_own_answers(fused: FusedViT, images: Tensor) -> None:
    wanted = {n: fused.compute(images[:n] * n) for n in (1, 2, 3)}
    wrong: list[int] = []

    def call(n: int) -> None:
        for _ in range(15):
            if not torch.equal(fused(images[:n] * n), wanted[n]):
                wrong.append(n)

    threads = [threading.Thread(target=call, args=(n,)) for n in wanted for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bytes_are_counted_and_told_at_each_capture(fused: FusedViT, images: Tensor) -> None:
    told: list[tuple[str, int]] = []
    fused._graph_cache.notice = lambda text, size: told.append((text, size))
    fused(images), fused(images), fused(images[:2])
    of_input = images.nbytes // 5
    assert told == [("CUDA graph of 5 × 3 × 16 × 16", 1000 + 5 * of_input),
                    ("CUDA graph of 2 × 3 × 16 × 16", 1000 + 2 * of_input)]  # fmt: skip
    assert fused.graph_bytes == 2000 + 7 * of_input
    fused.drop_graphs()
    assert fused.graph_bytes == 0


def test_the_order_of_a_call(fused: FusedViT, images: Tensor, on_a_card: SimulatedCuda) -> None:
    """On another stream: wait for the last replay, copy in, replay, copy out, and only then let the next one in."""
    fused(images)
    on_a_card.notes.clear()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other), Watching(on_a_card):
        fused._replay(images)
    assert [note[0] for note in on_a_card.notes] == ["wait", "copy_", "replay", "clone", "record"]
    assert {note[1] for note in on_a_card.notes} == {other.number}  # type: ignore[attr-defined]
    on_a_card.notes.clear()
    with torch.cuda.stream(other), Watching(on_a_card):
        fused._replay(images)
    assert on_a_card.names() == "copy_ replay clone record"  # one stream keeps its order by itself


def test_forms_and_torchs_settings_have_graphs_of_their_own(fused: FusedViT, images: Tensor) -> None:
    fused(images)
    fused.ln_folded = True
    fused(images)
    assert len(fused._graph_cache) == 2
    fused.float()
    before = torch.backends.cudnn.allow_tf32
    try:
        for exact in (True, False, True):
            torch.backends.cudnn.allow_tf32 = not exact
            fused(images)
        assert len(fused._graph_cache) == 2  # a graph keeps the products it was captured with
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_each_model_captures_on_a_stream_of_its_own(vit: Build, images: Tensor, on_a_card: SimulatedCuda) -> None:
    """Libraries keep a workspace for each stream, and graphs of two models may run side by side."""
    one, other = fuse(vit()), fuse(vit())
    one(images), one(images[:2]), other(images)
    streams = [note[1] for note in on_a_card.notes if note[0] == "capture"]
    assert streams[0] == streams[1] != streams[2] and on_a_card.main.number not in streams
    assert [graph.whose for graph in on_a_card.captures] == [(0, 1), (0, 1), (0, 2)]  # a model's graphs share a pool

"""What decides about a bank's CUDA graphs, where there is no CUDA: buckets, generations, static inputs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._simulated_cuda import SimulatedCuda, Watching
from vtk.bank import TaskBank
from vtk.bank.bank_graphs import BucketGraphs
from vtk.bank.layout import Bucket
from vtk.errors import UsageError


class _Graph:
    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Capture without CUDA: a replay computes the captured function again. The rows of each capture are noted."""
    made: list[int] = []

    def record(self: BucketGraphs, function: Callable[[Tensor], Tensor], static_in: Tensor) -> Any:
        made.append(len(static_in))
        static_out = function(static_in)
        return _Graph(lambda: static_out.copy_(function(static_in))), static_out

    monkeypatch.setattr(BucketGraphs, "_record", record)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def graphed(lab: Any, packs: Any, **options: Any) -> TaskBank:
    bank: TaskBank = lab.bank(packs, fused=True, kernels=True, **options)
    bank._graphs = BucketGraphs(max_graphs=2)
    return bank


def test_one_graph_serves_every_mix(five: Any, tools: Any, captures: list[int]) -> None:
    lab, packs = five
    bank = graphed(lab, packs)
    models = {name: lab.alone(path) for name, path in packs.items()}
    kept = []
    for counts in ({"dogs": 1, "pets": 1}, {"food": 1, "cats": 1}, {"pets": 2}, {"cars": 1, "dogs": 1}):
        images = tools.random_batch(bank, counts)
        kept.append((images, bank(images)))
        assert tools.worst_error(bank, images, models) <= 1e-12
    assert captures == [256]
    for images, logits in kept:  # results stay valid after other calls
        for name, found in logits.items():
            assert (found - models[name](images[name])).abs().max() <= 1e-12 * found.abs().max()


def test_what_a_call_leaves_behind_reaches_no_other(five: Any, tools: Any, captures: list[int]) -> None:
    lab, packs = five
    bank = graphed(lab, packs)
    many = {name: torch.full_like(x, torch.nan) for name, x in tools.random_batch(bank, {"dogs": 3}).items()}
    assert bank(many)["dogs"].isnan().all()
    few = tools.random_batch(bank, {"pets": 1, "food": 2})
    assert tools.worst_error(bank, few, {n: lab.alone(packs[n]) for n in few}) <= 1e-12
    assert captures == [256]


@pytest.mark.parametrize("pool", ["map", "avg"])
def test_ends_of_every_kind(make_lab: Any, tools: Any, captures: list[int], pool: str) -> None:
    lab = make_lab(global_pool=pool, class_token=False, dynamic_img_size=pool == "map")
    packs = {"a": lab.pack("a", seed=1), "b": lab.pack("b", seed=2, size=48, classes=20)}
    bank, models = graphed(lab, packs), {name: lab.alone(path) for name, path in packs.items()}
    for counts in ({"a": 2, "b": 1}, {"b": 2, "a": 1}, {"a": 3}):
        assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= 1e-12
    assert captures == [256]


@pytest.mark.parametrize("model", ["vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"])
def test_one_graph_turns_tokens_of_every_size_by_their_own_table(
    make_lab: Any, tools: Any, captures: list[int], model: str
) -> None:
    lab = make_lab(model=model)
    packs = {"a": lab.pack("a", seed=1), "b": lab.pack("b", seed=2, size=(32, 48)), "c": lab.pack("c", seed=3, size=48)}
    bank, models = graphed(lab, packs), {name: lab.alone(path) for name, path in packs.items()}
    for counts in ({"a": 2, "b": 1}, {"b": 2, "c": 1}, {"c": 2, "a": 1}, {"b": 3}):
        assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= 1e-12
    assert captures == [256]


def test_tasks_with_factors_that_come_and_go_leave_a_graph_valid(
    make_lab: Any, tools: Any, captures: list[int]
) -> None:
    lab = make_lab()
    packs = {n: lab.factors(n, seed=i, ranks=(3, 1, 2), classes=3 + i) for i, n in enumerate("abcd")}
    models = {name: lab.alone(path) for name, path in packs.items()}
    bank = graphed(lab, {n: packs[n] for n in "abc"})

    def call(*names: str) -> None:
        assert tools.worst_error(bank, tools.random_batch(bank, dict.fromkeys(names, 1)), models) <= 1e-12

    call("a", "b")
    for gone, new in (("c", "d"), ("a", "c"), ("b", "a"), ("d", "b")):
        bank.remove(gone)
        bank.add(new, packs[new])
        call(new, next(n for n in bank.tasks if n != new))
    assert captures == [256], "spans, tables and classifiers were written where the graph reads them"
    bank.add("d", packs["d"])
    call("d")
    assert len(captures) == 2, "there was no room for a fourth task"


def test_a_classifier_alone_that_comes_drops_the_graphs(five: Any, tools: Any, captures: list[int]) -> None:
    lab, packs = five
    bank = graphed(lab, {n: packs[n] for n in ("cars", "pets")})
    models = {name: lab.alone(path) for name, path in packs.items()}
    models["again"] = models["cars"]
    assert tools.worst_error(bank, tools.random_batch(bank, {"pets": 1, "cars": 1}), models) <= 1e-12
    before = bank._store.generation  # type: ignore[attr-defined]
    bank.add("again", packs["cars"])  # it trained its head only
    assert bank._store.generation == before  # type: ignore[attr-defined]
    assert tools.worst_error(bank, tools.random_batch(bank, {"again": 1, "cars": 1}), models) <= 1e-12
    assert captures == [256] * 2


def test_tasks_that_come_and_go_drop_the_graphs(five: Any, tools: Any, captures: list[int]) -> None:
    lab, packs = five
    bank = graphed(lab, {n: packs[n] for n in ("pets", "dogs")})
    models = {name: lab.alone(path) for name, path in packs.items()}

    def call(*names: str) -> None:
        assert tools.worst_error(bank, tools.random_batch(bank, dict.fromkeys(names, 1)), models) <= 1e-12

    call("pets", "dogs")
    bank.add("food", packs["food"])
    call("food", "dogs")
    bank.remove("pets")
    call("food", "dogs")
    bank.reload("dogs")
    call("food", "dogs")
    assert captures == [256] * 4


def test_calls_that_bring_weights_in_run_without_a_graph(five: Any, tools: Any, captures: list[int]) -> None:
    lab, packs = five
    whole = lab.bank(packs, fused=True, kernels=True)
    unit = whole._store.unit
    bank = graphed(lab, packs, max_gpu_bytes=whole.memory().device_bytes - 2 * unit)
    models = {name: lab.alone(path) for name, path in packs.items()}

    def call(*names: str) -> None:
        assert tools.worst_error(bank, tools.random_batch(bank, dict.fromkeys(names, 1)), models) <= 1e-12

    call("pets", "dogs")  # `worst_error` calls once: weights come in
    assert captures == []
    call("dogs", "pets")
    assert captures == [256]
    call("food", "cats")  # the stacks grow to their limit, and take new slots
    call("food", "cats")
    call("food", "pets")
    assert bank._store.pools.whole.capacity == 3  # type: ignore[attr-defined]
    for pair in (("cats", "cars"), ("cats", "cars"), ("food", "cats")):
        call(*pair)


def test_least_recently_used_graphs_go_and_share_their_input(captures: list[int]) -> None:
    graphs = BucketGraphs(max_graphs=2)

    def call(rows: int, generation: int = 1) -> None:
        x, scale = torch.randn(rows - 1, 3), torch.tensor([2, 3], dtype=torch.int32)
        found = graphs.replay(Bucket(rows, 1, 64), generation, [x[:2], x[2:]], scale, lambda r, v: r * v[0] + v[1])
        assert torch.equal(found[: rows - 1], x * 2 + 3)

    for rows in (8, 4, 8, 6, 8, 4):  # 4 goes when 6 comes
        call(rows)
    assert captures == [8, 4, 6, 4]
    assert len({entry.rows.untyped_storage()._cdata for entry in graphs._captured.values()}) == 1
    call(4, generation=2)
    assert len(graphs) == 1 and captures[-1] == 4


def test_graphs_need_cuda_and_half_precision() -> None:
    with pytest.raises(UsageError, match=r"`graphs` needs a fused bank with kernels in fp16 or bf16 on CUDA; this one"):
        TaskBank(graphs=True, fused=True)


@pytest.mark.parametrize(
    ("options", "graphs"),
    [({}, True), ({"graphs": False}, False), ({"fused": False}, False), ({"kernels": False}, False),
     ({"dtype": torch.float32}, False), ({"graphs": True, "fused": True}, True)],
)  # fmt: skip
def test_banks_on_a_card_have_graphs_by_default(
    simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], graphs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    assert (TaskBank(device="cuda", **options).graphs is not None) == graphs
    assert TaskBank().graphs is None


def test_a_bank_copies_its_answer_before_it_lets_the_next_call_in(
    five: Any, tools: Any, simulated_cuda: SimulatedCuda
) -> None:
    lab, packs = five
    bank = graphed(lab, packs)
    images = tools.random_batch(bank, {"dogs": 1, "pets": 1})
    bank(images)
    turn = bank._store.turn

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        with turn():
            yield
        simulated_cuda.note("release")

    bank._store.turn = noted  # type: ignore[method-assign]
    simulated_cuda.notes.clear()
    with Watching(simulated_cuda):
        found = bank(images)
    names = simulated_cuda.names().split()
    assert names[-3:] == ["replay", "clone", "release"]
    other = {name: x * 2 for name, x in images.items()}
    kept = {name: logits.clone() for name, logits in found.items()}
    bank(other)
    assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_a_call_that_cannot_be_captured_runs_kernel_by_kernel(
    five: Any, tools: Any, simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, packs = five
    bank = graphed(lab, packs)
    models = {name: lab.alone(path) for name, path in packs.items()}

    tries: list[int] = []

    def full(*_: Any) -> Any:
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(BucketGraphs, "_record", full)
    with pytest.warns(RuntimeWarning, match="a call of up to 256 rows runs without a CUDA graph: OutOfMemory") as seen:
        for counts in ({"dogs": 1, "pets": 1}, {"food": 2}, {"pets": 2}):
            assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= 1e-12
    assert len(seen) == len(tries) == 1 and bank.graphs is not None and len(bank.graphs) == 0

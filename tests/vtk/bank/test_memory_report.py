"""Bytes: what a bank holds, what many tasks cost, and which tasks are on the device under a budget."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vtk.bank.residency import Residency
from vtk.bank.shared_weights import own_keys
from vtk.errors import UsageError
from vtk.models.inputs import blank_model


def test_twenty_small_models_on_real_shapes() -> None:
    model = blank_model("vit_small_patch16_224", {"num_classes": 1000})
    state, own = model.state_dict(), own_keys(model)
    whole = sum(t.numel() for t in state.values())
    of_task = sum(state[key].numel() for key in own & state.keys())
    assert of_task <= 0.345 * whole
    assert (whole - of_task) + 20 * of_task <= whole + 20 * 0.345 * whole


@pytest.mark.parametrize("kernels", [False, True], ids=["held", "stacked"])
def test_memory_is_what_the_tensors_take(five: Any, kernels: bool) -> None:
    lab, packs = five
    bank = lab.bank(packs, kernels=kernels, fused=False)
    memory = bank.memory()
    model = lab.alone(packs["pets"])
    own = own_keys(model)
    state = {k: v.numel() * 8 for k, v in model.state_dict().items()}
    assert memory.tasks["pets"].bytes == sum(v for k, v in state.items() if k in own)
    attention = sum(v for k, v in state.items() if ".attn." in k)
    # "cars" trained its head only: it uses the base's attention
    assert memory.tasks["cars"].bytes < attention
    assert memory.base_bytes == sum(v for k, v in state.items() if k not in own) + attention
    assert memory.device_bytes == memory.total_bytes == memory.base_bytes + sum(t.bytes for t in memory.tasks.values())
    assert all(t.on_device for t in memory.tasks.values())


def test_memory_of_a_fused_bank(five: Any) -> None:
    lab, packs = five
    bank, plain = lab.bank(packs, kernels=True), lab.bank(packs, kernels=True, fused=False)
    memory = bank.memory()
    assert memory.device_bytes == memory.base_bytes + sum(t.bytes for t in memory.tasks.values())
    # tables in place of positions and prefix tokens, classifiers of 16 rows, and no affine parts
    table, head, before = 17 * 32, 16 * 33, 17 * 32 + 32 + 3 * 33
    assert memory.tasks["pets"].bytes - plain.memory().tasks["pets"].bytes == 8 * (table + head - before)
    assert memory.base_bytes < plain.memory().base_bytes
    state = bank._state
    stacks = [t for part in bank._store.pools.whole.stacks for t in part.values()]
    storages = [t.untyped_storage() for t in (*state.shared.held(), *state.ends.tensors(), *stacks)]
    assert sum({s._cdata: s.nbytes() for s in storages}.values()) == memory.device_bytes


def budget(lab: Any, packs: Any, rooms: int, **options: Any) -> int:
    """Return the bytes that hold so many tasks' attention weights."""
    whole = lab.bank(packs, **options)
    return int(whole.memory().device_bytes - (len(whole._store.residency) - rooms) * whole._store.unit)


@pytest.mark.parametrize(("kernels", "fused"), [(False, False), (True, False), (True, True)])
def test_the_least_recently_used_go(five: Any, tools: Any, kernels: bool, fused: bool) -> None:
    lab, packs = five
    limit = budget(lab, packs, 2, kernels=kernels, fused=fused)
    bank = lab.bank(packs, kernels=kernels, fused=fused, max_gpu_bytes=limit)
    models = {name: lab.alone(path) for name, path in packs.items()}

    def present() -> set[str]:
        memory = bank.memory()
        assert memory.device_bytes <= limit
        return {name for name, task in memory.tasks.items() if task.on_device}

    def call(*names: str) -> None:
        assert tools.worst_error(bank, tools.random_batch(bank, dict.fromkeys(names, 1)), models) <= 1e-12

    assert present() == set()
    call("pets", "dogs")
    assert present() == {"pets", "dogs"}
    call("pets")
    call("food")
    assert present() == {"pets", "food"}
    with pytest.raises(UsageError, match="needs the weights of 3 tasks at once and `max_gpu_bytes` leaves room for 2"):
        bank(tools.random_batch(bank, {"cats": 1, "dogs": 1, "food": 1}))
    assert present() == {"pets", "food"}
    call("cars", "cats")
    assert present() == {"cars", "cats"}
    bank.remove("cats")
    assert present() == {"cars"}
    bank.reload("food")
    call("food", "cars")
    call("dogs", "pets")
    assert present() == {"dogs", "pets"}
    assert bank.memory().host_bytes == (4 * bank._store.unit if kernels else 0)


@pytest.mark.parametrize("kernels", [False, True], ids=["held", "stacked"])
def test_a_budget_that_holds_nothing(five: Any, kernels: bool) -> None:
    lab, packs = five
    limit = budget(lab, {"pets": packs["pets"]}, 1, kernels=kernels)
    bank = lab.bank({"pets": packs["pets"]}, kernels=kernels, max_gpu_bytes=limit)
    with pytest.raises(UsageError, match=f"`max_gpu_bytes` is {limit}: the shared weights"):
        bank.add("dogs", packs["dogs"])  # its position table takes the room of the only slot
    assert list(bank.tasks) == ["pets"]
    assert bank({"pets": torch.zeros(1, 3, 32, 32)})["pets"].shape == (1, 3)


@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=5), max_size=12), st.integers(1, 5))
def test_residency_against_a_simple_model(calls: list[set[int]], limit: int) -> None:
    residency, used = Residency(), list[int]()
    for call in calls:
        if len(call) > limit:
            with pytest.raises(UsageError):
                residency.admit(sorted(call), limit)
        else:
            change = residency.admit(sorted(call), limit)
            assert set(change.enter) == call - set(used)
            rest = [n for n in used if n not in call]
            kept = rest[max(0, len(rest) + len(call) - limit) :] if len(used) + len(change.enter) > limit else rest
            assert set(change.leave) == set(rest) - set(kept)
            used = [*kept, *sorted(call)]
        assert {n for n in range(10) if n in residency} == set(used)
        assert len(residency) == len(used) <= limit

"""Mixed batches equal single-task models; tasks come, go and change while calls run."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vtk.bank import TaskBank
from vtk.card import Transform

COUNTS = {"dogs": 2, "pets": 3, "cars": 1, "food": 2, "cats": 0}
BOUND = 1e-12
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"fused": False}, "operators": {"kernels": True, "fused": False}, "fused": {},
    "fused operators": {"kernels": True},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_mixed_batch_equals_single_task_models(five: Any, tools: Any, way: str) -> None:
    lab, packs = five
    bank = lab.bank(packs, **WAYS[way])
    models = {name: lab.alone(path) for name, path in packs.items()}
    assert tools.worst_error(bank, tools.random_batch(bank, COUNTS), models) <= BOUND
    assert tools.worst_error(bank, tools.random_batch(bank, {"cats": 0}), models) == 0
    assert bank({}) == {}
    assert (bank._state.shared.folded is not None) == ("fused" in way)  # the default, where the model can be


ARCHITECTURES: dict[str, tuple[tuple[Transform, ...], dict[str, Any]]] = {
    "layer scale, qk-norm": ((), {"init_values": 0.5, "qk_norm": True}),
    "rms norms": ((), {"qk_norm": True, "norm_layer": "rmsnorm"}),
    "registers, no class token": ((), {"reg_tokens": 2, "class_token": False, "global_pool": "avg"}),
    "registers apart from positions": ((), {"reg_tokens": 4, "no_embed_class": True}),
    "mean pooling, fc_norm, pre_norm": ((), {"global_pool": "avg", "pre_norm": True}),
    "map pooling": ((), {"global_pool": "map", "class_token": False}),
    "dynamic size": ((), {"dynamic_img_size": True}),
    "no biases": ((), {"qkv_bias": False, "proj_bias": False}),
    "parallel, layer scale, qk-norm": (
        (Transform("parallelize", {"branches": 2}),), {"depth": 4, "init_values": 0.5, "qk_norm": True},
    ),
    "parallel, CB_S of both sums": (
        (Transform("parallelize", {"branches": 2}), Transform("add_context_broadcast", {"scale": True, "on": "both"})),
        {},
    ),
    "CB in the middle of the FFN": ((Transform("add_context_broadcast", {"placement": "mid"}),), {}),
    "CB_S before attention and FFN": (
        (Transform("add_context_broadcast", {"placement": "front", "on": "both", "scale": True}),), {},
    ),
    "CB_S after attention, layer scale": (
        (Transform("add_context_broadcast", {"on": "msa", "scale": True}),), {"init_values": 0.5},
    ),
    "gray images": ((Transform("adapt_input", {"in_chans": 1}),), {}),
}  # fmt: skip


QUICK = (
    "map pooling",
    "dynamic size",
    "parallel, layer scale, qk-norm",
    "CB_S before attention and FFN",
    "gray images",
)


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_every_part_of_timm_s_model(make_lab: Any, tools: Any, case: str) -> None:
    transforms, kwargs = ARCHITECTURES[case]
    lab = make_lab(transforms, **kwargs)
    options = {"in_chans": 1} if case == "gray images" else {}
    # Λ is 0 at first, which would hide it; tasks of a bank have the same one
    options["scales"] = 0.7
    packs = {
        "a": lab.pack("a", seed=1, **options), "b": lab.pack("b", size=48, classes=1, seed=2, **options),
        "c": lab.pack("c", classes=33, seed=3, **options),
    }  # fmt: skip
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in WAYS.values():
        bank = lab.bank(packs, **way)
        assert tools.worst_error(bank, tools.random_batch(bank, {"b": 1, "a": 2, "c": 1}), models) <= BOUND


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.dictionaries(st.sampled_from(sorted(COUNTS)), st.integers(0, 3)), way=st.sampled_from(list(WAYS)))
def test_any_mix(held: Any, tools: Any, counts: dict[str, int], way: str) -> None:
    banks, models = held
    bank = banks[way]
    assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= BOUND


@pytest.fixture
def held(five: Any) -> Any:
    lab, packs = five
    banks = {way: lab.bank(packs, **options) for way, options in WAYS.items()}
    return banks, {name: lab.alone(path) for name, path in packs.items()}


def test_tasks_come_and_go(five: Any, tools: Any) -> None:
    lab, packs = five
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in WAYS.values():
        bank = lab.bank({"pets": packs["pets"]}, **way)
        bank.add("dogs", packs["dogs"])
        bank.add("food", packs["food"])
        bank.remove("pets")
        bank.add("cars", packs["cars"])
        counts = {"dogs": 1, "cars": 1, "food": 1}
        assert list(bank.tasks) == ["dogs", "food", "cars"]
        assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= BOUND
        for name in tuple(bank.tasks):
            bank.remove(name)
        assert bank.memory().device_bytes == bank.memory().base_bytes


def test_an_empty_bank_takes_another_model(make_lab: Any, tools: Any) -> None:
    for way in WAYS.values():
        bank = TaskBank(dtype=torch.float64, **way)  # each pack finds its own base
        for depth in (1, 2):
            lab = make_lab(depth=depth)
            bank.add("a", lab.pack("a"))
            assert (
                tools.worst_error(bank, tools.random_batch(bank, {"a": 2}), {"a": lab.alone(lab.root / "a")}) <= BOUND
            )
            bank.remove("a")


def test_a_reloaded_pack_is_the_new_one(make_lab: Any, tools: Any) -> None:
    lab = make_lab()
    for way in WAYS.values():
        bank = lab.bank({"a": lab.pack("a", seed=1), "b": lab.pack("b", seed=2)}, **way)
        images = tools.random_batch(bank, {"a": 1, "b": 1})
        old = bank(images)
        lab.pack("a", seed=3)
        assert torch.equal(bank(images)["a"], old["a"])
        bank.reload("a")
        assert tools.worst_error(bank, images, {n: lab.alone(lab.root / n) for n in "ab"}) <= BOUND
        assert not torch.allclose(bank(images)["a"], old["a"])


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_shorter_packs_are_expanded(make_lab: Any, tools: Any, dtype: str) -> None:
    lab = make_lab()
    bank = lab.bank({"a": lab.pack("a", dtype=dtype), "b": lab.pack("b", seed=1)})
    models = {name: lab.alone(lab.root / name) for name in "ab"}
    assert tools.worst_error(bank, tools.random_batch(bank, {"a": 1, "b": 2}), models) <= BOUND


def test_a_bank_in_bfloat16(make_lab: Any, tools: Any) -> None:
    lab = make_lab()
    bank = lab.bank({"a": lab.pack("a")}, dtype=torch.bfloat16)
    images = tools.random_batch(bank, {"a": 2})
    logits = bank(images)["a"]
    assert logits.dtype == torch.bfloat16
    wanted = lab.alone(lab.root / "a")(images["a"])
    assert (logits.double() - wanted).abs().max() < 0.05 * wanted.abs().max()

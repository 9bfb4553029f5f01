"""Packs of eight bits: how near they come, what they need of the base, and what a damaged one says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vtk.card import Transform
from vtk.errors import BaseError, DataError, UsageError
from vtk.packs import load_task, merge_task
from vtk.packs.bundle import convert_task
from vtk.packs.cards import TENSORS, pack_bytes
from vtk.packs.int8 import expand, quantise

Make = Callable[..., Path]
QKV = "blocks.0.attn.qkv.weight"


def cosine(a: Path, b: Path) -> float:
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return float(torch.cosine_similarity(load_task(a).model(x), load_task(b).model(x), dim=-1).min())


def test_each_row_has_a_step_of_a_127th_of_its_largest_difference() -> None:
    base, value = torch.randn(5, 7), torch.randn(5, 7)
    value[2] = base[2]
    stored = quantise({"w": value, "b": torch.ones(5)}, {"w", "b"}, {"w": base}.get)
    assert {k: v.dtype for k, v in stored.items()} == {
        "w": torch.int8, "w:scale": torch.float32, "b": torch.float32,
    }  # fmt: skip
    back = expand(stored, {"w": base}.get, "p")["w"]
    steps = (value - base).abs().amax(dim=1, keepdim=True) / 127
    assert bool(((back - value).abs() <= steps * 0.5001 + 1e-7).all())
    assert torch.equal(back[2], base[2])


def test_numbers_that_are_not_finite_and_matrices_not_trained_stay_as_they_are() -> None:
    tensors = {"nan": torch.full((2, 2), torch.nan), "fixed": torch.randn(2, 2), "count": torch.tensor(3)}
    stored = quantise(tensors, {"nan", "count"}, lambda _: None)
    assert stored.keys() == tensors.keys()
    assert torch.equal(stored["fixed"], tensors["fixed"]) and stored["nan"].dtype == torch.float32


@pytest.mark.parametrize("branches", [1, 2])
def test_an_int8_pack_is_near_in_every_command_that_loads_packs(make_pack: Make, tmp_path: Path, branches: int) -> None:
    transforms = (Transform("parallelize", {"branches": branches}),) if branches > 1 else ()
    exact = make_pack("exact", transforms=transforms, step=0.005)
    torch.manual_seed(0)
    card = convert_task(exact, tmp_path / "small", "int8")
    stored = load_file(tmp_path / "small" / TENSORS)
    assert stored["head.weight"].dtype == torch.float32  # the base has none
    told = card.pack["drift"]
    assert set(told["max_relative"]) == {k for k, v in stored.items() if v.dtype == torch.int8}
    assert max(told["max_relative"].values()) < 1 / 254
    assert told["logits_cosine"] > 0.9999 and cosine(exact, tmp_path / "small") > 0.9999
    merged = merge_task(tmp_path / "small", tmp_path / "m.safetensors")
    assert all(v.dtype == torch.float32 for v in load_file(tmp_path / "m.safetensors").values())
    assert merged.carried == load_task(exact).carried
    assert sum(v.nbytes for v in stored.values()) == card.pack["tensors_bytes"]
    assert pack_bytes(tmp_path / "small") < pack_bytes(exact)


def test_a_difference_costs_less_than_the_values_would(make_pack: Make, base_file: Path) -> None:
    pack = make_pack(step=0.001)
    state, base = load_task(pack).model.state_dict(), load_file(base_file)
    key = "blocks.0.attn.qkv.weight"
    errors = [
        float((expand(quantise({key: state[key]}, {key}, start), start, "p")[key] - state[key]).abs().max())
        for start in (base.get, lambda k: torch.zeros_like(base[k]))
    ]
    assert errors[0] * 5 < errors[1]


def test_save_task_writes_it_and_convert_leads_back(make_pack: Make, tmp_path: Path) -> None:
    pack = make_pack(dtype="int8")
    card = convert_task(pack, tmp_path / "full", "fp32")
    assert (card.pack["dtype"], card.pack["converted_from"], card.metrics) == ("fp32", "int8", {"top1": 0.5})
    a, b = load_task(pack).model.state_dict(), load_task(tmp_path / "full").model.state_dict()
    assert all(torch.equal(v, b[k]) for k, v in a.items())
    with pytest.raises(UsageError, match=r"'int4' is unknown; choose one of fp32, bf16, int8"):
        convert_task(pack, tmp_path / "x", "int4")  # type: ignore[arg-type]


def test_a_base_with_another_attention_no_longer_fits(make_pack: Make, base_file: Path, tmp_path: Path) -> None:
    """A full pack carries its attention; an int8 one needs the base's to add its difference to."""
    pack = make_pack(dtype="int8")
    state = load_file(base_file)
    state["blocks.0.attn.qkv.weight"][0, 0] += 1
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(BaseError, match=r"`blocks.0.attn.qkv.weight` differs"):
        load_task(pack, base=tmp_path / "other.safetensors")


DAMAGES: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda t: t.pop(QKV), f"`{QKV}:scale` of shape .* belongs to no matrix"),
    (lambda t: t.update({f"{QKV}:scale": torch.ones(9)}), f"`{QKV}:scale` of shape"),
    (lambda t: t.update({"head.bias:scale": torch.ones(3)}), "belongs to torch.float32"),
    (lambda t: t.pop(f"{QKV}:scale"), f"`{QKV}` holds torch.int8, its model needs"),
    (
        lambda t: t.update({"head.weight": torch.ones(3, 48).char(), "head.weight:scale": torch.ones(3)}),
        "`head.weight` is stored as a difference and the base has none",
    ),
]


def test_a_damaged_one_is_one_clear_error(make_pack: Make) -> None:
    pack = make_pack(dtype="int8")
    whole = load_file(pack / TENSORS)
    for damage, message in DAMAGES:
        tensors = dict(whole)
        damage(tensors)
        save_file(tensors, pack / TENSORS)
        with pytest.raises(DataError, match=message):
            load_task(pack)

"""Packs of factors that a bank refuses, in one line and without a change; and bundles, whose base is not whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vtk.bank import TaskBank
from vtk.errors import BaseError, DataError, UsageError, VtkError
from vtk.models.packed.low_rank import LowRankMatrix
from vtk.packs.bundle import bundle_task
from vtk.packs.factors import Factors


@pytest.fixture(scope="module")
def lab(make_lab: Any) -> Any:
    lab = make_lab(depth=1)
    lab.factors("a")
    lab.factors("b", seed=1)
    return lab


def edited(lab: Any, name: str, change: Any, card: Any = None) -> Path:
    """Copy a pack with another file of tensors."""
    folder = lab.root / name
    shutil.copytree(lab.root / "b", folder, dirs_exist_ok=True)
    tensors = load_file(folder / "task.safetensors")
    change(tensors)
    save_file(tensors, folder / "task.safetensors")
    if card is not None:
        facts = json.loads((folder / "task.json").read_text())
        card(facts)
        (folder / "task.json").write_text(json.dumps(facts))
    return folder


NAN, SHORT, HEAD = "blocks.0.attn.qkv.bias", "blocks.0.attn.proj.weight", "head.weight"
DAMAGES: dict[str, tuple[Any, str]] = {
    "not finite": (lambda t: t[NAN].fill_(float("nan")), "holds numbers that are not finite"),
    "another shape": (
        lambda t: t.update({f"{SHORT}:b": t[f"{SHORT}:b"][:5].clone()}),
        "factors of `blocks.0.attn.proj",
    ),
    "absent": (lambda t: t.pop(HEAD), "lacks `head.weight`"),
    "unknown": (lambda t: t.update({"blocks.7.norm1.bias": torch.zeros(32)}), "`blocks.7.norm1.bias`"),
    "changed": (
        lambda t: t.update({"blocks.0.norm1.bias": torch.ones(32)}),
        "changed `blocks.0.norm1.bias`, which all",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_damaged_packs_and_changes_of_what_is_shared(lab: Any, damage: str, first: bool) -> None:
    change, message = DAMAGES[damage]
    pack = edited(lab, "damaged", change)
    bank = lab.bank({} if first else {"a": lab.root / "a"})
    with pytest.raises(VtkError, match=message) as error:
        bank.add("bad", pack)
    assert "\n" not in str(error.value)
    assert list(bank.tasks) == ([] if first else ["a"])
    bank.add("b", lab.root / "b")  # it serves on as before


def test_a_factored_matrix_of_the_shared_part(lab: Any) -> None:
    name = "blocks.0.mlp.fc1.weight"
    thin = Factors(torch.ones(1, 32), torch.ones(128, 1)).tensors(name)

    def listed(card: Any) -> None:
        card["pack"]["factors"][name] = {"rank": 1, "scale": 1.0}

    pack = edited(lab, "ffn", lambda t: t.update(thin), listed)
    for packs in ({}, {"a": lab.root / "a"}):
        bank = lab.bank(packs)
        with pytest.raises(UsageError, match=f"changed `{name}`, which all tasks of a bank share"):
            bank.add("bad", pack)


def test_a_pack_of_factors_of_another_base(lab: Any, make_lab: Any) -> None:
    other = make_lab(depth=1)
    other.weights = other.base(change="blocks.0.attn.proj.weight")  # a matrix that the factors change
    pack = other.factors("other")
    bank = TaskBank(dtype=torch.float64)
    bank.add("a", lab.root / "a")
    with pytest.raises(
        BaseError, match=r"is of base \w{12}, this bank of \w{12} \(`blocks.0.attn.proj.weight` differs\)"
    ):
        bank.add("other", pack)
    deep = make_lab(depth=2).factors("deep")
    with pytest.raises(UsageError, match="this bank holds a"):
        bank.add("deep", deep)


def test_bundles_bring_only_the_base_that_their_pack_needs(lab: Any, tools: Any) -> None:
    some = lab.factors("some", seed=3, whole=("blocks.0.attn.qkv",))
    bare = lab.factors("bare", seed=4, parts=("nothing",))  # its biases are the base's
    paths = {name: lab.root / f"{name}-bundle" for name in ("a", "some", "bare")}
    for name, path in paths.items():
        bundle_task(lab.root / name, path, base=lab.weights)
    models = {name: lab.alone(path) for name, path in {"a": lab.root / "a", "some": some, "bare": bare}.items()}
    for order in (("some", "bare", "a"), ("a", "some", "bare")):
        bank = TaskBank(dtype=torch.float64)
        for name in order:
            bank.add(name, paths[name])
        assert tools.worst_error(bank, tools.random_batch(bank, dict.fromkeys(order, 1)), models) <= 1e-12
        last = bank._store.held[bank._state.entries[order[-1]].number][0]
        # changes of a matrix that the first bundle did not bring are merged
        assert isinstance(last["proj.weight"], LowRankMatrix) == (order[0] == "a")


def test_a_damaged_pack_is_not_reloaded(lab: Any, tools: Any) -> None:
    folder = edited(lab, "live", lambda t: None)
    bank = lab.bank({"live": folder})
    images = tools.random_batch(bank, {"live": 1})
    before = bank(images)["live"]
    edited(lab, "live", lambda t: t.pop(HEAD))
    with pytest.raises(DataError):
        bank.reload("live")
    assert torch.equal(bank(images)["live"], before)

"""Packs of factors that were damaged or built to do harm: every reader refuses them in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vtk.bank import TaskBank
from vtk.errors import DataError
from vtk.formats import save_tensors
from vtk.models.weights.base import tensor_hash
from vtk.packs import load_task
from vtk.packs.cards import CARD, TENSORS
from vtk.packs.factors import read_pack
from vtk.packs.hub import check_pack
from vtk.packs.synthetic import write_synthetic

QKV, PROJ = "blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"
Tensors = dict[str, Tensor]
Edit = Callable[[Tensors, dict[str, Any]], object]


@pytest.fixture(scope="module")
def whole(shared_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("factors")
    return {
        dtype: write_synthetic(folder / dtype, shared_pack, rank=(3, 2), dtype=dtype)  # type: ignore[arg-type]
        for dtype in ("fp32", "int8")
    }


def damaged(source: Path, folder: Path, edit: Edit) -> Path:
    tensors, card = load_file(source / TENSORS), json.loads((source / CARD).read_text())
    edit(tensors, card)
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_tensors(folder / TENSORS, tensors)
    (folder / CARD).write_text(json.dumps(card))
    return folder


def facts(card: dict[str, Any], name: str = QKV, **values: Any) -> None:
    card["pack"]["factors"][name] = card["pack"]["factors"].get(name, {}) | values


def change(name: str, edit: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors, card: tensors.update({name: edit(tensors[name])})


def base_hash(card: dict[str, Any], name: str) -> str:
    return tensor_hash(load_file(card["base"]["source"])[name])


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def widened(tensors: Tensors, card: dict[str, Any]) -> None:
    """Ranks that agree with each other and with the card, of a matrix that is not the model's."""
    tensors[f"{QKV}:a"] = torch.randn(2, 49)


CHECKED_ALONE: dict[str, tuple[Edit, str]] = {
    "rank of the card": (lambda t, c: facts(c, rank=3), r"are \(2, 48\) .*by its card they are \(3, columns\)"),
    "rank of the file": (change(f"{QKV}:a", lambda a: a[:1]), r"are \(1, 48\)"),
    "ranks of a and b": (change(f"{QKV}:b", lambda b: b[:, :1]), r"and \(144, 1\)"),
    "transposed": (change(f"{QKV}:a", lambda a: a.T), r"are \(48, 2\)"),
    "a vector": (change(f"{QKV}:a", lambda a: a[0]), r"are \(48,\)"),
    "types of a and b": (change(f"{QKV}:b", Tensor.bfloat16), "in torch.bfloat16; by its card"),
    "another type than the card's": (lambda t, c: c["pack"].update(dtype="bf16"), "in torch.bfloat16; the pack"),
    "fp16": (lambda t, c: t.update({k: v.half() for k, v in t.items() if k.startswith(QKV)}), "in torch.float16"),
    "integers": (lambda t, c: t.update({k: v.long() for k, v in t.items() if k.startswith(QKV)}), "torch.int64"),
    "complex": (lambda t, c: t.update({k: v.cfloat() for k, v in t.items() if k.startswith(QKV)}), "complex64"),
    "int8 without scales": (
        lambda t, c: (c["pack"].update(dtype="int8"), t.update({k: v.char() for k, v in t.items() if ":" in k})),
        "scales of the factors of .* are absent",
    ),
    "scales without int8": (lambda t, c: t.update({f"{QKV}:a:scale": torch.ones(2)}), "other types none"),
    "no a": (lambda t, c: t.pop(f"{QKV}:a"), f"lacks the factors of `{QKV}`, of rank 2"),
    "no b": (lambda t, c: t.pop(f"{QKV}:b"), f"lacks the factors of `{QKV}`"),
    "neither, not rank 0": (lambda t, c: [t.pop(f"{QKV}:{x}") for x in "ab"], f"lacks the factors of `{QKV}`"),
    "rank 0 with factors": (lambda t, c: facts(c, rank=0), "which has rank 0 by its card"),
    "not in the card": (lambda t, c: c["pack"]["factors"].pop(QKV), f"holds `{QKV}:a`, which its card does not list"),
    "whole as well": (lambda t, c: t.update({QKV: torch.zeros(144, 48)}), "both whole and as factors"),
    "NaN": (change(f"{QKV}:a", filled(float("nan"))), f"factors of `{QKV}` hold numbers that are not finite"),
    "infinity": (change(f"{QKV}:b", filled(float("-inf"))), "not finite"),
    "a product that overflows": (
        lambda t, c: t.update({f"{QKV}:a": t[f"{QKV}:a"] * 1e25, f"{QKV}:b": t[f"{QKV}:b"] * 1e25}),
        f"factors of `{QKV}` make a change beyond 1e",
    ),
    "NaN elsewhere": (change("head.bias", filled(float("nan"))), "`head.bias` holds numbers that are not finite"),
    "eight bits": (change("head.bias", lambda v: v.to(torch.float8_e4m3fn)), "holds torch.float8_e4m3fn"),
    "differences from the base": (lambda t, c: t.update({"head.bias:scale": torch.ones(3)}), "does not list"),
    "a trained tensor is lost": (lambda t, c: t.pop("blocks.1.attn.qkv.bias"), "lacks `blocks.1.attn.qkv.bias`"),
    "a rank of 10**30": (lambda t, c: facts(c, rank=10**30), f"the rank of `{QKV}` is 1000"),
    "a rank below 0": (lambda t, c: facts(c, rank=-1), "it is from 0 to 65536"),
    "a rank that is true": (lambda t, c: facts(c, rank=True), "the rank of .* is True"),
    "a rank of 2.0": (lambda t, c: facts(c, rank=2.0), "the rank of .* is 2.0"),
    "a rank beyond the matrix": (
        lambda t, c: (
            facts(c, rank=145),
            t.update({f"{QKV}:a": torch.ones(145, 48), f"{QKV}:b": torch.ones(144, 145)}),
        ),
        r"have rank 145, beyond both sides of their matrix \(144, 48\)",
    ),
    "a matrix without rows": (change(f"{QKV}:b", lambda b: b[:0]), r"their matrix \(0, 48\)"),
    "a matrix without columns": (change(f"{QKV}:a", lambda a: a[:, :0]), r"their matrix \(144, 0\)"),
    "no rank": (lambda t, c: c["pack"]["factors"].update({QKV: {}}), "the rank of .* is None"),
    "a list": (lambda t, c: c["pack"]["factors"].update({QKV: [2, 1.0]}), "the rank of .* is None"),
    "scale of 1e9": (lambda t, c: facts(c, scale=1e9), "the scale of .* is 1000000000.0; it is a number, at most 1e6"),
    "scale that is infinite": (lambda t, c: facts(c, scale=float("inf")), "the scale of .* is inf"),
    "scale that is text": (lambda t, c: facts(c, scale="1"), "the scale of .* is '1'"),
    "no scale": (lambda t, c: c["pack"]["factors"][QKV].pop("scale"), "the scale of .* is None"),
    "start that is no hash": (lambda t, c: facts(c, "pos_embed", start="../x"), "is '../x', which is no SHA-256"),
    "a colon in a name": (lambda t, c: facts(c, f"{QKV}:a", rank=0, scale=1.0), "which is no name of a parameter"),
    "no name": (lambda t, c: facts(c, "", rank=0, scale=1.0), "factors of '', which is no name"),
    "a line end in a name": (lambda t, c: facts(c, "a\nb", rank=0, scale=1.0), "which is no name of a parameter"),
    "a line end in a tensor's": (lambda t, c: t.update({"a\nb:a": torch.ones(1)}), "does not list"),
    "names of a list": (lambda t, c: c["pack"].update(factors=[QKV]), "`schema` 2 and `pack.factors` contradict"),
    "no names": (lambda t, c: c["pack"].update(factors={}), "`schema` 2 and `pack.factors` contradict"),
    "the schema before": (lambda t, c: c.update(schema=1), "`schema` 1 and `pack.factors` contradict"),
    "an unknown type": (lambda t, c: c["pack"].update(dtype="int4"), "`pack.dtype` is 'int4'; known: fp32, bf16, int8"),
    "a type of a list": (lambda t, c: c["pack"].update(dtype=["fp32"]), "`pack.dtype` is"),
    "another base": (lambda t, c: c["base"].update(id="0" * 64), "name different bases"),
    "no base": (lambda t, c: c.update(base=None), "name different bases"),
}
"""Faults that a reader without the base sees, too."""

CHECKED_WITH_A_MODEL: dict[str, tuple[Edit, str]] = {
    "another matrix": (widened, rf"the factors of `{QKV}` make a matrix \(144, 49\), by its card it is \(144, 48\)"),
    "no such parameter": (
        lambda t, c: facts(c, "blocks.9.attn.qkv.weight", rank=0, scale=1.0), "no tensor of its base is their start"
    ),
    "a bias": (
        lambda t, c: (facts(c, "blocks.0.mlp.fc1.bias", rank=0, scale=1.0)), "which is no matrix but torch.float32"
    ),
    # of rank 0, a classifier would be the random numbers that a new one starts from
    "a classifier": (
        lambda t, c: (facts(c, "head.weight", rank=0, scale=1.0), t.pop("head.weight")), "no tensor of its base is"
    ),
    # the base has one for a thousand classes, whose hash the card may give
    "another classifier": (
        lambda t, c: (
            facts(c, "head.weight", rank=0, scale=1.0, start=base_hash(c, "head.weight")), t.pop("head.weight")
        ),
        "`head.weight`, which its base does not have in this shape",
    ),
    "a table without its hash": (
        lambda t, c: c["pack"]["factors"]["pos_embed"].pop("start"), "no tensor of its base is their start"
    ),
    "a hash beside that of the base": (lambda t, c: facts(c, start="0" * 64), f"`{QKV}`, and names two starts"),
    "another table": (lambda t, c: facts(c, "pos_embed", start="0" * 64), "no base .*`pos_embed` differs"),
    "a layout of a list": (lambda t, c: c["pack"].update(start_layout=[1]), "`pack.start_layout` is"),
    "a layout of text": (lambda t, c: c["pack"].update(start_layout={"grid": "44"}), "`pack.start_layout` is"),
    "a layout of nothing": (lambda t, c: c["pack"].update(start_layout={"grid": [0, 4]}), "`pack.start_layout` is"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "match"), CHECKED_ALONE.values(), ids=CHECKED_ALONE.keys())
def test_every_reader_refuses(whole: dict[str, Path], tmp_path: Path, edit: Edit, match: str) -> None:
    pack = damaged(whole["fp32"], tmp_path / "pack", edit)
    for read in (read_pack, load_task, check_pack):
        with pytest.raises(DataError, match=match) as caught:
            read(pack)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(("edit", "match"), CHECKED_WITH_A_MODEL.values(), ids=CHECKED_WITH_A_MODEL.keys())
def test_a_reader_with_the_base_refuses(whole: dict[str, Path], tmp_path: Path, edit: Edit, match: str) -> None:
    with pytest.raises(DataError, match=match):
        load_task(damaged(whole["fp32"], tmp_path / "pack", edit))


@pytest.mark.parametrize("name", ["a classifier", "a table without its hash", "a layout of text"])
def test_without_transforms_no_model_is_needed_to_refuse_a_change_without_a_start(
    whole: dict[str, Path], tmp_path: Path, name: str
) -> None:
    edit, match = CHECKED_WITH_A_MODEL[name]
    with pytest.raises(DataError, match=match):
        read_pack(damaged(whole["fp32"], tmp_path / "pack", edit))


def test_a_bank_that_builds_no_model_refuses_them_too_and_goes_on(
    whole: dict[str, Path], shared_pack: Path, tmp_path: Path
) -> None:
    bank, images = TaskBank(dtype=torch.float32), torch.randn(1, 3, 32, 32)
    bank.add("full", shared_pack)
    bank.add("whole", whole["fp32"])
    before = bank({"whole": images})["whole"]
    for name, (edit, _) in CHECKED_WITH_A_MODEL.items():
        with pytest.raises(DataError):
            bank.add(name, damaged(whole["fp32"], tmp_path / name, edit))
    assert torch.equal(bank({"whole": images})["whole"], before) and bank.tasks.keys() == {"full", "whole"}


SCALES: dict[str, tuple[Edit, str]] = {
    "one too many": (change(f"{QKV}:a:scale", lambda s: torch.ones(3)), r"are \(3,\) in .*; int8 has \(2,\)"),
    "another type": (change(f"{QKV}:b:scale", Tensor.bfloat16), "in torch.bfloat16; int8 has"),
    "NaN": (change(f"{QKV}:b:scale", filled(float("nan"))), "not finite"),
    "a product that overflows": (change(f"{QKV}:b:scale", filled(3e38)), "make a change beyond"),
    "absent": (lambda t, c: t.pop(f"{QKV}:b:scale"), "are absent"),
    "beside factors of fp32": (
        lambda t, c: t.update({f"{QKV}:a": t[f"{QKV}:a"].float(), f"{QKV}:b": t[f"{QKV}:b"].float()}), "in torch.int8"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "match"), SCALES.values(), ids=SCALES.keys())
def test_scales_of_eight_bits(whole: dict[str, Path], tmp_path: Path, edit: Edit, match: str) -> None:
    pack = damaged(whole["int8"], tmp_path / "pack", edit)
    for read in (read_pack, load_task):
        with pytest.raises(DataError, match=match):
            read(pack)


def test_undamaged_packs_load(whole: dict[str, Path], tmp_path: Path) -> None:
    for pack in whole.values():
        copy = damaged(pack, tmp_path / pack.name, lambda tensors, card: None)
        assert load_task(copy).factors.keys() == read_pack(copy).factors.keys() == {
            *(f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")), "pos_embed",
        }  # fmt: skip

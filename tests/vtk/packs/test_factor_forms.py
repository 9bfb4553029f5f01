"""Packs of factors in every form: read, merged, converted, bundled and compared; of every layout of a model.

What they must give is computed here in fp64 from the files: the base's tensor plus scale · b · a.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from vtk.card import Card, Transform
from vtk.errors import BaseError, DataError, UsageError
from vtk.models.create import Created, build_model
from vtk.packs import load_checkpoint, load_task, merge_task, save_task
from vtk.packs.base_files import BUNDLED
from vtk.packs.bundle import bundle_task, convert_task
from vtk.packs.cards import CARD, TENSORS, read_card
from vtk.packs.diff import diff_task
from vtk.packs.factors import Factors
from vtk.packs.pack import update_card
from vtk.packs.synthetic import write_synthetic

Make = Callable[..., Path]
REPO = Path(__file__).resolve().parents[3]
QKV = "blocks.0.attn.qkv.weight"
KWARGS: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 2}


def by_hand(pack: Path, base: Path, tokens: int) -> dict[str, Tensor]:
    """The model's tensors of a pack without transforms, in fp64, from its files."""
    card = json.loads((pack / CARD).read_text())["pack"]
    stored = {name: value.double() for name, value in load_file(pack / TENSORS).items()}
    state = {name: value.double() for name, value in load_file(base).items()}
    if "pos_embed" in card.get("factors", {}) and state["pos_embed"].shape[1] != tokens:
        side = round((tokens - 1) ** 0.5)
        state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"].float(), [side, side]).double()
    for name, fact in card.get("factors", {}).items():
        if fact["rank"]:
            a, b = stored.pop(f"{name}:a"), stored.pop(f"{name}:b")
            if card["dtype"] == "int8":
                a, b = a * stored.pop(f"{name}:a:scale")[:, None], b * stored.pop(f"{name}:b:scale")[None]
            state[name] = state[name] + fact["scale"] * (b @ a).reshape(state[name].shape)
    return state | stored


def check(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-7) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].double() - value).abs().max() <= tolerance * max(1, float(value.abs().max())), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_merged_checkpoint_of_factors_is_the_formula_in_plain_timm(
    make_factors: Make, base_file: Path, tmp_path: Path, dtype: str
) -> None:
    pack = make_factors(dtype=dtype)
    merge_task(pack, tmp_path / "m.safetensors")
    check(merged := load_file(tmp_path / "m.safetensors"), by_hand(pack, base_file, 5))
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=2, embed_dim=48, num_heads=2)
    plain.load_state_dict(merged, strict=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(plain.eval()(x), load_task(pack).model(x))
    card = load_checkpoint(tmp_path / "m.safetensors").card
    assert (card.schema, card.pack.get("factors"), card.pack["dtype"]) == (1, None, dtype)


def eva(**options: Any) -> dict[str, Any]:
    return {"depth": 2, "embed_dim": 48, "num_heads": 2, "patch_size": 16, **options}


LAYOUTS: dict[str, tuple[str, dict[str, Any], tuple[Transform, ...], set[str]]] = {
    "branches": (
        "vit_tiny_patch16_224", eva(), (Transform("parallelize", {"branches": 2}),),
        {f"blocks.0.attns.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")} | {"pos_embed"},
    ),
    "context broadcasting": (
        "vit_tiny_patch16_224", eva(), (Transform("add_context_broadcast", {"scale": True}),),
        {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")} | {"pos_embed"},
    ),
    "q, k and v apart": (
        "eva02_tiny_patch14_224", eva(qkv_fused=False, attn_type="rope"), (),
        {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("q_proj", "k_proj", "v_proj", "proj")}
        | {"pos_embed"},
    ),
    "biases of q and v apart": (
        "eva02_tiny_patch14_224", eva(qkv_fused=True), (),
        {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")} | {"pos_embed"},
    ),
    "no table, registers": (
        "vit_small_patch16_dinov3", eva(), (),
        {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")},
    ),
    "relative positions": (
        "beit_base_patch16_224", eva(), (),
        {f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kwargs", "transforms", "matrices"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_other_layouts_come_back_and_lose_nothing_at_full_rank(
    tmp_path: Path, name: str, kwargs: dict[str, Any], transforms: tuple[Transform, ...], matrices: set[str]
) -> None:
    save_file(timm.create_model(name, **kwargs).state_dict(), tmp_path / "base.safetensors")
    created = build_model(
        name, num_classes=3, img_size=64, kwargs=kwargs, transforms=transforms, weights=tmp_path / "base.safetensors"
    )  # fmt: skip
    state, factors = moved(created, matrices, rank=None)
    save(tmp_path / "pack", created, state, factors)
    task = load_task(tmp_path / "pack")
    assert set(task.factors) == matrices <= task.carried
    for key, value in task.model.state_dict().items():
        assert (value - state[key]).abs().max() <= 2e-6, key
    bundle_task(tmp_path / "pack", tmp_path / "bundle")
    (tmp_path / "base.safetensors").unlink()
    assert same(load_task(tmp_path / "bundle").model, task.model)


def moved(created: Created, matrices: set[str], rank: int | None = 2) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """Return the state of a model whose matrices have moved by changes of a rank, full by default, and these."""
    state = {name: value.clone() for name, value in created.model.state_dict().items()}
    factors = {}
    for name in sorted(matrices):
        change = 0.02 * torch.randn(state[name].shape, dtype=torch.float64)
        factors[name] = Factors.of(change, rank)
        kept = factors[name].change(torch.float64).reshape(change.shape)
        assert rank is not None or (kept - change).abs().max() < 1e-12
        state[name] = (state[name].double() + kept).float()
    return state, factors


def save(path: Path, created: Created, state: dict[str, Tensor], factors: dict[str, Factors], **options: Any) -> Card:
    card = Card(created.spec, created.input, ("a", "b", "c"))
    trained = [*factors, *(k for k, v in created.key_map.items() if v is None)]
    return save_task(path, state=state, created=created, card=card, trained=trained, factors=factors, **options)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(v, y[k]) for k, v in x.items())


def test_a_table_is_resampled_as_in_training_whatever_the_base_file_says_of_its_grid(tmp_path: Path) -> None:
    """36 patches may be 6 × 6 or 4 × 9: a bundle, and a file without metadata, do not know."""
    kwargs = eva()
    model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 144), **kwargs)
    save_file(model.state_dict(), tmp_path / "base.safetensors", {"vtk_grid": "4x9", "vtk_size": "64x144"})
    created = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=(32, 64), kwargs=kwargs, weights=tmp_path / "base.safetensors"
    )  # fmt: skip
    state, factors = moved(created, {"pos_embed"})
    save(tmp_path / "pack", created, state, factors)
    bundle_task(tmp_path / "pack", tmp_path / "bundle")
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    for path, base in (("pack", None), ("bundle", None), ("pack", tmp_path / "bare.safetensors")):
        found = load_task(tmp_path / path, base=base).model.state_dict()["pos_embed"]
        assert (found - state["pos_embed"]).abs().max() < 1e-6, (path, base)


def test_a_base_with_another_table_does_not_fit_factors_of_it(make_factors: Make, base_file: Path) -> None:
    """The table counts for no base's id, so another file may have the id and another table."""
    pack = make_factors()
    state = load_file(base_file)
    save_file(state | {"pos_embed": state["pos_embed"] + 0.01}, base_file.with_name("other.safetensors"))
    with pytest.raises(BaseError, match="`pos_embed` differs"):
        load_task(pack, base=base_file.with_name("other.safetensors"))


def test_factors_of_what_does_not_start_from_the_base_are_not_saved(base_file: Path, tmp_path: Path) -> None:
    created = build_model("vit_tiny_patch16_224", num_classes=3, img_size=32, weights=base_file, kwargs=KWARGS)
    state = created.model.state_dict()
    a, b = torch.randn(2, 48), torch.randn(144, 2)
    for name, factors, match in (
        ("head.weight", Factors(a, b[:3]), "which the base does not have"),
        ("blocks.9.attn.qkv.weight", Factors(a, b), "the model has none there"),
        ("norm.bias", Factors(a, b[:1]), r"torch.float32 of shape \(48,\) there"),
        (QKV, Factors(a, b[:9]), r"a matrix \(9, 48\) of rank 2 for .*, which is \(144, 48\)"),
        (QKV, Factors(a.repeat(75, 1), b.repeat(1, 75)), r"of rank 150 for .*, which is \(144, 48\)"),
    ):
        with pytest.raises(UsageError, match=match):
            save(tmp_path / "pack", created, state, {name: factors})
    for values in (Factors(a * float("nan"), b), Factors(a * 1e20, b * 1e20)):
        with pytest.raises(DataError, match="training went wrong"):
            save(tmp_path / "pack", created, state, {QKV: values})
    with pytest.raises(DataError, match="numbers that are not finite"):
        Factors.of(a * float("nan"))
    assert not (tmp_path / "pack").exists()


def test_conversions_round_the_factors_once_and_state_the_error(
    make_factors: Make, base_file: Path, tmp_path: Path
) -> None:
    pack = make_factors()
    update_card(pack, dataclasses.replace(card := read_card(pack), pack={**card.pack, "compression": {"drop": 0.004}}))
    exact, stored = load_task(pack).model.state_dict(), load_file(pack / TENSORS)
    for dtype, error in (("bf16", 2**-8), ("int8", 1 / 100)):
        card = convert_task(pack, tmp_path / dtype, dtype)  # type: ignore[arg-type]
        assert (card.schema, card.pack["dtype"], card.pack["converted_from"]) == (2, dtype, "fp32")
        assert card.pack["compression"] == {"drop": 0.004}
        new = load_file(tmp_path / dtype / TENSORS)
        assert all(torch.equal(new[k], v) for k, v in stored.items() if ":" not in k)  # all else stays exact
        check(rounded := load_task(tmp_path / dtype).model.state_dict(), by_hand(tmp_path / dtype, base_file, 5))
        drift = card.pack["drift"]
        assert drift["max_relative"].keys() == {k for k, f in card.pack["factors"].items() if f["rank"]}
        for name, stated in drift["max_relative"].items():
            found = (rounded[name].double() - exact[name].double()).abs().max() / exact[name].abs().max()
            assert stated == pytest.approx(float(found), rel=1e-3, abs=1e-7) and 0 < found < error
        assert 1 - 1e-4 < drift["logits_cosine"] < 1 and card.pack["tensors_bytes"] == sum(
            v.nbytes for v in new.values()
        )
    assert torch.equal(load_file(tmp_path / "bf16" / TENSORS)[f"{QKV}:a"], stored[f"{QKV}:a"].bfloat16())
    back = convert_task(tmp_path / "int8", tmp_path / "back", "fp32")
    assert "drift" not in back.pack and back.pack["converted_from"] == "fp32"
    assert same(load_task(tmp_path / "back").model, load_task(tmp_path / "int8").model)


def test_saving_in_less_precision_states_the_error_too(base_file: Path, tmp_path: Path) -> None:
    created = build_model("vit_tiny_patch16_224", num_classes=3, img_size=32, weights=base_file, kwargs=KWARGS)
    state, factors = moved(created, {QKV, "pos_embed"})
    exact = save(tmp_path / "fp32", created, state, factors)
    coded = save(tmp_path / "int8", created, state, factors, dtype="int8", pack={"compression": {"drop": 0.01}})
    assert "drift" not in exact.pack or max(exact.pack["drift"]["max_relative"].values()) < 1e-6
    assert 0 < max(coded.pack["drift"]["max_relative"].values()) < 0.01 and coded.pack["compression"]["drop"] == 0.01
    direct = convert_task(tmp_path / "fp32", tmp_path / "converted", "int8").pack["drift"]
    assert coded.pack["drift"]["logits_relative"] == pytest.approx(direct["logits_relative"], rel=0.05)


def test_a_bundle_of_factors_has_what_they_start_from(make_factors: Make, base_file: Path, tmp_path: Path) -> None:
    pack = make_factors()
    model = load_task(pack).model
    bundle_task(pack, tmp_path / "b")
    brought, base = load_file(tmp_path / "b" / BUNDLED), load_file(base_file)
    whole = {f"blocks.{i}.attn.{part}.bias" for i in (0, 1) for part in ("qkv", "proj")} | {"head.weight", "head.bias"}
    assert brought.keys() == base.keys() - whole
    assert "load_task" in (tmp_path / "b" / "README.md").read_text()
    base_file.unlink()
    shutil.rmtree(pack)
    for dtype in ("int8", "bf16"):  # unlike a pack of differences, it needs no other base
        convert_task(tmp_path / "b", tmp_path / dtype, dtype)  # type: ignore[arg-type]
        assert load_task(tmp_path / dtype).bundled
    assert same(load_task(tmp_path / "b").model, model)
    save_file(brought | {"pos_embed": brought["pos_embed"] + 1}, tmp_path / "b" / BUNDLED)
    with pytest.raises(BaseError, match="`pos_embed` differs from the recorded base"):
        load_task(tmp_path / "b")


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_documents_lines_give_the_model_without_vtk(
    make_pack: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    bundle_task(write_synthetic(tmp_path / "p", make_pack(img_size=224), rank=(2, 0), dtype=dtype), tmp_path / "b")
    page = (REPO / "docs" / "reference" / "card-and-pack.md").read_text()
    (code,) = (block.partition("```")[0] for block in page.split("```python\n")[1:] if ":a" in block)
    monkeypatch.chdir(tmp_path / "b")
    names: dict[str, Any] = {}
    exec(code, names)
    check(names["state"], {name: value.double() for name, value in load_task(".").model.state_dict().items()})


@pytest.mark.slow
def test_a_comparison_sees_the_merged_weights(make_factors: Make, tmp_path: Path) -> None:
    pack = make_factors(rank=2)
    convert_task(pack, tmp_path / "int8", "int8")
    moved = {change.part: change for change in diff_task(pack).changes}
    assert moved["blocks.0"].tensors == 4 and moved["blocks.0"].relative > 0.01 and not moved["patch_embed"].relative
    between = {change.part: change for change in diff_task(pack, tmp_path / "int8").changes}
    assert 0 < between["blocks.0"].relative < moved["blocks.0"].relative / 20 and between["head"].tensors == 0

"""Packs: what they hold, that they come back bit for bit, and which bases fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from vtk.card import Card, Transform
from vtk.errors import BaseError, DataError, UsageError
from vtk.models.create import Created, build_model
from vtk.packs import load_checkpoint, load_task, merge_task, save_task, store_base
from vtk.packs.base_files import stored_base
from vtk.packs.cards import CARD, HASHES, TENSORS
from vtk.packs.diff import diff_task
from vtk.packs.pack import FrozenTensorChanged

KWARGS: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 2}
NAME = "vit_tiny_patch16_224"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    save_file(timm.create_model(NAME, **KWARGS).state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def attention(created: Created) -> set[str]:
    names = {k for k in created.model.state_dict() if ".attn." in k}
    return names | {"pos_embed", "head.weight", "head.bias"} | {k for k, v in created.key_map.items() if v is None}


def trained(weights: Path, classes: int = 3, **options: Any) -> Created:
    """A model whose attention, head and position table were moved, as training would."""
    created = build_model(NAME, num_classes=classes, img_size=32, weights=weights, kwargs=KWARGS, **options)
    with torch.no_grad():
        for name in sorted(attention(created)):
            tensor = created.model.state_dict()[name]
            tensor += 0.02 * torch.randn_like(tensor)
    created.model.eval()
    return created


def save(created: Created, path: Path, **options: Any) -> Path:
    classes = tuple(f"c{i}" for i in range(created.model.num_classes))
    card = Card(model=created.spec, input=created.input, classes=classes, metrics={"top1": 0.5})
    state = options.pop("state", created.model.state_dict())
    save_task(path, state=state, created=created, card=card, trained=attention(created), **options)
    return path


@pytest.mark.parametrize("options", [{}, {"in_chans": 1}], ids=["plain", "adapted stem"])
def test_an_fp32_pack_comes_back_bit_for_bit(weights: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    created = trained(weights, **options)
    task = load_task(save(created, tmp_path / "pack"))
    state = task.model.state_dict()
    assert state.keys() == created.model.state_dict().keys()
    assert all(torch.equal(v, state[k]) for k, v in created.model.state_dict().items())
    assert not task.model.training
    assert task.card.transforms == ((Transform("adapt_input", options),) if options else ())


def test_a_bf16_pack_is_the_trained_tensor_rounded_once(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    state = load_task(save(created, tmp_path / "pack", dtype="bf16")).model.state_dict()
    for key, value in created.model.state_dict().items():
        expected = value.bfloat16().float() if key in attention(created) else value
        assert torch.equal(state[key], expected), key


def test_a_pack_holds_only_what_differs_from_the_base(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    assert set(load_file(save(created, tmp_path / "pack") / TENSORS)) == attention(created)


def test_a_frozen_tensor_that_changed_is_carried_and_loud(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    created.model.blocks[1].mlp.fc1.weight.data[0, 0] += 1
    with pytest.raises(FrozenTensorChanged, match=r"1 frozen tensors changed.*blocks\.1\.mlp\.fc1\.weight"):
        save(created, tmp_path / "pack")
    state = load_task(tmp_path / "pack").model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in created.model.state_dict().items())


def test_frozen_tensors_stored_in_bf16_count_as_unchanged(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    keep = attention(created)
    state = {k: v if k in keep else v.bfloat16() for k, v in created.model.state_dict().items()}
    loaded = load_task(save(created, tmp_path / "pack", state=state)).model.state_dict()
    assert all(torch.equal(v, loaded[k]) for k, v in created.model.state_dict().items())


def test_any_file_with_the_same_values_is_the_base(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    pack = save(created, tmp_path / "pack")
    other = {k: v for k, v in load_file(weights).items() if not k.startswith("head")}
    other["pos_embed"] = torch.zeros_like(other["pos_embed"])
    torch.save({"state_dict": other}, tmp_path / "same.pth")
    weights.unlink()
    assert torch.equal(load_task(pack, base=tmp_path / "same.pth").model.pos_embed, created.model.pos_embed)


def test_a_wrong_base_names_both_ids_and_the_first_tensor(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    pack = save(created, tmp_path / "pack")
    state = load_file(weights)
    state["blocks.0.mlp.fc2.weight"][0, 0] += 1
    save_file(state, tmp_path / "wrong.safetensors")
    wrong = build_model(NAME, num_classes=3, weights=tmp_path / "wrong.safetensors", kwargs=KWARGS).base.ref.id
    with pytest.raises(BaseError) as caught:
        load_task(pack, base=tmp_path / "wrong.safetensors")
    for part in (wrong[:12], created.base.ref.id[:12], "`blocks.0.mlp.fc2.weight` differs"):
        assert part in str(caught.value)
    # attention is carried by the pack, so a base that differs only there still fits
    state = load_file(weights)
    state["blocks.0.attn.proj.weight"][0, 0] += 1
    save_file(state, tmp_path / "fits.safetensors")
    load_task(pack, base=tmp_path / "fits.safetensors")


def test_the_base_is_found_at_its_path_then_at_home_or_all_places_are_named(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    pack = save(created, tmp_path / "pack")
    assert store_base(created.base) == stored_base(created.base.ref.id)
    weights.unlink()
    load_task(pack)
    stored_base(created.base.ref.id).unlink()
    with pytest.raises(BaseError) as caught:
        load_task(pack)
    for part in (str(weights), "$VTK_HOME", "hub", "--base FILE"):
        assert part in str(caught.value)


def test_the_copy_at_home_keeps_its_dtype_and_is_the_same_base(tmp_path: Path) -> None:
    half = {k: v.half() for k, v in timm.create_model(NAME, **KWARGS).state_dict().items()}
    save_file(half, tmp_path / "h.safetensors")
    created = build_model(NAME, num_classes=3, weights=tmp_path / "h.safetensors", kwargs=KWARGS)
    copy = store_base(created.base)
    assert {v.dtype for v in load_file(copy).values()} == {torch.float16}
    assert build_model(NAME, num_classes=3, weights=copy, kwargs=KWARGS).base.ref.id == created.base.ref.id


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / TENSORS).write_bytes((p / TENSORS).read_bytes()[:100]), "not a whole safetensors"),
        (lambda p: (p / TENSORS).unlink(), "there is no file"),
        (lambda p: (p / HASHES).write_text("{}"), "different bases"),
        (lambda p: (p / HASHES).write_text('{"a": 1}'), "expected str"),
        (lambda p: (p / CARD).write_text("{}"), "not a vtk card"),
        (lambda p: (p / CARD).unlink(), "neither a pack"),
        (lambda p: save_file({"x": torch.zeros(1)}, p / TENSORS), "does not have"),
        (lambda p: save_file({"head.bias": torch.zeros(3)}, p / TENSORS), "lacks `pos_embed`"),
        (lambda p: save_file({"head.bias": torch.zeros(9)}, p / TENSORS), "has shape"),
    ],
)
def test_a_damaged_pack_is_one_clear_error(weights: Path, tmp_path: Path, damage: Any, message: str) -> None:
    pack = save(trained(weights), tmp_path / "pack")
    damage(pack)
    with pytest.raises(DataError, match=message):
        load_task(pack)


def test_an_unknown_transform_is_refused_by_name(weights: Path, tmp_path: Path) -> None:
    pack = save(trained(weights), tmp_path / "pack")
    card = json.loads((pack / CARD).read_text())
    card["transforms"] = [{"op": "teleport", "args": {}}]
    (pack / CARD).write_text(json.dumps(card))
    with pytest.raises(DataError, match="transform `teleport` is not in this version; known: adapt_input"):
        load_task(pack)


def test_a_merged_checkpoint_loads_strictly_in_plain_timm(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    out = tmp_path / "merged.safetensors"
    merge_task(save(created, tmp_path / "pack"), out)
    plain = timm.create_model(NAME, num_classes=3, img_size=(32, 32), **KWARGS)
    plain.load_state_dict(load_file(out), strict=True)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain.eval()(x), created.model(x))
        assert torch.equal(load_checkpoint(out).model(x), created.model(x))
    assert load_checkpoint(out).card == load_task(tmp_path / "pack").card
    with pytest.raises(UsageError, match="exists"):
        merge_task(tmp_path / "pack", out)


def test_two_packs_of_one_base_share_every_ffn_tensor(weights: Path, tmp_path: Path) -> None:
    a = save(trained(weights), tmp_path / "a")
    torch.manual_seed(9)
    b = save(trained(weights, classes=2), tmp_path / "b")
    diff = diff_task(a, b)
    assert (diff.shared_ffn, diff.total_ffn) == (8, 8)
    moved = {c.part: c for c in diff.changes}
    assert moved["blocks.0"].tensors == 4  # qkv and proj, weight and bias
    assert moved["patch_embed"].relative == 0.0
    assert moved["head"].shape_differs == 2
    own = diff_task(a)
    reference = load_file(weights)["blocks.1.attn.qkv.weight"]
    first = load_task(a)
    assert own.shared_bytes == sum(4 * v.numel() for k, v in first.model.state_dict().items() if k not in first.carried)
    assert 0 < next(c for c in own.changes if c.part == "blocks.1").relative < 1 < reference.numel()


def test_packs_of_different_models_are_not_compared(weights: Path, tmp_path: Path) -> None:
    a = save(trained(weights), tmp_path / "a")
    deeper = build_model(NAME, num_classes=3, img_size=32, kwargs=KWARGS | {"depth": 3}, pretrained=False)
    b = tmp_path / "b"
    store_base(deeper.base)
    save_task(
        b, state=deeper.model.state_dict(), created=deeper, trained=attention(deeper),
        card=Card(model=deeper.spec, input=deeper.input, classes=("x", "y", "z")),
    )  # fmt: skip
    with pytest.raises(UsageError, match="different models"):
        diff_task(a, b)


def test_a_pack_is_replaced_as_a_whole(weights: Path, tmp_path: Path) -> None:
    created = trained(weights)
    save(created, tmp_path / "pack")
    (tmp_path / "pack" / "stray").write_text("x")
    save(created, tmp_path / "pack")
    assert sorted(p.name for p in (tmp_path / "pack").iterdir()) == sorted([CARD, HASHES, TENSORS])
    assert dataclasses.replace(load_task(tmp_path / "pack").card, command="x").command == "x"


def test_a_base_with_a_wide_table_is_stored_and_used_again(tmp_path: Path) -> None:
    """4×6 patches: no square, so the copy must tell its grid."""
    options: dict[str, Any] = {"num_classes": 3, "kwargs": KWARGS, "img_size": (64, 96)}
    created = build_model(NAME, pretrained=False, **options)
    copy = store_base(created.base)
    again = build_model(NAME, weights=copy, **options)
    assert torch.equal(again.model.pos_embed, created.model.pos_embed)
    assert build_model(NAME, weights=copy, **options | {"img_size": (96, 64)}).model.pos_embed.shape == (1, 25, 64)
    pack = save(created, tmp_path / "pack")
    assert torch.equal(load_task(pack).model.pos_embed, created.model.pos_embed)


def test_a_pack_without_a_trained_tensor_is_refused_though_the_base_has_one(weights: Path, tmp_path: Path) -> None:
    pack = save(trained(weights), tmp_path / "pack")
    tensors = load_file(pack / TENSORS)
    del tensors["blocks.0.attn.proj.bias"]
    save_file(tensors, pack / TENSORS)
    with pytest.raises(DataError, match=r"lacks `blocks.0.attn.proj.bias`, which its card says was trained"):
        load_task(pack)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_numbers_of_another_kind_are_refused(weights: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    pack = save(trained(weights), tmp_path / "pack")
    tensors = load_file(pack / TENSORS)
    save_file(tensors | {"head.bias": torch.zeros(3, dtype=dtype)}, pack / TENSORS)
    with pytest.raises(DataError, match=rf"`head.bias` holds {dtype}, its model needs torch.float32"):
        load_task(pack)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": {"height": 33, "width": 32}}, "height 33 is not a multiple"),
        ({"transforms": [{"op": "adapt_input", "args": {}}]}, "missing a required .*argument: 'in_chans'"),
        ({"transforms": [{"op": "adapt_input", "args": {"in_chans": "a"}}]}, "`in_chans` is 'a'"),
        ({"transforms": [{"op": "adapt_input", "args": {"in_chans": 3, "x": 1}}]}, "unexpected keyword argument 'x'"),
    ],
)
def test_a_card_that_fits_no_model_is_a_data_error(
    weights: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Nobody gave a flag, so it is no usage error."""
    pack = save(trained(weights), tmp_path / "pack")
    card = json.loads((pack / CARD).read_text())
    (pack / CARD).write_text(json.dumps(card | change))
    with pytest.raises(DataError, match=message):
        load_task(pack)


def test_a_merged_file_is_not_taken_for_a_pack(weights: Path, tmp_path: Path) -> None:
    merge_task(save(trained(weights), tmp_path / "pack"), tmp_path / "m.safetensors")
    with pytest.raises(DataError, match=r"m.safetensors is a file; give the folder of a pack"):
        load_task(tmp_path / "m.safetensors")
    with pytest.raises(DataError, match=r"there is no folder .*nowhere; give the folder of a pack"):
        load_task(tmp_path / "nowhere")


def test_a_frozen_position_table_travels_in_full_precision(weights: Path, tmp_path: Path) -> None:
    """Head only: the resampled table is not trained and not in the base, and training may have stored it in bf16."""
    created = build_model(NAME, num_classes=3, img_size=32, weights=weights, kwargs=KWARGS)
    table = created.model.pos_embed.detach().clone()
    state = {k: v if k.startswith("head") else v.bfloat16() for k, v in created.model.state_dict().items()}
    card = Card(model=created.spec, input=created.input, classes=("a", "b", "c"))
    pack = tmp_path / "pack"
    save_task(pack, state=state, created=created, card=card, trained={"head.weight", "head.bias"})
    assert set(load_file(pack / TENSORS)) == {"head.weight", "head.bias", "pos_embed"}
    assert torch.equal(load_task(pack).model.pos_embed, table)

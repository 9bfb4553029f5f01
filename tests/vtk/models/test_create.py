"""Models against timm's own and against tables interpolated by hand."""

import hashlib
from pathlib import Path
from typing import Any

import huggingface_hub.constants as constants
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from vtk.card import Card, Transform
from vtk.errors import DataError, UsageError
from vtk.models.arguments import parse_model_kwargs
from vtk.models.create import build_model
from vtk.models.inputs import input_spec
from vtk.models.module import create_model
from vtk.models.weights.base import base_id, tensor_hash
from vtk.packs.load import card_metadata

TINY: dict[str, Any] = {"depth": 2, "embed_dim": 64, "num_heads": 2}


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(3)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **TINY)
    for p in model.parameters():
        p.data.normal_(std=0.1)
    return model.eval()


@pytest.fixture
def weights(source: nn.Module, tmp_path: Path) -> Path:
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def create(weights: Path | None, **kwargs: Any):
    options = {"num_classes": 5, "kwargs": TINY} | kwargs
    return build_model("vit_tiny_patch16_224", weights=weights, **options)


def test_the_model_is_timms_own(source: nn.Module, weights: Path) -> None:
    created = create(weights)
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(created.model.eval()(x), source(x))
    assert created.notes == []


@pytest.mark.parametrize("size", [(224, 224), (160, 256), (448, 112), (32, 32)])
def test_position_tables_match_timms_resampling(source: nn.Module, weights: Path, size: tuple[int, int]) -> None:
    created = create(weights, img_size=size)
    expected = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=size, **TINY)
    filtered = timm.models.vision_transformer.checkpoint_filter_fn(source.state_dict(), expected)
    torch.testing.assert_close(created.model.pos_embed, filtered["pos_embed"], rtol=0, atol=1e-6)
    assert created.model(torch.zeros(1, 3, *size)).shape == (1, 5)


def test_a_table_of_equal_token_count_but_other_shape_is_resampled(weights: Path, tmp_path: Path) -> None:
    """112×448 has as many patches as 224×224: equal counts must not pass as equal grids."""
    wide = create(weights, img_size=(112, 448))
    card = Card(model=wide.spec, input=wide.input, classes=tuple("abcde"))
    save_file(wide.model.state_dict(), tmp_path / "wide.safetensors", metadata=card_metadata(card))
    back = create(tmp_path / "wide.safetensors", img_size=(224, 224))
    table = wide.model.pos_embed.detach()[:, 1:].reshape(1, 7, 28, 64).permute(0, 3, 1, 2)
    expected = nn.functional.interpolate(table, (14, 14), mode="bicubic", antialias=True)
    torch.testing.assert_close(back.model.pos_embed[:, 1:], expected.flatten(2).transpose(1, 2), rtol=0, atol=1e-6)
    # the number of tokens, 197, would not say what changed
    assert "position table resampled from 14×14 to 7×28 patches" in wide.notes
    assert back.notes == ["position table resampled from 7×28 to 14×14 patches"]


def test_another_number_of_classes_makes_a_new_head_and_says_so(weights: Path) -> None:
    created = create(weights, num_classes=7)
    assert created.model.head.weight.shape == (7, 64)
    assert created.notes == ["new classifier `head` for 7 classes (the weights' 5 classes)"]
    assert created.key_map["head.weight"] is None
    assert {"head.weight", "head.bias", "pos_embed"} == set(created.initial)


@pytest.mark.parametrize(
    ("size", "message"),
    [(230, "height 230 is not a multiple.*; use 224 or 240"), ((224, 15), "width 15 .*; use 16"), (0, "at least 1")],
)
def test_impossible_sizes_name_the_nearest_valid_ones(size: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create(None, img_size=size, pretrained=False)


def test_wrong_names_and_arguments_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"no model `vit_tinny_patch16_224`; similar names: vit_tiny_patch16_224"):
        build_model("vit_tinny_patch16_224", num_classes=2)
    with pytest.raises(UsageError, match="cannot build"):
        build_model("vit_tiny_patch16_224", num_classes=2, kwargs={"nonsense": 1})


def test_weights_of_another_model_are_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 28 % of the backbone.*`blocks.0.mlp.fc1.weight`.*is --model right"):
        build_model("test_vit", num_classes=5, weights=weights)
    deeper = timm.create_model("vit_tiny_patch16_224", **(TINY | {"depth": 3}))
    save_file(deeper.state_dict(), tmp_path / "deep.safetensors")
    with pytest.raises(DataError, match=r"inside its blocks.*blocks\.2"):
        create(tmp_path / "deep.safetensors")


def test_layer_scale_is_never_dropped_silently(tmp_path: Path) -> None:
    scaled = timm.create_model("vit_tiny_patch16_224", init_values=0.1, **TINY)
    save_file(scaled.state_dict(), tmp_path / "ls.safetensors")
    with pytest.raises(DataError, match=r"ls1\.gamma"):
        create(tmp_path / "ls.safetensors")


@pytest.mark.parametrize("side", [1, 2, 3], ids=str)
def test_a_small_table_without_rows_for_register_tokens(tmp_path: Path, side: int) -> None:
    # 3·3 patches are also 2·2 and the five prefix tokens, and 2·2 are fewer than these
    name, size, file = "vit_small_patch14_reg4_dinov2", 14 * side, tmp_path / "w.safetensors"
    small = timm.create_model(name, img_size=size, num_classes=0, **TINY)
    save_file(small.state_dict(), file)
    created = build_model(name, num_classes=5, img_size=size, kwargs=TINY, weights=file)
    assert torch.equal(created.model.pos_embed, small.pos_embed)
    assert created.notes == ["new classifier `head` for 5 classes (the weights have no classifier)"]


@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "resnet18"])
def test_a_file_of_ours_keeps_its_classifier_whatever_timms_default(name: str, tmp_path: Path) -> None:
    """timm's dinov2 has no classifier of its own, and its ResNets take no size."""
    options: dict[str, Any] = {"num_classes": 3, "img_size": 56}
    if name != "resnet18":
        options["kwargs"] = TINY
    first = build_model(name, pretrained=False, **options)
    card = Card(model=first.spec, input=first.input, classes=("a", "b", "c"))
    state = {k: v + 1 if v.is_floating_point() else v for k, v in first.model.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors", metadata=card_metadata(card))
    again = build_model(name, weights=tmp_path / "w.safetensors", **options)
    assert all(torch.equal(v, state[k]) for k, v in again.model.state_dict().items())
    assert again.notes == []


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model", "module."])
def test_torch_files_with_the_usual_wrappings(source: nn.Module, tmp_path: Path, wrap: str) -> None:
    state = source.state_dict()
    content: Any = {f"module.{k}": v for k, v in state.items()} if wrap == "module." else state
    content = {wrap: content, "epoch": 3} if wrap in ("state_dict", "model") else content
    torch.save(content, tmp_path / "w.pth")
    created = create(tmp_path / "w.pth")
    assert all(torch.equal(v, state[k]) for k, v in created.model.state_dict().items())


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"model": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(DataError, match="could run code"):
        create(tmp_path / "bomb.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"\xff" * 50, "not a whole safetensors"),
        ("a.pth", b"nonsense", "not read|not a whole"),
        ("a.msgpack", b"", "cannot read `.msgpack`"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, UsageError), match=message):
        create(tmp_path / name)


def test_deit_names_are_renamed_by_timms_own_rule(tmp_path: Path) -> None:
    model = timm.create_model("deit3_small_patch16_224", depth=2, embed_dim=64, num_heads=2)
    old = {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for k, v in model.state_dict().items()}
    torch.save({"model": old}, tmp_path / "deit3.pth")
    created = build_model("deit3_small_patch16_224", num_classes=1000, weights=tmp_path / "deit3.pth", kwargs=TINY)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in created.model.state_dict().items())


def test_equal_values_are_one_base_whatever_their_dtype(source: nn.Module, tmp_path: Path) -> None:
    half = {k: v.half() for k, v in source.state_dict().items()}
    save_file(half, tmp_path / "half.safetensors")
    save_file({k: v.float() for k, v in half.items()}, tmp_path / "single.safetensors")
    a, b = create(tmp_path / "half.safetensors"), create(tmp_path / "single.safetensors")
    assert a.base.ref.id == b.base.ref.id
    half["blocks.0.mlp.fc1.bias"][0] += 1
    save_file(half, tmp_path / "other.safetensors")
    assert create(tmp_path / "other.safetensors").base.ref.id != a.base.ref.id


def test_head_and_position_table_are_not_part_of_the_id(source: nn.Module, tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in source.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    state["pos_embed"] += 1
    state["head.weight"] += 1
    save_file(state, tmp_path / "b.safetensors")
    a, b = create(tmp_path / "a.safetensors"), create(tmp_path / "b.safetensors")
    assert a.base.ref.id == b.base.ref.id
    assert "head.weight" not in a.base.hashes
    assert "pos_embed" not in a.base.hashes


def test_the_hash_is_what_the_format_page_says() -> None:
    values = np.array([[1.5, -2.0]], dtype="<f4")
    assert tensor_hash(torch.tensor([[1.5, -2.0]])) == hashlib.sha256(b"(1, 2)" + values.tobytes()).hexdigest()
    assert base_id({"b": "2", "a": "1"}) == hashlib.sha256(b"a 1\nb 2").hexdigest()


def test_an_adapted_stem_is_timms_rule(source: nn.Module, weights: Path) -> None:
    created = create(weights, in_chans=1)
    assert created.transforms == (Transform("adapt_input", {"in_chans": 1}),)
    assert created.key_map["patch_embed.proj.weight"] is None
    expected = source.patch_embed.proj.weight.sum(1, keepdim=True)
    torch.testing.assert_close(created.model.patch_embed.proj.weight, expected)
    assert created.input.mean == (0.5,)


def test_a_checkpoint_of_other_channels_brings_its_own_stem(tmp_path: Path) -> None:
    first = create(None, pretrained=False, in_chans=1, img_size=32)
    state = {k: torch.randn_like(v) for k, v in first.model.state_dict().items()}
    card = Card(first.spec, first.input, tuple("abcde"), transforms=first.transforms)
    save_file(state, tmp_path / "grey.safetensors", metadata=card_metadata(card))
    for size in (32, 48):
        again = create(tmp_path / "grey.safetensors", in_chans=1, img_size=size)
        assert again.transforms == first.transforms and "patch_embed.proj.weight" in again.brought
        found = again.model.state_dict()
        assert all(torch.equal(found[k], v) for k, v in state.items() if k != "pos_embed" or size == 32)
    for channels in (3, 4):
        with pytest.raises(DataError, match=f"is for 1 channels, not {channels}; give --in-chans 1"):
            create(tmp_path / "grey.safetensors", in_chans=channels, img_size=32)


def test_random_bases_repeat_for_a_seed_and_leave_the_callers_numbers_alone() -> None:
    torch.manual_seed(1)
    a = create(None, pretrained=False, seed=5)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    b, c = create(None, pretrained=False, seed=5), create(None, pretrained=False, seed=6)
    assert a.base.ref.id == b.base.ref.id != c.base.ref.id


def test_the_hub_being_out_of_reach_is_one_quick_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://nowhere.invalid")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot be downloaded from the hub; give --weights FILE, or --no-pretrained"):
        build_model("test_vit", num_classes=2)


def test_model_kwargs_from_the_command_line() -> None:
    assert parse_model_kwargs(("init_values=1e-5",)) == {"init_values": 1e-5}  # YAML alone reads a text
    assert parse_model_kwargs(("depth=4", "qk_norm=true", "global_pool=avg")) == {
        "depth": 4, "qk_norm": True, "global_pool": "avg",
    }  # fmt: skip
    for bad, message in (
        ("depth", "write key=value"),
        ("img_size=3", "--img-size"),
        ("a=[", "cannot be read"),
        ("init_values=null", "timm ignores None, so .* keep its own init_values; give init_values=0"),
        ("global_pool=None", "give a value, or leave it out"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_model_kwargs((bad,))
    with pytest.raises(UsageError, match=r"`kwargs` init_values=None: .* give init_values=0 for no LayerScale"):
        create_model("vit_tiny_patch16_6x2_224", num_classes=2, pretrained=False, kwargs={"init_values": None})


@pytest.mark.assets
def test_real_weights_load_at_another_size(assets: Path) -> None:
    created = build_model(
        "vit_small_patch14_dinov2", num_classes=10, img_size=56, weights=assets / "dinov2_vits14_fp16.safetensors"
    )
    assert created.notes == [
        "position table resampled from 1370 to 17 tokens",
        "new classifier `head` for 10 classes (the weights have no classifier)",
    ]
    with pytest.raises(DataError, match="inside its blocks"):
        build_model("vit_small_patch16_224", num_classes=10, weights=assets / "dinov2_vits14_fp16.safetensors")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mean": (float("nan"),) * 3}, "--mean.*finite"),
        ({"std": (float("inf"),) * 3}, "--std.*finite"),
        ({"std": (0.0, 1.0, 1.0)}, "--std.*above 0"),
        ({"crop_pct": 1e-9}, "--crop-pct.*0.05 to 1"),
    ],
)
def test_impossible_preprocessing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        input_spec("vit_tiny_patch16_224", **given)


@pytest.mark.parametrize("item", ["checkpoint_path=x.pth", "pretrained_cfg=x", "cache_dir=/tmp", "features_only=true"])
def test_arguments_that_would_read_other_weights_are_refused(item: str) -> None:
    with pytest.raises(UsageError, match=f"{item.split('=')[0]}: this is set by"):
        parse_model_kwargs((item,))

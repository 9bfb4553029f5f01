"""Merged models as folders: timm and transformers load them with classes and preprocessing, or nothing is written."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from vtk import open_source
from vtk.__main__ import main
from vtk.card import Card, InputSpec, Transform
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.errors import UsageError, VerificationError
from vtk.models.create import build_model
from vtk.models.weights.transformers import rename
from vtk.packs import load_task, merge_task
from vtk.packs.merged_folder import write_form
from vtk.packs.native import native_form
from vtk.packs.timm_folder import data_config

Make = Callable[..., Path]
CLASSES = ("ant", "bee", "böse \U0001f41d")
SMALL = {"embed_dim": 48, "num_heads": 2, "depth": 2}
TWO = (Transform("parallelize", {"branches": 2}),)
TIMM: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a rectangle": ("vit_tiny_patch16_224", SMALL, {"img_size": (32, 48)}),
    "grey": ("vit_tiny_patch16_224", SMALL, {"in_chans": 1}),
    "five channels": ("vit_tiny_patch16_224", SMALL, {"in_chans": 5}),
    "a mean of patches": ("vit_tiny_patch16_224", SMALL | {"global_pool": "avg"}, {}),
    "registers": ("vit_small_patch14_reg4_dinov2", SMALL, {"img_size": 28}),
    "rotary": ("vit_small_patch16_dinov3", SMALL, {}),
    "joined branches": ("vit_small_patch14_reg4_dinov2", SMALL | {"depth": 4}, {"img_size": 28, "transforms": TWO}),
    "named branches": ("vit_tiny_patch16_6x2_224", {"depth": 2}, {}),
    "convolutions": ("resnet10t", {}, {"img_size": 64}),
}
V2 = "vit_small_patch14_dinov2"
NATIVE: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "ViT": ("vit_tiny_patch16_224", SMALL, {}, "vit"),
    "ViT of a rectangle": ("vit_tiny_patch16_224", SMALL, {"img_size": (32, 48)}, "vit"),
    "ViT without biases": ("vit_tiny_patch16_224", SMALL | {"qkv_bias": False, "mlp_ratio": 2.5}, {}, "vit"),
    "ViT of the patches": (
        "vit_tiny_patch16_224", SMALL | {"global_pool": "avg", "fc_norm": False}, {}, "dinov2",
    ),
    "DeiT III": ("deit3_small_patch16_224", SMALL, {}, "dinov2"),
    "DINOv2": (V2, SMALL, {"img_size": 28}, "dinov2"),
    "DINOv2 of a rectangle": (V2, SMALL, {"img_size": (28, 42)}, "vit"),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", SMALL, {"img_size": 28}, "dinov2_with_registers"),
    "registers with places": ("vit_tiny_patch16_224", SMALL | {"reg_tokens": 2}, {}, "dinov2_with_registers"),
    "DINOv2 with SwiGLU": (
        "vit_giant_patch14_dinov2", SMALL | {"mlp_ratio": 16 / 3}, {"img_size": 28}, "dinov2",
    ),
}  # fmt: skip


def made(name: str, kwargs: dict[str, Any], options: dict[str, Any]) -> tuple[Card, nn.Module]:
    """Return a model far from its initial values, with its card."""
    created = build_model(name, num_classes=3, kwargs=kwargs, pretrained=False, **{"img_size": 32} | options)
    torch.manual_seed(1)
    for value in created.model.state_dict().values():
        if value.is_floating_point():
            value += 0.1 * torch.randn_like(value)
    return Card(created.spec, created.input, CLASSES, transforms=created.transforms), created.model.eval()


def images(card: Card) -> Tensor:
    return torch.randn(2, card.input.in_chans, *card.input.size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("case", [c if c != "convolutions" else pytest.param(c, marks=pytest.mark.slow) for c in TIMM])
def test_timm_loads_the_folder_by_its_name_alone(case: str, tmp_path: Path) -> None:
    card, model = made(*TIMM[case])
    write_form(tmp_path, card, model, "timm")
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert tuple(loaded.pretrained_cfg["label_names"]) == CLASSES
    assert tuple(timm.data.resolve_model_data_config(loaded)["input_size"][1:]) == card.input.size
    with torch.no_grad():
        torch.testing.assert_close(loaded(images(card)), model(images(card)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", NATIVE)
def test_native_tensors_read_back_are_those_of_timm(case: str) -> None:
    _, model = made(*NATIVE[case][:3])
    native = native_form(model)
    kind = native.config["model_type"]
    assert kind == NATIVE[case][3]
    back, state = rename(native.tensors, Path("x")), model.state_dict()
    # these are sums there, and LayerScale is in the layer before it where ViT has none
    sums = {"cls_token", "reg_token", "pos_embed"} if "reg_token" in state or case == "DeiT III" else set()
    scaled = (".attn.proj.", ".mlp.fc2.") if kind == "vit" and "blocks.0.ls1.gamma" in state else ()
    same = [k for k in state.keys() - sums if not k.startswith("head.") and not any(part in k for part in scaled)]
    same = [k for k in same if ".ls" not in k or kind != "vit"]
    assert len(same) > 20 and all(torch.equal(back[key], state[key]) for key in same)
    if kind != "vit":  # class token and patches side by side, one of them not read
        halves = native.tensors["classifier.weight"].chunk(2, 1)
        own, zeros = halves if getattr(model, "global_pool", "") == "token" else halves[::-1]
        assert torch.equal(own, state["head.weight"]) and not zeros.any()


@pytest.mark.slow
@pytest.mark.parametrize("case", NATIVE)
def test_transformers_own_class_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageClassification

    card, model = made(*NATIVE[case][:3])
    assert write_form(tmp_path, card, model, "hf").native
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.id2label == dict(enumerate(CLASSES)) and loaded.config.model_type == NATIVE[case][3]
    assert AutoConfig.from_pretrained(tmp_path).label2id[CLASSES[2]] == 2
    with torch.no_grad():
        found, wanted = loaded.double()(images(card).double()).logits, model.double()(images(card).double())
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rotary", "five channels", "convolutions", "joined branches"])
def test_what_transformers_has_no_class_for_goes_through_its_wrapper(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    card, model = made(*TIMM[case])
    write_form(tmp_path, card, model, "timm")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    with torch.no_grad():
        torch.testing.assert_close(loaded(images(card)).logits, model(images(card)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("size", [(32, 32), (32, 48)])
def test_timms_transform_of_the_config_gives_our_pixels(mode: Any, size: tuple[int, int]) -> None:
    spec = InputSpec(*size, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), crop_pct=0.9, resize_mode=mode)
    cfg = json.loads(json.dumps(data_config(spec)))
    theirs = timm.data.create_transform(**timm.data.resolve_data_config({}, pretrained_cfg=cfg))
    for width, height in ((40, 31), (97, 64), (33, 214)):
        pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3)).astype(np.uint8)
        image = Image.fromarray(pixels)
        assert torch.equal(theirs(image), eval_transform(spec)(image))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["timm", "hf"])
def test_the_image_processor_gives_our_pixels(format: Any, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    card, model = made("vit_tiny_patch16_224", SMALL, {})
    assert write_form(tmp_path, card, model, format).native is (format == "hf")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 97, 3)).astype(np.uint8))  # odd margins
    found = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt").pixel_values
    assert torch.equal(found[0], eval_transform(card.input)(image))


def test_the_command_writes_a_folder_that_vtk_reads_too(
    shared_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tasks", "merge", str(shared_pack), "--format", "timm", "--out", "pets", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["files"]) == {"README.md", "config.json", "model.safetensors"}
    assert (said["native"], said["verified"]) == (False, ["timm"])
    task, again = load_task(shared_pack), open_source("pets")
    assert (again.kind, again.name, again.card.classes) == ("checkpoint", "pets", task.classes)
    Image.fromarray(np.full((40, 50, 3), 90, np.uint8)).save("photo.jpg")
    blocks = re.findall(r"```python\n(.*?)```", Path("pets/README.md").read_text("utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(blocks[0], found)  # the lines for timm
    with torch.no_grad():
        wanted = task.model(task.transform("photo.jpg").unsqueeze(0))[0]
    assert torch.equal(found["logits"], wanted) and capsys.readouterr().out.strip() in task.classes
    assert main(["tasks", "merge", str(shared_pack), "--format", "timm", "--out", "pets", "--overwrite"]) == 0
    Path("pets/notes.txt").write_text("mine")
    assert main(["tasks", "merge", str(shared_pack), "--format", "timm", "--out", "pets", "--overwrite"]) == 2


def test_what_cannot_be_named_or_written_is_refused_in_one_line(make_pack: Make, tmp_path: Path) -> None:
    card, model = made("vit_tiny_patch16_6x3_224", {"depth": 1}, {})
    with pytest.raises(UsageError, match="3 parallel branches"):
        write_form(tmp_path, card, model, "timm")
    pack = make_pack()
    with pytest.raises(UsageError, match="writes a folder"):
        merge_task(pack, tmp_path / "x.safetensors", format="timm")
    with pytest.raises(UsageError, match="--format timm writes a folder"):
        merge_task(pack, tmp_path / "x")
    with pytest.raises(UsageError, match="format"):
        merge_task(pack, tmp_path / "x", format="onnx")  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="exists"):
        merge_task(pack, tmp_path / "full", format="timm")


def test_nothing_is_written_when_timm_reads_another_model(
    make_pack: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, real = make_pack(), timm.create_model

    def other(name: str, **kwargs: Any) -> nn.Module:
        model = real(name, **kwargs)
        if name.startswith("local-dir:"):
            model.blocks[0].norm1.eps = 0.5
        return model

    monkeypatch.setattr(timm, "create_model", other)
    with pytest.raises(VerificationError, match="logits differ"):
        merge_task(pack, tmp_path / "out", format="timm")
    assert not (tmp_path / "out").exists()


def test_without_transformers_its_form_is_written_and_not_said_to_be_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    card, model = made("vit_tiny_patch16_224", SMALL, {})
    form = write_form(tmp_path, dataclasses.replace(card, multi_label=True), model, "hf")
    assert form.native and form.verified == () and form.reason == ""
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["problem_type"] == "multi_label_classification" and config["id2label"]["2"] == CLASSES[2]
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }


NO_CLASS_TOKEN = {"class_token": False, "global_pool": "avg", "fc_norm": False}


@pytest.mark.parametrize(
    "kwargs", [{"qk_norm": True}, {"pre_norm": True}, {"global_pool": "map"}, NO_CLASS_TOKEN, {"act_layer": "elu"}]
)
def test_parts_that_transformers_classes_lack_are_not_renamed(kwargs: dict[str, Any]) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, **SMALL, **kwargs)
    with pytest.raises(UsageError, match="transformers"):
        native_form(model)

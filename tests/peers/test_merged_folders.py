"""Folders of `vtk tasks merge --format`, loaded by timm and transformers without vtk, from a disk and from a hub."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.peers._hub import serve_repository
from vtk.card import Card
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.models.create import build_model
from vtk.packs.folder_readme import folder_page
from vtk.packs.merged_folder import write_form

pytestmark = pytest.mark.peers

SMALL = {"embed_dim": 48, "num_heads": 2, "depth": 2}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ViT": ("vit_tiny_patch16_224", SMALL, 32),
    "DINOv2": ("vit_small_patch14_dinov2", SMALL, 28),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", SMALL, 28),
    "DINOv3": ("vit_small_patch16_dinov3", SMALL, 32),
    "BEiT": ("beit_base_patch16_224", SMALL, 32),
    "ResNet": ("resnet10t", {}, 64),
}
NATIVE = ("ViT", "DINOv2", "DINOv2 with registers")
HERE = """
import logging, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
from PIL import Image
import torch
"""
BY_TIMM = """
import timm
model = timm.create_model({name!r}, pretrained=True).eval()
assert tuple(model.pretrained_cfg["label_names"]) == ("ant", "bee", "cow")
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.no_grad():
    logits = model(transform(Image.open("photo.png")).unsqueeze(0))[0].numpy()
"""
BY_TRANSFORMERS = """
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained({name!r}).eval()
assert model.config.id2label == {{0: "ant", 1: "bee", 2: "cow"}}
assert type(model).__module__.startswith("transformers.models.timm_wrapper") is not {native}
pixels = AutoImageProcessor.from_pretrained({name!r})(Image.open("photo.png"), return_tensors="pt")
with torch.no_grad():
    logits = model(**pixels).logits[0].numpy()
"""
BOTH = "\nfirst = logits\n"
STACK = "\nlogits = np.stack([first, logits])\n"


def made(kind: str, folder: Path, form: Any) -> np.ndarray:
    """Write a folder of a random model and a photograph; return PyTorch's logits of it."""
    name, kwargs, size = MODELS[kind]
    created = build_model(name, num_classes=3, kwargs=kwargs, pretrained=False, img_size=size)
    torch.manual_seed(1)
    for value in created.model.state_dict().values():
        if value.is_floating_point():
            value += 0.1 * torch.randn_like(value)
    model: nn.Module = created.model.eval()
    card = Card(created.spec, created.input, ("ant", "bee", "cow"))
    folder.mkdir()
    native = write_form(folder, card, model, form).native
    (folder / "README.md").write_text(folder_page(card, folder.name, native=native), "utf-8")
    pixels = np.random.default_rng(0).integers(0, 255, (64, 97, 3)).astype(np.uint8)  # margins of the crop are odd
    Image.fromarray(pixels).save(folder.parent / "photo.png")
    with torch.no_grad():
        return model(eval_transform(card.input)(Image.fromarray(pixels)).unsqueeze(0))[0].numpy()


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(abs(found - wanted).max() / abs(wanted).max())


@pytest.mark.parametrize("kind", MODELS)
def test_timm_and_the_wrapper_of_transformers_load_the_folder(kind, foreign, record, tmp_path):
    wanted = made(kind, tmp_path / "pets", "timm")
    code = BY_TIMM.format(name="local-dir:pets") + BOTH + BY_TRANSFORMERS.format(name="pets", native=False) + STACK
    for tool, found in zip(("timm", "transformers' wrapper of timm"), foreign(HERE + code), strict=True):
        assert off(found, wanted) < 1e-5
        record(tool, f"folder of `--format timm`: {kind}", difference=off(found, wanted))


@pytest.mark.parametrize("kind", NATIVE)
def test_classes_of_transformers_load_the_folder(kind, foreign, record, tmp_path):
    wanted = made(kind, tmp_path / "pets", "hf")
    found = foreign(HERE + BY_TRANSFORMERS.format(name="pets", native=True))
    assert off(found, wanted) < 1e-4
    record("transformers' own classes", f"folder of `--format hf`: {kind}", difference=off(found, wanted))


@pytest.mark.parametrize("form", ["timm", "hf"])
def test_a_repository_of_the_hub_loads_by_its_name(form, foreign, record, tmp_path):
    wanted = made("ViT", tmp_path / "pets", form)
    with serve_repository("me/pets", tmp_path / "pets") as address:
        there = {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        start = HERE.replace('os.environ["HF_HUB_OFFLINE"] = "1"', "")
        own = BY_TRANSFORMERS.format(name="me/pets", native=form == "hf")
        if form == "timm":
            code = BY_TIMM.format(name="hf-hub:me/pets") + BOTH + own + STACK
            tools, found = ("timm", "transformers' wrapper of timm"), foreign(start + code, **there)
        else:
            tools, found = ("transformers' own classes",), foreign(start + own, **there)[None]
        for tool, values in zip(tools, found, strict=True):
            assert off(values, wanted) < 1e-4
            record(
                tool,
                f"repository of `tasks push --format {form}` (a stand-in of the hub)",
                difference=off(values, wanted),
            )


@pytest.mark.parametrize("form", ["timm", "hf"])
def test_the_lines_of_the_page_run(form, foreign, tmp_path):
    wanted = made("ViT", tmp_path / "pets", form)
    Image.open(tmp_path / "photo.png").save(tmp_path / "photo.jpg", quality=100, subsampling=0)
    page = (tmp_path / "pets" / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == (2 if form == "timm" else 1)
    code = "".join(f"{block}\nvalues.append(logits.numpy())\n" for block in blocks)
    for found in foreign(f"{HERE}values = []\n{code}\nlogits = np.stack(values)"):
        assert off(found, wanted) < 0.2  # of a JPEG

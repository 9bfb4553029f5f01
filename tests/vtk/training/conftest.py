"""Tiny models and folders of images."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from tests._plots import not_drawn
from vtk.training.finetune_config import FinetuneConfig


@pytest.fixture
def tiny() -> Callable[..., nn.Module]:
    """Build a two-block ViT of width 32 for 32 px images; further arguments go to timm."""

    def build(name: str = "vit_tiny_patch16_224", **kwargs: object) -> nn.Module:
        torch.manual_seed(0)
        small = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32, "num_classes": 3}
        return timm.create_model(name, **{**small, **kwargs})

    return build


@pytest.fixture
def parallel(tiny: Callable[..., nn.Module]) -> nn.Module:
    """A ViT with three parallel branches per block."""
    return tiny(block_fn=partial(ParallelThingsBlock, num_parallel=3))


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes that differ in colour: 12 training and 5 held-out images each, 20 px."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        for label, name in enumerate(("blue", "green", "red")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (20, 20, 3))
                pixels[..., 2 - label] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture
def config(photos: Path, tmp_path: Path) -> Callable[..., FinetuneConfig]:
    """Build a config for a run of a second or two from random weights."""

    def build(**changes: object) -> FinetuneConfig:
        values: dict[str, object] = {
            "data": photos, "out": tmp_path / "run", "model": "vit_tiny_patch16_224",
            "model_kwargs": ("depth=2", "embed_dim=32", "num_heads=2"), "pretrained": False, "img_size": 32,
            "epochs": 2, "batch_size": 8, "lr": 2e-3, "head_lr_mult": 1.0, "workers": 0, "device": "cpu",
        }  # fmt: skip
        return FinetuneConfig(**{**values, **changes})  # type: ignore[arg-type]

    return build


@pytest.fixture(autouse=True)
def _cheap_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw only where a test asks for the fixture ``plots``: a picture takes longer than these runs."""
    if "plots" not in request.fixturenames:
        for name in ("confusion_png", "curves_png"):
            monkeypatch.setattr(f"vtk.evaluation.result_files.{name}", lambda data, path: path.write_bytes(not_drawn()))


@pytest.fixture
def plots() -> None:
    """Ask for real pictures."""

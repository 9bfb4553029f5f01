"""A trained pack of a tiny model, and images that it was trained and judged on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig

COLOURS = {"blue": 2, "green": 1, "red": 0}


def paint(folder: Path, channel: int, count: int, seed: int) -> None:
    """Write noise with one stronger channel."""
    random = np.random.default_rng([seed, channel])
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = random.integers(0, 160, (20, 20, 3))
        pixels[..., channel] += 5  # hard to tell: accuracies between chance and all
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{seed}-{i}.png")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The pack of a short run, and its images: 16 to train on and 8 held out of each of three classes."""
    root = tmp_path_factory.mktemp("trained")
    for part, count, seed in (("train", 16, 0), ("val", 8, 1)):
        for name, channel in COLOURS.items():
            paint(root / "photos" / part / name, channel, count, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VTK_HOME", str(root / "home"))
        torch.manual_seed(0)
        run = finetune(FinetuneConfig(
            data=root / "photos", out=root / "run", model="vit_tiny_patch16_224", pretrained=False, img_size=32,
            model_kwargs=("depth=2", "embed_dim=96", "num_heads=2"), epochs=4, lr=2e-3, batch_size=16, workers=0,
            device="cpu",
        ))  # fmt: skip
    return run.task, root / "photos"


@pytest.fixture
def pack(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The pack and its images, with the base where the run stored it."""
    monkeypatch.setenv("VTK_HOME", str(trained[0].parent.parent / "home"))
    return trained


Run = Callable[..., dict]

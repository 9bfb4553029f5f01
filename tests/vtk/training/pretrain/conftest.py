"""A folder of unlabelled images, and configs of runs of a second or two."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.training.pretrain.config import PretrainConfig


@pytest.fixture(scope="session")
def heap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 images of 16 px at several depths, and a file that is none."""
    root = tmp_path_factory.mktemp("heap")
    rng = np.random.default_rng(0)
    for i in range(30):
        folder = root / ("", "a", "a/b/c", "other")[i % 4]
        folder.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((16, 16), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    (root / "a" / "broken.jpg").write_bytes(b"no image")
    return root


@pytest.fixture
def pretraining(heap: Path, tmp_path: Path) -> Callable[..., PretrainConfig]:
    """Build a config for a run from random weights: 4×4 patches of 4 px, two blocks of width 16."""

    def build(**changes: object) -> PretrainConfig:
        values: dict[str, object] = {
            "data": heap, "out": tmp_path / "run", "model": "vit_tiny_patch16_224", "img_size": 16,
            "model_kwargs": ("patch_size=4", "depth=2", "embed_dim=16", "num_heads=2"), "epochs": 2, "batch_size": 8,
            "workers": 0, "device": "cpu", "method": "simmim",
        }  # fmt: skip
        values |= {
            "mae": {"decoder_depth": 1}, "beit": {"codes": 16, "code_dim": 4, "tokenizer_epochs": 2},
        }.get(str(changes.get("method")), {})  # fmt: skip
        return PretrainConfig(**{**values, **changes})  # type: ignore[arg-type]

    return build


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the picture of a run out: it takes longer than these runs."""
    monkeypatch.setattr("vtk.training.pretrain.reconstruction_plots.draw", lambda columns, titles, spec, path: None)

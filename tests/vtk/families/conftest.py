"""Twelve images in three classes, and a run of one epoch on them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests._plots import not_drawn
from tests.vtk.families._table import Family
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs.pack_writer import PackWriter
from vtk.training.runs.run import open_run
from vtk.training.runs.task import Task


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four training and two held-out images of each class, 40 px."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("blue", "green", "red")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 150, (40, 40, 3))
                pixels[..., 2 - label] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture
def train(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Task]:
    """Train attention for one epoch; return the task, whose model is as the pack should be."""
    for name in ("confusion_png", "curves_png"):
        monkeypatch.setattr(f"vtk.evaluation.result_files.{name}", lambda data, path: path.write_bytes(not_drawn()))

    def fine_tune(family: Family, **changes: object) -> Task:
        torch.manual_seed(0)
        values: dict[str, object] = {
            "data": pictures, "out": tmp_path / family.name, "model": family.name, "model_kwargs": family.flags,
            "img_size": family.size, "pretrained": False, "epochs": 1, "batch_size": 4, "workers": 0, "device": "cpu",
            "lr": 1e-2, "warmup": 0,
        }  # fmt: skip
        config = FinetuneConfig(**{**values, **changes})  # type: ignore[arg-type]
        with open_run(config, PackWriter) as run:
            run.go()
        return run.task.task

    return fine_tune

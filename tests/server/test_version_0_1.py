"""Repositories that version 0.1 wrote, in the real server: its files, on this version's toolkit."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.packs.cards import read_card

pytestmark = pytest.mark.server

MADE = Path(__file__).resolve().parents[1] / "fixtures" / "v0_1"
RECORDED = json.loads((MADE / "logits.json").read_text())
LABELS = {"digits": ("one", "two", "zero"), "parity": ("even", "odd")}


@pytest.fixture(scope="module")
def server(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("v0_1")
    for backend, model in (("python", "many"), ("vtk", "bank"), ("onnxruntime", "digits")):
        shutil.copytree(MADE / "repositories" / backend / model, root / "models" / model)
    started = tools.Server(root / "models", root)
    try:
        yield started
    finally:
        started.stop()


@pytest.mark.parametrize("model", ["many", "bank"])
@pytest.mark.parametrize("task", LABELS)
def test_the_logits_are_those_of_then(server: Any, tools: Any, model: str, task: str) -> None:
    server.wait(model)
    transform = eval_transform(read_card(MADE / "runs" / task / "task").input)
    images = torch.stack([transform(load_image(MADE / name)) for name in RECORDED["images"]]).numpy()
    wanted = np.array(RECORDED["logits"][f"runs/{task}"], np.float32)
    with server.client() as client:
        found = tools.infer(client, model, images, [task] * len(images))
    np.testing.assert_allclose(found["logits"][:, : wanted.shape[1]], wanted, atol=1e-5, rtol=0)
    assert [label.decode() for label in found["label"][:, 0]] == [LABELS[task][i] for i in wanted.argmax(1)]

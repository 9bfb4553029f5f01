"""What a run and `vtk tasks calibrate` write into a card, and what eval says of a threshold."""

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.__main__ import main
from vtk.calibration import Calibration
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.packs.pack import update_card
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig


@pytest.fixture(scope="module")
def more_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that are hard to tell apart: 12 training and 20 held-out images each, 20 px."""
    root = tmp_path_factory.mktemp("more")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 20)):
        for label, name in enumerate(("dark", "light")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 200, (20, 20, 3)) + 10 * label + rng.integers(0, 40)
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root


def answers(pack: Path, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities at temperature 1 and labels of the held-out images, by the pack alone."""
    task = load_task(pack)
    paths = sorted((data / "val").rglob("*.png"))
    with torch.no_grad():
        logits = task.model(torch.stack([task.transform(path) for path in paths])).double()
    labels = np.array([task.classes.index(path.parent.name) for path in paths])
    return logits.numpy(), labels


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_run_writes_what_its_packs_answer(
    config: Callable[..., FinetuneConfig], more_photos: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    result = finetune(config(data=more_photos, pack_dtype=dtype))
    for pack in (result.task, result.task_last):
        found = read_card(pack).calibration
        assert found is not None and found.count == found.judged == 20 and found.scored == 40
        logits, labels = answers(pack, more_photos)
        hot = logits / found.temperature
        shares = np.exp(hot - hot.max(1, keepdims=True))
        score = (shares / shares.sum(1, keepdims=True)).max(1)
        wrong = logits.argmax(1) != labels
        assert found.accepted[-1] == 40 and found.errors[-1] == wrong.sum()
        for at, accepted, errors in zip(found.scores, found.accepted, found.errors, strict=True):
            assert abs(int((score >= at).sum()) - accepted) <= 1 and abs(int(wrong[score >= at].sum()) - errors) <= 1
    assert "probabilities" in capsys.readouterr().out
    before = json.loads((result.task / "task.json").read_text())
    assert main(["tasks", "calibrate", str(result.task), "--data", str(more_photos)]) == 0
    after = json.loads((result.task / "task.json").read_text())
    assert after == before  # the same images, halves and numbers


def test_eval_counts_unknown_images(
    config: Callable[..., FinetuneConfig],
    more_photos: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plots: None,
) -> None:
    result = finetune(config(data=more_photos, epochs=1))
    logits, labels = answers(result.task, more_photos)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    score = (shares / shares.sum(1, keepdims=True)).max(1)
    at = float(np.sort(score)[13:15].mean())
    card = read_card(result.task)
    table: dict[str, Any] = {"scored": 400, "scores": (at, 0.0), "accepted": (200, 400), "errors": (0, 200)}
    fitted = Calibration(1.0, 20, 20, 0.7, 0.7, 0.1, 0.1, 0.1, **table)
    update_card(result.task, dataclasses.replace(card, calibration=fitted))
    capsys.readouterr()
    argv = ["eval", str(result.task), str(more_photos), "--threshold", "auto", "--out", str(tmp_path / "e")]
    assert main(argv) == 0
    kept, wrong = score >= at, (logits.argmax(1) != labels) & (score >= at)
    found = json.loads((tmp_path / "e" / "metrics.json").read_text())
    assert found["abstained"]["answered"] == kept.sum() == 26
    assert found["abstained"]["error"] == pytest.approx(wrong.sum() / 26)
    assert found["top1"] == pytest.approx((logits.argmax(1) == labels).mean())
    with (tmp_path / "e" / "per_class.csv").open() as file:
        unknown = [int(row["unknown"]) for row in csv.DictReader(file)]
    assert unknown == [int((~kept & (labels == c)).sum()) for c in (0, 1)]
    said = capsys.readouterr()
    assert "answered: 65.0 % of 40 images" in said.out + said.err
    # half of the answers are wrong, which chance does not make of 2 %
    assert (wrong.sum() < 4) or "chance does not explain" in said.out + said.err


def test_few_images_and_several_labels_get_none(config: Callable[..., FinetuneConfig], photos: Path) -> None:
    assert read_card(finetune(config(epochs=1)).task).calibration is None  # 15 held-out images

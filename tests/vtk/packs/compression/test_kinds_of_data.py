"""``vtk tasks compress`` on several labels, unequal classes, and runs that split a flat folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.__main__ import main
from vtk.packs.cards import read_card
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "model": "vit_tiny_patch16_224", "pretrained": False, "img_size": 32, "lr": 2e-3, "batch_size": 16, "workers": 0,
    "model_kwargs": ("depth=1", "embed_dim=48", "num_heads=2"), "device": "cpu",
}  # fmt: skip


@pytest.fixture
def compress(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    def run(*words: object) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        code = main(
            ["tasks", "compress", *map(str, words), "--out", str(tmp_path / "small"), "--workers", "0", "--json"]
        )
        said = capsys.readouterr()
        return code, json.loads(said.out), " ".join(said.err.split())

    return run


def save(path: Path, channels: tuple[int, ...], random: np.random.Generator) -> None:
    pixels = random.integers(0, 120, (20, 20, 3))
    for channel in channels:
        pixels[..., channel] += 120
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def test_packs_of_several_labels_are_compared_by_map(compress: Any, tmp_path: Path) -> None:
    random, lines = np.random.default_rng(0), ["path,labels"]
    for i in range(60):
        chosen = tuple(c for c in range(3) if random.random() < 0.4)
        save(tmp_path / "photos" / f"{i}.png", chosen, random)
        lines.append(f"{i}.png,{';'.join('rgb'[c] for c in chosen)}")
    (tmp_path / "photos" / "labels.csv").write_text("\n".join(lines) + "\n")
    torch.manual_seed(0)
    run = finetune(
        FinetuneConfig(
            data=tmp_path / "photos", out=tmp_path / "run", multi_label=True, epochs=2, val_split=0.4, **SMALL
        )
    )
    code, found, said = compress(run.task, "--data", tmp_path / "photos")
    assert code == 0 and found["judged"]["metric"] == "mAP" and "mAP" in said
    held = read_card(run.task).metrics["count"]
    assert len(found["choosing"]) + len(found["judging"]) == held
    assert found["weighed"]["images"] == 60 - held
    assert read_card(tmp_path / "small").metrics["mAP"] == pytest.approx(read_card(run.task).metrics["mAP"], abs=0.2)
    code, _, said = compress(run.task, "--data", tmp_path / "photos", "--metric", "top1", "--overwrite")
    assert code == 2 and "`--metric` top1 is not one of this pack's labels; give mAP" in said


def test_a_flat_folder_is_divided_as_the_run_did_and_rare_classes_are_shared_out(compress: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, channel, count in (("many", 0, 40), ("few", 1, 10), ("rare", 2, 2)):
        for i in range(count):
            save(tmp_path / "photos" / name / f"{i}.png", (channel,), random)
    torch.manual_seed(0)
    run = finetune(FinetuneConfig(data=tmp_path / "photos", out=tmp_path / "run", epochs=2, val_split=0.4, **SMALL))
    code, found, _ = compress(run.task, "--data", tmp_path / "photos", "--metric", "balanced_accuracy", "--seed", 3)
    held = read_card(run.task).metrics["count"]
    assert code == 0 and len(found["choosing"]) + len(found["judging"]) == held
    assert found["weighed"]["images"] == 52 - held and found["judged"]["metric"] == "balanced_accuracy"
    rare = sum("/rare/" in path for path in (*found["choosing"], *found["judging"]))
    judging = sum("/rare/" in path for path in found["judging"])
    assert rare == 1 and found["judged"]["absent"] == ([] if judging else ["rare"])

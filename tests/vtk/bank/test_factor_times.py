"""Times of calls with factors on a CPU, as ratios in one run: against fused models, merged weights, and idle tasks."""

import copy
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from vtk.bank import TaskBank
from vtk.bank.bench import in_turns
from vtk.fused import fuse
from vtk.models.create import build_model
from vtk.packs import load_task
from vtk.packs.synthetic import write_synthetic

pytestmark = [pytest.mark.slow, pytest.mark.timing]


def ratios(sides: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the median over rounds of each side's time by that of the last."""
    with torch.no_grad():
        found = in_turns(sides, lambda: None, rounds)
    *_, last = found.values()
    return {name: statistics.median(a / b for a, b in zip(times, last, strict=True)) for name, times in found.items()}


def packs(tmp_path: Path, **kwargs: Any) -> tuple[Path, Path]:
    """Return a base, and a pack of rank 16 on it."""
    model = "vit_small_patch16_224"
    torch.manual_seed(0)
    save_file(timm.create_model(model, **kwargs).state_dict(), tmp_path / "base.safetensors")
    created = build_model(model, num_classes=10, weights=tmp_path / "base.safetensors", kwargs=kwargs)
    return tmp_path / "base.safetensors", write_synthetic(tmp_path / "pack", created, rank=16)


def test_sixteen_tasks_in_one_call_and_one_task(tmp_path: Path) -> None:
    base, pack = packs(tmp_path)  # all blocks: a fused model of one task needs no keys and values in the last one
    task = load_task(pack, base=base)
    bank, merged = TaskBank(base), TaskBank(base)
    for i in range(16):
        bank.add(str(i), pack)
    merged.add("0", dataclasses.replace(task, factors={}, model=copy.deepcopy(task.model)))
    single, images = fuse(task.model, torch.float32), torch.randn(16, 3, 224, 224)
    mixed = {str(i): images[i : i + 1] for i in range(16)}
    found = ratios({"mixed": lambda: bank(mixed), "fused": lambda: single(images)}, 5)
    assert found["mixed"] <= 1.2
    found = ratios({"factors": lambda: bank({"0": images}), "merged": lambda: merged({"0": images})}, 5)
    assert found["factors"] <= 1.03  # noise; a sum of base and change is made for so many rows


def test_a_thousand_idle_tasks(tmp_path: Path) -> None:
    base, pack = packs(tmp_path, depth=1)
    few, many = TaskBank(base), TaskBank(base)
    for i in range(1000):
        many.add(str(i), pack)
        if i < 10:
            few.add(str(i), pack)
    images = {str(i): torch.randn(1, 3, 224, 224) for i in range(4)}
    assert ratios({"many": lambda: many(images), "few": lambda: few(images)}, 21)["many"] <= 1.05

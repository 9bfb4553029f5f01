"""Trains the base and the two classifiers of the examples, and checks that their packs share its FFN."""

from collections.abc import Mapping
from pathlib import Path

import torch

import vtk

MODEL = "vit_tiny_patch16_224"


def train_base(data: Path, out: Path, **flags: object) -> Path:
    """Train a whole small ViT from random weights on class folders, and return it as a file of base weights."""
    config = {"model": MODEL, "train": "full", "pretrained": False, "head_lr_mult": 1.0, "lr": 1e-3, "out": out}
    run = vtk.finetune(vtk.FinetuneConfig(data=data, **{**config, **flags}))  # type: ignore[arg-type]
    weights = out.with_suffix(".safetensors")
    vtk.merge_task(run.task, weights, overwrite=True)
    return weights


def train_classifier(data: Path, out: Path, weights: Path, **flags: object) -> Path:
    """Fine-tune the attention of the base on class folders, and return the pack."""
    config = {"model": MODEL, "train": "attn", "weights": weights, "lr": 5e-4, "out": out}
    return vtk.finetune(vtk.FinetuneConfig(data=data, **{**config, **flags})).task  # type: ignore[arg-type]


def check_shared(packs: Mapping[str, Path]) -> int:
    """Compare the FFN tensors of packs, bit by bit, and say how many there are.

    Raises:
        AssertionError: a tensor differs.
    """
    models = {name: vtk.load_task(path).model.state_dict() for name, path in packs.items()}
    first, *others = models
    names = [name for name in models[first] if ".mlp." in name]
    for other in others:
        differ = [name for name in names if not torch.equal(models[first][name], models[other][name])]
        assert not differ, f"{first} and {other} differ in {differ[0]}"
    carried = {name: vtk.load_task(path).carried for name, path in packs.items()}
    assert not any(set(names) & held for held in carried.values())
    numbers = sum(models[first][name].numel() for name in names)
    print(f"{', '.join(packs)}: the same {len(names)} FFN tensors ({numbers:,} weights), in the base once, in no pack")
    return len(names)

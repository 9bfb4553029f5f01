"""Serves two tasks of different image sizes from one base in memory: ``python examples/many_tasks/main.py``."""

import sys
from pathlib import Path

import torch

import vtk
from vtk.data.digits import write_digits

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/many_tasks")
MODEL = {
    "model": "vit_tiny_patch16_224",
    "model_kwargs": ("patch_size=8", "embed_dim=96", "depth=3", "num_heads=3"),  # small enough for a minute on a CPU
    "crop_scale": (0.8, 1.0),
    "workers": 0,
    "device": "cpu",
}
digits = write_digits(OUT / "data" / "digits", "digits")
odd_even = write_digits(OUT / "data" / "odd_even", "parity")

# 1. A base. Usually this is a pretrained model of timm; offline, one is trained here on the ten digits.
config = vtk.FinetuneConfig(
    data=digits, out=OUT / "base", img_size=32, train="full", pretrained=False, epochs=6, lr=1e-3, head_lr_mult=1.0,
    **MODEL,
)  # fmt: skip
weights = OUT / "base.safetensors"
vtk.merge_task(vtk.finetune(config).task, weights)

# 2. Two tasks on it in one run, each with attention, position embedding and head of its own.
tasks = (f"digits={digits}@32", f"odd_even={odd_even}@48")
config = vtk.FinetuneConfig(tasks=tasks, out=OUT / "both", train="attn", weights=weights, epochs=3, lr=1e-3, **MODEL)
runs = vtk.finetune_tasks(config).tasks

# 3. One bank: the base is in memory once, and images of both tasks go through it in one call.
bank = vtk.TaskBank(device="cpu")
packs = {name: vtk.load_task(run.task) for name, run in runs.items()}
for name, run in runs.items():
    bank.add(name, run.task)
images = {
    name: torch.stack([packs[name].transform(path) for path in sorted((data / "val").rglob("*.png"))[::60]])
    for name, data in (("digits", digits), ("odd_even", odd_even))
}
logits = bank(images)
for name, rows in logits.items():
    labels = [bank.tasks[name].classes[int(row.argmax())] for row in rows]
    with torch.no_grad():
        alone = packs[name].model(images[name])
    print(f"{name}: top-1 {runs[name].top1:.1%}; {tuple(images[name].shape[2:])} px: {', '.join(labels)}")
    print(f"{name}: largest difference from its own model {float((rows - alone).abs().max()):.1e}")

# 4. What sharing saves.
memory = bank.memory()
own = {name: f"{task.bytes:,}" for name, task in memory.tasks.items()}
print(f"bytes in memory: base {memory.base_bytes:,}, each task adds {own}")

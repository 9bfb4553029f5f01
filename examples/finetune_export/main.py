"""Fine-tunes a ViT by its attention weights and exports it to ONNX: ``python examples/finetune_export/main.py``."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

import vtk
from vtk.data.digits import write_digits

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/finetune_export")
MODEL = {
    "model": "vit_tiny_patch16_224",
    "model_kwargs": ("patch_size=8", "embed_dim=96", "depth=3", "num_heads=3"),  # small enough for a minute on a CPU
    "img_size": 32,
    "crop_scale": (0.8, 1.0),
    "workers": 0,
    "device": "cpu",
}

# 1. A base. Usually this is a pretrained model of timm; offline, one is trained here to tell odd digits from even ones.
odd_even = write_digits(OUT / "data" / "odd_even", "parity")
config = vtk.FinetuneConfig(
    data=odd_even, out=OUT / "base", train="full", pretrained=False, epochs=6, lr=1e-3, head_lr_mult=1.0, **MODEL
)
base = vtk.finetune(config)
weights = OUT / "base.safetensors"
vtk.merge_task(base.task, weights)

# 2. The task: the ten digits. Only attention, position embedding and head are trained.
digits = write_digits(OUT / "data" / "digits", "digits")
config = vtk.FinetuneConfig(data=digits, out=OUT / "digits", train="attn", weights=weights, epochs=5, lr=1e-3, **MODEL)
run = vtk.finetune(config)
print(
    f"base {base.top1:.1%}, digits {run.top1:.1%}; {run.census.trained / run.census.total:.1%} of the weights trained"
)

# 3. The ONNX file, which is kept only if it agrees with PyTorch at five batch sizes.
exported = vtk.export_onnx(run.task, vtk.OnnxConfig(out=OUT / "onnx", data=digits))
print(f"largest error at {len(exported.rows)} batch sizes: {max(row.error for row in exported.rows):.1e}")

# 4. ONNX Runtime without vtk's runtime, on held-out images.
task = vtk.load_task(run.task)
images = sorted((digits / "val").rglob("*.png"))[::40]
batch = np.stack([task.transform(image).numpy() for image in images])
session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
(logits,) = session.run(["logits"], {"pixel_values": batch})
for image, row in zip(images, logits, strict=True):
    print(f"{image.relative_to(digits)}: {task.classes[row.argmax()]}")

# 5. Latency of that file per batch size.
profile = vtk.profile(exported.path, vtk.ProfileConfig(batch_sizes=(1, 8), duration=0.5, threads=1))
for cell in profile.backends[0].cells:
    print(f"batch {cell.batch}: {cell.mean_ms:.2f} ms, {cell.images_per_second:.0f} images/s")

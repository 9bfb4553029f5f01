"""Asks why a model behaves as it does, follows the advice, and compares: ``python examples/why/main.py``."""

import sys
from pathlib import Path

import vtk
from vtk.data.digits import write_digits

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/why")
digits = write_digits(OUT / "data", "digits")


def train(name: str, **options: float) -> Path:
    """Train a small ViT on the ten digits from random weights, and return its pack."""
    config = vtk.FinetuneConfig(
        data=digits, out=OUT / name, train="full", pretrained=False, model="vit_tiny_patch16_224",
        model_kwargs=("patch_size=8", "embed_dim=96", "depth=3", "num_heads=3"), img_size=32, epochs=6, lr=1e-3,
        head_lr_mult=1.0, crop_scale=(0.8, 1.0), workers=0, device="cpu", **options,
    )  # fmt: skip
    return vtk.finetune(config).task


# 1. Two diagnostics of a model trained with the default label smoothing of 0.1. The report says what to change.
looked = ("calibration", "occlusion")
config = vtk.AnalyzeConfig(data=digits, what=looked, max_images=359, device="cpu", out=OUT / "report")
first = vtk.analyze(train("smoothing-0.1"), config).analyses[0]

# 2. It is under-confident: train without label smoothing, as the report suggests, and compare with the first report.
config = vtk.AnalyzeConfig(data=digits, what=looked, max_images=359, device="cpu", out=OUT / "compared")
second = vtk.analyze(OUT / "report", config, against=train("smoothing-0", smoothing=0.0)).analyses[1]
for name, found in (("smoothing 0.1", first), ("smoothing 0", second)):
    result = found.results["calibration"]
    print(f"{name}: accuracy {result['accuracy']:.1%}, confidence {result['confidence']:.1%}, ECE {result['ece']:.1%}")

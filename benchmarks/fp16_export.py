"""Which architectures of timm export to fp16 and pass the gate: one row each of ``results/fp16_export.csv``.

    python benchmarks/fp16_export.py vit_small_patch16_dinov3 eva02_small_patch14_224

Architectures are whole, with random weights far from timm's zeros, and ten classes. The file is fused where that can be
and runs in ONNX Runtime on the CPU at the gate's batch sizes. A row has the largest error of a logit against torch in
fp32. One that fails is said so and leaves no row; docs/reference/architectures.md shows the last row of each.
"""

import argparse
import tempfile
from pathlib import Path

import _rows
import timm
import torch

from vtk import console
from vtk.errors import VtkError
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx


def subject(name: str) -> torch.nn.Module:
    """Return an architecture of ten classes whose LayerScales, biases and tables are not what they start from."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10)
    for key, p in model.named_parameters():
        if "gamma" in key:
            torch.nn.init.normal_(p, 0.5, 0.1)
        elif p.ndim == 1 or not p.any():
            p.data.add_(torch.randn_like(p), alpha=0.1)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "fp16_export.csv")
    args = parser.parse_args()
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = export_onnx(subject(name), OnnxConfig(out=Path(folder) / "out", dtype="fp16"), show=False)
            except VtkError as error:
                console.say(f"{name}: {error}")
                continue
        worst = max(max(row.error, row.error_plain) for row in found.rows)
        row = {"model": name, "error": f"{worst:.1e}", "fused": found.fused, "nodes": found.nodes}
        _rows.append(args.results, {**row, **_rows.context()})
        console.say(f"{name}: {row}")


if __name__ == "__main__":
    main()

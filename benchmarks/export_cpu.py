"""Our ONNX files of a ViT-S/16 in ONNX Runtime on a CPU: against torch's own export, and int8 against fp32.

    python benchmarks/export_cpu.py
    python benchmarks/export_cpu.py --threads 1 --also optimum=OPTIMUM/model.onnx

Files are fused, as is the exporter's default, but for those called plain (``--no-fuse``). ``--also`` adds files of
other exporters, whatever they call their input.

Weights are random: they do not change how long a product takes. Files run in turns, round by round; the ratio is the
median over rounds. Bytes are those of the files. Written to ``results/export_cpu.csv``.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import _rows
import numpy as np
import torch
from fused_cpu import OPSET, in_turns
from PIL import Image

from vtk import console
from vtk.runtime import open_source
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx

NAME = "vit_small_patch16_224"
COMPARED = (  # side, of which, bound of the time at batch 1 and 8, bound of the bytes
    ("fp32", "torch.onnx", ("<= 1.03", "<= 1.03"), ""),
    ("fp32, plain", "torch.onnx", ("<= 1.03", "<= 1.03"), ""),
    ("int8 dynamic", "fp32", ("<= 0.70", ""), "<= 0.29"),
    ("int8 dynamic, plain", "fp32, plain", ("<= 0.70", ""), "<= 0.29"),
    ("int8 static", "fp32", ("<= 0.85", ""), "<= 0.29"),
)
SIDES = {side for pair in COMPARED for side in pair[:2]}


def photographs(folder: Path, count: int) -> Path:
    """Write smooth pictures to calibrate on."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for i in range(count):
        small = Image.fromarray(random.integers(0, 256, (7, 7, 3), dtype=np.uint8))
        small.resize((224, 224), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return folder


def export(folder: Path) -> dict[str, Path]:
    """Return every side's file."""
    # of a random classifier few classes are far enough apart for the gate on pictures
    source = open_source(NAME, pretrained=False, num_classes=2)
    data = photographs(folder / "images", 32)
    files = {"torch.onnx": folder / "torch.onnx"}
    torch.onnx.export(
        source.model(), (torch.zeros(2, 3, 224, 224),), files["torch.onnx"], dynamo=True, opset_version=OPSET,
        input_names=["pixel_values"], output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False, verbose=False,
    )  # fmt: skip
    options = {
        "fp32": {}, "fp32, plain": {"fuse": False}, "int8 dynamic": {"int8": "dynamic"},
        "int8 dynamic, plain": {"int8": "dynamic", "fuse": False}, "int8 static": {"int8": "static"},
    }  # fmt: skip
    for i, (side, how) in enumerate(options.items()):
        config = OnnxConfig(out=folder / str(i), opset=OPSET, data=data, **how)  # type: ignore[arg-type]
        files[side] = export_onnx(source, config, show=False).path
    return files


def measure(files: dict[str, Path], batches: Sequence[int], rounds: int, threads: int) -> list[dict[str, object]]:
    """Run all files in turns."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # threads of the sessions that ran before would spin for work in the time of the one that is measured
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    run = partial(onnxruntime.InferenceSession, sess_options=options, providers=["CPUExecutionProvider"])
    sessions = {side: run(path) for side, path in files.items()}
    rows: list[dict[str, object]] = []
    compared = (*COMPARED, *((side, "torch.onnx", ("", ""), "") for side in files.keys() - SIDES))
    for side, other, _, bound in compared:
        size, of = (files[s].stat().st_size for s in (side, other))
        rows.append({"comparison": "bytes", "batch": "", "side": side, "of": other, "value": size, "unit": "bytes",
                     "ratio": round(size / of, 3), "bound": bound, "rounds": 1})  # fmt: skip
    for i, batch in enumerate(batches):
        images = torch.randn(batch, 3, 224, 224).numpy()
        times = in_turns(
            {side: partial(s.run, None, {s.get_inputs()[0].name: images}) for side, s in sessions.items()}, rounds
        )
        for side, other, bounds, _ in compared:
            ratio = statistics.median(a / b for a, b in zip(times[side], times[other], strict=True))
            rows.append({"comparison": "time of a run", "batch": batch, "side": side, "of": other,
                         "value": round(statistics.median(times[side]), 2), "unit": "ms",
                         "ratio": round(ratio, 3), "bound": bounds[i], "rounds": rounds})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "export_cpu.csv")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=FILE", help="another exporter's file")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if not args.skip_tests:
        _rows.require_green(["tests/export/onnx/test_export.py", "tests/export/test_quantize.py"])
    threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        files = export(Path(folder))
        files |= {name: Path(path) for name, _, path in (also.partition("=") for also in args.also)}
        rows = measure(files, (1, 8), args.rounds, threads)
    for found in rows:
        _rows.append(args.results, {"model": NAME, **found, **_rows.context()})
    shown = [
        tuple(r[k] for k in ("comparison", "batch", "side", "of", "value", "unit", "ratio", "bound")) for r in rows
    ]
    columns = ("compared", "batch", "file", "of", "value", "unit", "ratio", "bound")
    console.table(f"{NAME} in ONNX Runtime, {threads} threads", columns, shown, left=(0, 2, 3, 5))


if __name__ == "__main__":
    main()

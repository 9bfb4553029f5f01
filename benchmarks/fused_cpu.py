"""The fused model on a CPU: against timm's parallel model and sequential twin, and its ONNX file against the unmerged.

    python benchmarks/fused_cpu.py

All sides of a comparison run in turns, round by round, so that a change of the machine's speed meets them all; outputs
are compared first. The ratio is the median over rounds against the better of timm's two. Written to
``results/fused_cpu.csv``.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import _rows
import torch
from _models import Model
from _runner import relative_error
from torch import Tensor

CPU = torch.device("cpu")
OPSET = 18
PAIRS = {
    "S18x2": (Model("vit_small_patch16_36x1_224"), Model("vit_small_patch16_18x2_224")),
    # pooling by mean: with a class token the last of two blocks would be half pruned, and no block measured
    "two blocks of B18x2": (
        Model("vit_base_patch16_224", {"depth": 4, "init_values": 1e-5, "global_pool": "avg"}),
        Model("vit_base_patch16_18x2_224", {"depth": 2, "global_pool": "avg"}),
    ),
}
"""Sequential twin and parallel model."""

SIDES = ("sequential", "parallel", "fused")
CASES = (("S18x2", 1, ">= 1.12"), ("S18x2", 8, ">= 0.97"), ("two blocks of B18x2", 8, ">= 0.97"))


def in_turns(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return milliseconds per side and round; one round before warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            if i:
                found[name].append(1e3 * (time.perf_counter() - start))
    return found


def row(comparison: str, case: str, times: Mapping[str, list[float]], ratio: float, bound: str) -> dict[str, object]:
    """Return one row; a side that a comparison does not have stays empty."""
    sides = {
        n: round(statistics.median(times[n]), 2) if n in times else None for n in ("sequential", "parallel", "fused")
    }
    rounds = len(times["fused"])
    return {"comparison": comparison, "case": case, **sides, "unit": "ms", "ratio": round(ratio, 3), "bound": bound,
            "rounds": rounds}  # fmt: skip


def against_timm(name: str, batch: int, bound: str, rounds: int, smoke: bool) -> dict[str, object]:
    """Time the fused model and timm's two."""
    from vtk.fused import fuse

    sequential, parallel = (m.build(device=CPU, smoke=smoke) for m in PAIRS[name])
    fused = fuse(parallel)
    size = 32 if smoke else 224
    images = torch.randn(batch, 3, size, size)
    models = {"sequential": sequential, "parallel": parallel, "fused": fused}
    with torch.no_grad():
        compare(fused(images), parallel(images), name)
        times = in_turns({n: partial(m, images) for n, m in models.items()}, rounds)
    better = min(("sequential", "parallel"), key=lambda n: statistics.median(times[n]))
    ratio = statistics.median(a / b for a, b in zip(times[better], times["fused"], strict=True))
    return row("timm / fused, time of a forward pass", f"{name}, batch {batch}", times, ratio, bound)


def compare(found: Tensor, wanted: Tensor, what: str) -> None:
    """Refuse to time what computes something else."""
    error = relative_error([found], [wanted])
    if not error <= 1e-4:
        sys.exit(f"{what}: the outputs differ by {error:.1e}; nothing was timed")


def exported(fused: bool, folder: Path, name: str) -> Path:
    """Export a random model, verified, and return the file."""
    from vtk.runtime.opening import open_source
    from vtk_export.onnx.config import OnnxConfig
    from vtk_export.onnx.export import export_onnx

    out = folder / ("fused" if fused else "parallel")
    config = OnnxConfig(out=out, opset=OPSET, fuse=fused)
    return export_onnx(open_source(name, pretrained=False), config, show=False).path


def onnx_latency(batches: Sequence[int], rounds: int, threads: int, smoke: bool) -> list[dict[str, object]]:
    """Time the fused and the unmerged ONNX file in ONNX Runtime."""
    import onnxruntime

    name = "vit_small_patch16_18x2_224"
    if smoke:
        return []  # a tiny model has no name to export it by; tests/export covers the exporter
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sessions = {
            side: onnxruntime.InferenceSession(
                exported(side == "fused", Path(folder), name), options, providers=["CPUExecutionProvider"]
            )
            for side in ("parallel", "fused")
        }
        for batch in batches:
            feed = {"pixel_values": torch.randn(batch, 3, 224, 224).numpy()}
            outputs = [torch.from_numpy(s.run(None, feed)[0]) for s in sessions.values()]
            compare(outputs[1], outputs[0], "ONNX")
            times = in_turns({side: partial(s.run, None, feed) for side, s in sessions.items()}, rounds)
            ratio = statistics.median(a / b for a, b in zip(times["fused"], times["parallel"], strict=True))
            rows.append(row("fused / unmerged ONNX in ONNX Runtime, time of a run", f"S18x2, batch {batch}", times,
                            ratio, "<= 0.92"))  # fmt: skip
    return rows


def onnx_nodes() -> dict[str, object]:
    """Count the nodes of two blocks: those of a model of four less those of a model of two."""
    from vtk.card import InputSpec
    from vtk_export.graph.convert import convert, export_form

    def nodes(depth: int, fused: bool) -> int:
        kwargs = {"depth": depth, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
        model = Model("vit_small_patch16_18x2_224", kwargs).build(32, device=CPU)
        graph = convert(export_form(model) if fused else model, InputSpec(32, 32), opset=OPSET).graph
        return len(graph.node)

    unmerged, merged = (nodes(4, fused) - nodes(2, fused) for fused in (False, True))
    return {
        "comparison": "fused / unmerged ONNX, nodes", "case": "two blocks of S18x2", "sequential": None,
        "parallel": unmerged, "fused": merged, "unit": "nodes", "ratio": round(merged / unmerged, 3),
        "bound": "<= 80 nodes", "rounds": 1,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "fused_cpu.csv")
    parser.add_argument("--smoke", action="store_true", help="tiny models, one round; writes nothing")
    args = parser.parse_args(argv)
    if not args.smoke:
        if args.rounds < 7:
            parser.error(f"`--rounds` is {args.rounds}; a median needs at least 7")
        _rows.require_green(["tests/vtk/fused", "tests/export/onnx/test_export.py"])
    threads = args.threads or int(_rows.cpu_name().rpartition(",")[2].split()[0])
    torch.set_num_threads(threads)
    rounds = 1 if args.smoke else args.rounds
    rows = [against_timm(name, batch, bound, rounds, args.smoke) for name, batch, bound in CASES]
    rows += [onnx_nodes(), *onnx_latency((1, 8), rounds, threads, args.smoke)]
    for found in rows:
        print("  ".join(str(v) for v in found.values() if v is not None), flush=True)
        if not args.smoke:
            _rows.append(args.results, {**found, **_rows.context()})
    return 0


if __name__ == "__main__":
    sys.exit(main())

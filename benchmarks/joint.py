"""Several tasks in one run against a run of each: held-out accuracy and the peak memory of the process.

    python benchmarks/joint.py --task a=FOLDER --task b=FOLDER@SIZE --weights FILE --model NAME

Each run is a process of its own, loads images itself (no workers), and its peak is what the system counted. Together
they may take the peak of the first task alone, and of every other its trained weights, gradients, optimiser state and
activations; accuracy may differ by 0.01 from the task's own run. Written to ``results/joint.csv``.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _rows

from vtk import console

ACCURACY = 0.01


def run(flags: list[str]) -> tuple[dict[str, Any], int]:
    """Run ``vtk finetune`` in a process; return what it printed and its peak of resident bytes.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, str(_rows.REPO / "cli.py"), "finetune", *flags, "--json"]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{' '.join(command)} failed")
        out.seek(0)
        return json.loads(out.read()), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", action="append", required=True, help="NAME=FOLDER or NAME=FOLDER@SIZE")
    parser.add_argument("--weights")
    parser.add_argument("--model", default="vit_small_patch14_dinov2")
    parser.add_argument("--img-size", default="56")
    parser.add_argument("--epochs", default="3")
    parser.add_argument("--batch-size", default="32")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "joint.csv")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if len(args.task) < 2:
        parser.error("give --task twice or more")
    if not args.skip_tests:
        _rows.require_green(["tests/vtk/training/runs/test_joint.py", "tests/vtk/training/runs/test_joint_model.py"])
    common = ["--model", args.model, "--epochs", args.epochs, "--batch-size", args.batch_size, "--workers", "0"]
    common += ["--memory", "plain", *(["--weights", args.weights] if args.weights else [])]
    alone, peaks, extra = {}, [], 0
    with tempfile.TemporaryDirectory() as folder:
        for i, task in enumerate(args.task):
            name, _, rest = task.partition("=")
            sized = re.fullmatch(r"(.+)@(\d+)", rest)
            data, size = (sized[1], sized[2]) if sized else (rest, args.img_size)
            flags = [data, *common, "--img-size", size]
            if i:
                (needs,) = (m for m in run([*flags, "--dry-run"])[0]["modes"] if m["mode"] == "plain")
                extra += needs["activations_bytes"] + 2 * needs["gradients_bytes"] + needs["optimizer_bytes"]
            alone[name], peak = run([*flags, "--out", str(Path(folder) / name)])
            peaks.append(peak)
        flags = [word for task in args.task for word in ("--task", task)]
        flags += [*common, "--img-size", args.img_size, "--out", str(Path(folder) / "all")]
        together, peak = run(flags)
    allowed = peaks[0] + extra
    table = []
    for (name, single), task, own_peak in zip(alone.items(), args.task, peaks, strict=True):
        found = together["tasks"][name]
        row = {
            "model": args.model, "task": f"{name}{task.partition('@')[1]}{task.partition('@')[2]}",
            "tasks": len(args.task), "epochs": args.epochs, "batch_size": args.batch_size,
            "top1_alone": single["top1"], "top1_together": found["top1"],
            "accuracy_kept": abs(single["top1"] - found["top1"]) <= ACCURACY, "peak_alone_bytes": own_peak,
            "peak_together_bytes": peak, "allowed_bytes": allowed, "memory_kept": peak <= allowed,
        }  # fmt: skip
        _rows.append(args.results, {**row, **_rows.context()})
        table.append((name, f"{single['top1']:.3f}", f"{found['top1']:.3f}", console.size(own_peak), console.size(peak),
                      console.size(allowed)))  # fmt: skip
    columns = ("task", "top-1 alone", "together", "peak alone", "together", "allowed")
    console.table("Several tasks in one run", columns, table)


if __name__ == "__main__":
    main()

"""Cost of auditing a folder relative to training: share of the first epoch, and the time once cached.

    python benchmarks/audit.py
    python benchmarks/audit.py --images 2000 --sides 96

For each size of generated JPEG photographs: `scan` of the folder that was never seen, `scan` again, and one epoch of
attention-only fine-tuning of vit_tiny at 96 px over the same images. Bounds: the first scan takes at most 5 % of the
epoch, the second at most a second. Rows go to ``results/audit.csv``; the exit code is 1 where a bound is missed.

``--epoch-images`` times the epoch over fewer images and scales it. On a machine that others use, too, compare the CPU
seconds: ``first_cpu_s`` of all processes of a scan, ``run_cpu_s`` of those of the training run.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path

import _rows
import numpy as np
from PIL import Image

CLASSES, SHARE, CACHED_S = 10, 0.05, 1.0


def write_photos(root: Path, count: int, side: int) -> None:
    """Write smooth images with grain as JPEG files, about as many bytes as photographs of that size have."""
    rng = np.random.default_rng(0)
    for i in range(count):
        folder = root / f"class {i % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
        pixels += rng.integers(-10, 11, pixels.shape, dtype=np.int16)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:05d}.jpg", quality=88)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--sides", type=int, nargs="*", default=[96, 256], help="of the photographs, in pixels")
    parser.add_argument("--epoch-images", type=int, help="images of the epoch that is timed; default all")
    parser.add_argument("--runs", type=int, default=3, help="of each scan; the median is taken")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "audit.csv")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if not args.skip_tests:
        _rows.require_green(["tests/vtk/data"])
    table, missed = [], False
    for side in args.sides:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(Path(folder), args, side)
        share = row["first_s"] / row["epoch_s"]
        late = share > SHARE or row["cached_s"] > CACHED_S
        missed |= late
        _rows.append(args.results, {**row, "share": round(share, 4), **_rows.context()})
        cells = f"{row['first_s']:.2f} s", f"{row['epoch_s']:.1f} s", f"{share:.1%}", f"{row['cached_s']:.2f} s"
        table.append((f"{side}×{side}", row["bytes"] // row["images"], *cells, "missed" if late else "kept"))
    from vtk import console

    columns = (
        "photographs",
        "bytes each",
        "first scan",
        "epoch",
        "share",
        "cached",
        f"≤ {SHARE:.0%}, ≤ {CACHED_S:g} s",
    )
    console.table(f"Audit of {args.images:,} files", columns, table)
    return int(missed)


def cpu_seconds() -> float:
    """Return what this process and those that it waited for have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(folder: Path, args: argparse.Namespace, side: int) -> dict[str, float]:
    """Return one row: seconds of the scans and of the epoch, everything of it in ``folder``."""
    os.environ["VTK_HOME"] = str(folder / "home")
    from vtk.data.audit.folder_scan import scan
    from vtk.data.probing.cache import cache_path
    from vtk.training.finetune import finetune
    from vtk.training.finetune_config import FinetuneConfig

    data = folder / "photos"
    write_photos(data, args.images, side)
    first, first_cpu, cached = [], [], []
    for _ in range(args.runs):
        cache_path(data).unlink(missing_ok=True)
        before = cpu_seconds()
        first.append(scan(data, show_progress=False).seconds)
        first_cpu.append(cpu_seconds() - before)
        audit = scan(data, show_progress=False)
        assert audit.cached == args.images and not audit.bad
        cached.append(audit.seconds)
    count = args.epoch_images or args.images
    few = data
    if count < args.images:
        few = folder / "few"
        write_photos(few, count, side)
    config = FinetuneConfig(
        data=few, out=folder / "run", model="vit_tiny_patch16_224", pretrained=False, img_size=96, epochs=1,
        batch_size=args.batch_size, val_split=2 * CLASSES / count, device="cpu",
    )  # fmt: skip
    before = cpu_seconds()
    epoch = finetune(config).rows[0]["seconds"] * args.images / count
    run_cpu = (cpu_seconds() - before) * args.images / count
    size = sum(path.stat().st_size for path in data.rglob("*.jpg"))
    return {
        "images": args.images, "side": side, "bytes": size, "epoch_images": count,
        "first_s": round(statistics.median(first), 3), "first_cpu_s": round(statistics.median(first_cpu), 3),
        "cached_s": round(statistics.median(cached), 3), "epoch_s": round(epoch, 2),
        "run_cpu_s": round(run_cpu, 2), "runs": args.runs,
        "batch_size": args.batch_size,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

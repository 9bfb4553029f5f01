"""Runs what the papers claim at a small scale, on the CPU, two runs at a time.

    python benchmarks/papers [--data FOLDER] [--only A B] [--seeds 0 1 2] [--dry]

Every experiment and seed is a process of one thread. Numbers go to ``benchmarks/results/papers.csv`` when an experiment
is done; what is there already with the same settings and images is not done again, and of an experiment that was
stopped, finished runs are kept in ``--work``. `python docs/_generate/papers.py` makes the page.
"""

import argparse
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import _rows
import _store

from papers import a_three_things, b_context_broadcasting, c_alternet, d_sam, e_scaled_relu, pictures
from papers.experiment import Experiment, Job

EXPERIMENTS: tuple[Experiment, ...] = tuple(
    experiment
    for module in (a_three_things, b_context_broadcasting, c_alternet, d_sam, e_scaled_relu)
    for experiment in module.EXPERIMENTS
)
HERE = Path(__file__).resolve().parent
RESULTS = _rows.RESULTS / "papers.csv"
TESTS = ("tests/vtk/analysis", "tests/benchmarks/test_papers.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; return 0 when all is there."""
    args = _parse(argv)
    known = [quick(e) for e in EXPERIMENTS] if args.quick else EXPERIMENTS
    chosen = [e for e in known if not args.only or e.paper in args.only or e.key in args.only]
    if args.job:
        return one(next(e for e in known if e.key == args.job), args)
    done = finished(_store.read(args.results))
    todo = [
        (e, seed) for seed in args.seeds for e in chosen
        if args.again or (e.key, str(seed), e.digest(_images(args))) not in done
    ]  # fmt: skip
    for experiment, seed in todo if args.dry else ():
        print(f"{experiment.key} seed {seed}: {json.dumps(dict(experiment.settings))}")
    print(f"{len(todo)} of {len(chosen) * len(args.seeds)} to do on {args.name}", flush=True)
    if args.dry or not todo:
        return 0
    if not args.skip_tests:
        _rows.require_green(TESTS)
    pictures.prepare(_folder(args), args.data, args.train, args.val)
    failed = work_off(todo, args)
    for what in failed:
        print(f"FAILED {what}; its log is in {args.work}", flush=True)
    return 1 if failed else 0


def work_off(todo: Sequence[tuple[Experiment, int]], args: argparse.Namespace) -> list[str]:
    """Do jobs in processes of one thread, ``--processes`` at a time; return those that failed."""
    waiting, running, failed = list(todo), {}, []
    begin = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < args.processes:
            experiment, seed = waiting.pop(0)
            running[_start(experiment, seed, args)] = experiment, seed
        time.sleep(0.2)
        for process in [p for p in running if p.poll() is not None]:
            experiment, seed = running.pop(process)
            name = f"{experiment.key} seed {seed}"
            told = "failed"
            if process.returncode:
                failed.append(name)
            else:
                rows = json.loads(_result(experiment, seed, args).read_text(encoding="utf-8"))
                append(args.results, rows)
                longest = max((row for row in rows if row["metric"] == "seconds"), key=_value, default=None)
                told = "done" + (f", longest run {_value(longest):.0f} s ({longest['variant']})" if longest else "")
            left = len(waiting) + len(running)
            print(f"{time.perf_counter() - begin:6.0f} s: {name} {told}, {left} left", flush=True)
    return failed


def append(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Add the rows of one job to the results, all or, if the process is killed, none."""
    before = _store.read(path)
    if before and list(before[0]) != list(rows[0]):
        sys.exit(f"{path} has other columns than this writes; move it away")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*before, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.tmp")
    part.write_text(text.getvalue(), encoding="utf-8")
    part.replace(path)


def _value(row: dict[str, object]) -> float:
    return float(str(row["value"]))


def one(experiment: Experiment, args: argparse.Namespace) -> int:
    """Do one experiment with one seed, in this process, and write its rows where the parent looks."""
    import torch

    torch.set_num_threads(1)
    # the path is the parent's, should settings have been edited since it started
    seed, result = args.seeds[0], args.result or _result(experiment, args.seeds[0], args)
    job = Job(experiment.settings, _folder(args), _hflip(args), seed, result.with_suffix(""))
    if args.again:
        shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    experiment.run(job)
    head = {"paper": experiment.paper, "experiment": experiment.name}
    tail = {
        "data": args.name, "train_images": args.train, "digest": experiment.digest(_images(args)),
        "settings": json.dumps(dict(experiment.settings), sort_keys=True), **_rows.context("cpu"),
    }  # fmt: skip
    rows = [
        {**head, "variant": variant, "seed": seed, "metric": metric, "value": f"{value:.6g}", **tail}
        for variant, metric, value in job.rows
    ]
    result.with_suffix(".tmp").write_text(json.dumps(rows), encoding="utf-8")
    result.with_suffix(".tmp").replace(result)
    return 0


def quick(experiment: Experiment) -> Experiment:
    """Return an experiment whose runs have one epoch."""
    settings = {
        name: {**value, "epochs": 1} if isinstance(value, dict) and "epochs" in value else value
        for name, value in experiment.settings.items()
    }
    return replace(experiment, settings=settings)


def finished(rows: Sequence[dict[str, str]]) -> set[tuple[str, str, str]]:
    """Return (experiment, seed, digest) of all that a results file has."""
    return {(f"{row['paper']}/{row['experiment']}", row["seed"], row["digest"]) for row in rows}


def _start(experiment: Experiment, seed: int, args: argparse.Namespace) -> subprocess.Popen:
    result = _result(experiment, seed, args)
    log = result.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE), "--job", experiment.key, "--seeds", str(seed), "--work", str(args.work)]
    command += ["--result", str(result), *(["--again"] if args.again else [])]
    command += ["--name", args.name, "--train", str(args.train), "--val", str(args.val)]
    command += ["--data", str(args.data)] if args.data else []
    command += ["--quick"] if args.quick else []
    # the runs keep bases and scans in a home of their own
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VTK_HOME": str(args.work / "home"), "PYTHONWARNINGS": "ignore"}
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=args.work)


def _images(args: argparse.Namespace) -> dict[str, object]:
    return {"name": args.name, "train": args.train, "val": args.val, "hflip": _hflip(args)}


def _hflip(args: argparse.Namespace) -> float:
    return 0.5 if args.data else 0.0  # a mirrored digit is no digit


def _folder(args: argparse.Namespace) -> Path:
    return args.work / "images" / args.name.replace(" ", "-").replace(",", "").lower()


def _result(experiment: Experiment, seed: int, args: argparse.Namespace) -> Path:
    name = f"{experiment.paper}-{experiment.name}-seed{seed}-{experiment.digest(_images(args))}.json"
    return args.work / "jobs" / name


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/papers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, help="folder with train/ and val/ of class folders; default digits made here"
    )
    parser.add_argument("--name", help="what the images are called in the results; default the folder's name")
    parser.add_argument("--only", nargs="*", default=[], metavar="PAPER", help="A to E, or such as A/hmlp")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, each of one thread")
    parser.add_argument("--train", type=int, default=pictures.TRAIN, help="training images")
    parser.add_argument("--val", type=int, default=pictures.VAL, help="held-out images")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=_rows.REPO / "papers-out", help="folder for runs; may be deleted")
    parser.add_argument("--dry", action="store_true", help="list what is missing and do nothing")
    parser.add_argument("--again", action="store_true", help="do also what is there already")
    parser.add_argument("--quick", action="store_true", help="one epoch a run; only for trying this script")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying this script")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    known = {e.paper for e in EXPERIMENTS} | {e.key for e in EXPERIMENTS}
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only {unknown[0]}: known are {', '.join(sorted(known))}")
    if args.quick and args.results == RESULTS and not args.job:
        parser.error("--quick makes no results; give --results FILE")
    args.name = args.name or (args.data.resolve().name if args.data else "cluttered digits")
    args.work, args.data = args.work.resolve(), args.data.resolve() if args.data else None
    return args

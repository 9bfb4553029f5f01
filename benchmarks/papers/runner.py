"""Runs what the papers claim at a small scale, on the CPU, two runs at a time.

    python benchmarks/papers [--images digits NAME=FOLDER] [--only A B/broadcast] [--seeds 0 1 2] [--dry]
    python benchmarks/papers --gpu --images CIFAR-10=FOLDER      larger models; stops after 8 minutes (`papers.gpu`)

Every experiment first gets 5 seeds; those with a claim that these do not decide get 10. Every experiment and seed is a
process of one thread. Numbers go to ``benchmarks/results/papers.csv`` when it is done; what is there already with the
same settings and images is not done again. Runs are kept in ``--work``: what was stopped continues with the same
command, and experiments share the runs that they have in common. `python docs/_generate/papers.py` makes the page.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import _rows
import _store

from papers import gpu, image_sets, looks, pictures, schedule
from papers.experiments import EXPERIMENTS, choose, quick
from papers.gpu import at_cifar_scale, forward_flops, plan
from papers.jobs import Place, Task, do, end_with_parent, work_off

RESULTS = _rows.RESULTS / "papers.csv"
OUT_OF_TIME = 3
"""Exit code, as of `gpu.sh`."""
TESTS = tuple(f"tests/benchmarks/test_papers{name}.py" for name in ("", "_runs", "_verdicts"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; return 0 when all is there."""
    from vtk.errors import VtkError
    from vtk.locks import hold_folder

    args = _parse(argv)
    known = [at_cifar_scale(e) for e in EXPERIMENTS] if args.gpu else list(EXPERIMENTS)
    known = [quick(e) for e in known] if args.quick else known
    pairs = [(e, images) for images in args.images for e in choose(known, args.only, images.kind)]
    since = args.since or (time.time() if args.again else 0.0)
    place = Place(args.work, args.results, args.quick, since, args.gpu, args.device)
    if args.job:
        end_with_parent()
        pair = next(pair for pair in pairs if pair[0].key == args.job)
        do(Task(*pair, args.seeds[0]), place, args.result)
        return 0
    tasks = _tasks(args, pairs)
    if args.dry or not tasks:
        for task in tasks if args.dry else ():
            print(f"{task}: {json.dumps(dict(task.experiment.settings))}")
        print(f"{len(tasks)} to do", flush=True)
        if args.gpu and args.dry:
            print(plan([e for e, _ in pairs], looks.SEEDS[0], args.train, forward_flops))
        return 0
    try:
        with hold_folder(args.work, "python benchmarks/papers", "`--work`"):
            return _run(args, pairs, place)
    except VtkError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace, pairs: Sequence[schedule.Pair], place: Place) -> int:
    end = time.monotonic() + 60 * args.minutes
    if not args.skip_tests:  # a card's minutes are for its runs
        _rows.require_green(TESTS if args.gpu else ("tests/vtk/analysis", *TESTS))
    for images in args.images:
        pictures.prepare(images.folder(args.work), images.source, images.train, images.val)
    tasks, first, tried = _tasks(args, pairs), True, set()
    while tasks:
        print(f"{len(tasks)} to do{'' if first else ': claims that the first look left open'}", flush=True)
        failed, left = work_off(tasks, place, args.processes, end)
        for task in failed:
            print(f"FAILED {task}; its log is {place.result(task).with_suffix('.log')}", flush=True)
        if left:
            print(f"out of time, {left} missing; the same command continues", flush=True)
        if failed or left:
            return 1 if failed else OUT_OF_TIME
        tried |= {task.key for task in tasks}
        tasks, first = [] if args.again else _tasks(args, pairs), False
        if again := [task for task in tasks if task.key in tried]:
            print(f"{again[0]} was done with other settings: they were edited meanwhile; start again", flush=True)
            return 1
    return 0


def _tasks(args: argparse.Namespace, pairs: Sequence[schedule.Pair]) -> list[Task]:
    rows = [] if args.again else _store.read(args.results)
    if args.seeds is not None:
        return schedule.missing(pairs, args.seeds, rows, args.processes)
    return schedule.next_tasks(pairs, rows, args.processes)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/papers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--images", nargs="+", default=["digits"], metavar="SET",
        help="digits (generated) or FOLDER or NAME=FOLDER, with train/ and val/ of class folders; several may be given",
    )  # fmt: skip
    parser.add_argument("--only", nargs="*", default=[], metavar="PAPER", help="A to E, or such as A/hmlp")
    parser.add_argument("--seeds", nargs="+", type=int, help="these, in place of 5 and, where a claim is open, 10")
    parser.add_argument("--processes", type=int, help="jobs at a time, each of one thread; default 2")
    parser.add_argument("--train", type=int, help=f"training images; default {pictures.TRAIN}")
    parser.add_argument("--val", type=int, help=f"held-out images; default {pictures.VAL}")
    parser.add_argument("--gpu", action="store_true", help="larger models and 7,000 images, on one GPU; needs --images")
    parser.add_argument("--minutes", type=float, help="time limit; default none, with --gpu 8")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=_rows.REPO / "papers-out", help="folder for runs; may be deleted")
    parser.add_argument("--dry", action="store_true", help="list what is missing and do nothing")
    parser.add_argument("--again", action="store_true", help="do also what is there already; needs --seeds")
    parser.add_argument("--quick", action="store_true", help="one epoch a run; only for trying this script")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying this script")
    for hidden, kind in (("--job", str), ("--result", Path), ("--since", float), ("--device", str)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    known = {e.paper for e in EXPERIMENTS} | {e.key for e in EXPERIMENTS}
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only {unknown[0]}: known are {', '.join(sorted(known))}")
    if args.quick and args.results == RESULTS and not args.job:
        parser.error("--quick makes no results; give --results FILE")
    if args.again and args.seeds is None:
        parser.error("--again needs --seeds: say which to do again")
    _set_scale(parser, args)
    try:
        args.images = [image_sets.parse(word, args.train, args.val) for word in args.images]
    except ValueError as error:
        parser.error(f"--images {error}")
    if args.gpu and not args.job:  # their rows stand beside those of the same images on the CPU
        args.images = [replace(images, name=f"{images.name} on a GPU") for images in args.images]
    if len({images.name for images in args.images}) < len(args.images):
        parser.error("--images: two sets have the same name; give NAME=FOLDER")
    if not args.job and args.results.exists() and not _rows.whole(args.results):
        parser.error(f"--results {args.results} has a row that was cut; remove it, or give another file")
    args.work = args.work.resolve()
    return args


def _set_scale(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in what is different on a GPU; ``--quick`` tries it on the CPU."""
    cuda = False
    if args.gpu:
        import torch

        cuda = torch.cuda.is_available()
        if "digits" in args.images:
            parser.error("--gpu needs photographs, such as CIFAR-10's: --images NAME=FOLDER with train/ and val/")
        if not (cuda or args.quick or args.dry or args.job):
            parser.error("--gpu: no CUDA device here; --dry shows the plan")
    scale = (
        (gpu.TRAIN, gpu.VAL, gpu.PROCESSES, gpu.MINUTES) if args.gpu else (pictures.TRAIN, pictures.VAL, 2, math.inf)
    )
    for name, value in zip(("train", "val", "processes", "minutes"), scale, strict=True):
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    args.device = args.device or ("cuda" if cuda else "cpu")

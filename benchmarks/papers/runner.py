"""Runs what the papers claim at a small scale, on the CPU, two runs at a time.

    python benchmarks/papers [--images digits NAME=FOLDER] [--only A B/broadcast] [--seeds 0 1 2] [--dry]

Every experiment first gets 5 seeds; those with a claim that these do not decide get 10. Every experiment and seed is a
process of one thread. Numbers go to ``benchmarks/results/papers.csv`` when it is done; what is there already with the
same settings and images is not done again. Runs are kept in ``--work``: what was stopped continues with the same
command, and experiments share the runs that they have in common. `python docs/_generate/papers.py` makes the page.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import _rows
import _store

from papers import image_sets, pictures, schedule
from papers.experiments import EXPERIMENTS, choose, quick
from papers.jobs import Place, Task, do, end_with_parent, work_off

RESULTS = _rows.RESULTS / "papers.csv"
TESTS = ("tests/vtk/analysis", "tests/benchmarks/test_papers.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; return 0 when all is there."""
    from vtk.errors import VtkError
    from vtk.locks import hold_folder

    args = _parse(argv)
    known = [quick(e) for e in EXPERIMENTS] if args.quick else list(EXPERIMENTS)
    pairs = [(e, images) for images in args.images for e in choose(known, args.only, images.kind)]
    place = Place(args.work, args.results, args.quick, args.since or (time.time() if args.again else 0.0))
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
        return 0
    try:
        with hold_folder(args.work, "python benchmarks/papers", "`--work`"):
            return _run(args, pairs, place)
    except VtkError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(args: argparse.Namespace, pairs: Sequence[schedule.Pair], place: Place) -> int:
    if not args.skip_tests:
        _rows.require_green(TESTS)
    for images in args.images:
        pictures.prepare(images.folder(args.work), images.source, images.train, images.val)
    tasks, first = _tasks(args, pairs), True
    while tasks:
        print(f"{len(tasks)} to do{'' if first else ': claims that the first look left open'}", flush=True)
        failed = work_off(tasks, place, args.processes)
        for task in failed:
            print(f"FAILED {task}; its log is {place.result(task).with_suffix('.log')}", flush=True)
        if failed:
            return 1
        tasks, first = [] if args.again else _tasks(args, pairs), False
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
    parser.add_argument("--processes", type=int, default=2, help="jobs at a time, each of one thread")
    parser.add_argument("--train", type=int, default=pictures.TRAIN, help="training images")
    parser.add_argument("--val", type=int, default=pictures.VAL, help="held-out images")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=_rows.REPO / "papers-out", help="folder for runs; may be deleted")
    parser.add_argument("--dry", action="store_true", help="list what is missing and do nothing")
    parser.add_argument("--again", action="store_true", help="do also what is there already; needs --seeds")
    parser.add_argument("--quick", action="store_true", help="one epoch a run; only for trying this script")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying this script")
    for hidden, kind in (("--job", str), ("--result", Path), ("--since", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    known = {e.paper for e in EXPERIMENTS} | {e.key for e in EXPERIMENTS}
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only {unknown[0]}: known are {', '.join(sorted(known))}")
    if args.quick and args.results == RESULTS and not args.job:
        parser.error("--quick makes no results; give --results FILE")
    if args.again and args.seeds is None:
        parser.error("--again needs --seeds: say which to do again")
    try:
        args.images = [image_sets.parse(word, args.train, args.val) for word in args.images]
    except ValueError as error:
        parser.error(f"--images {error}")
    if len({images.name for images in args.images}) < len(args.images):
        parser.error("--images: two sets have the same name; give NAME=FOLDER")
    args.work = args.work.resolve()
    return args

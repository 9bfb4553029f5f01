"""Jobs, each one experiment with one seed in a process of one thread, and the results that they add to."""

import contextlib
import csv
import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _rows
import _store

from papers.experiment import Experiment, Job
from papers.image_sets import ImageSet

HERE = Path(__file__).resolve().parent
WHOLE_JOB = "whole job"
"""Variant of a job's own numbers."""


@dataclass(frozen=True)
class Task:
    """What a job does: an experiment, with the settings of its images, and a seed."""

    experiment: Experiment
    images: ImageSet
    seed: int

    @property
    def key(self) -> tuple[str, str, str]:
        """What `finished` has of it."""
        return self.experiment.key, str(self.seed), self.experiment.digest(self.images.describe())

    def __str__(self) -> str:
        return f"{self.experiment.key} seed {self.seed} on {self.images.name}"


@dataclass(frozen=True)
class Place:
    """Where jobs work.

    Attributes:
        work: folder for images, runs and logs.
        results: file of rows.
        quick: whether runs have one epoch.
        since: seconds since 1970; runs done before are done again.
        gpu: whether experiments have their settings for a GPU.
        device: to train and measure on.
    """

    work: Path
    results: Path
    quick: bool = False
    since: float = 0.0
    gpu: bool = False
    device: str = "cpu"

    def result(self, task: Task) -> Path:
        """Return the file that a job leaves its rows in."""
        key, seed, digest = task.key
        return self.work / "jobs" / f"{key.replace('/', '-')}-seed{seed}-{digest}.json"


def finished(rows: Sequence[dict[str, str]]) -> set[tuple[str, str, str]]:
    """Return (experiment, seed, digest) of all that a results file has."""
    return {(f"{row['paper']}/{row['experiment']}", row["seed"], row["digest"]) for row in rows}


def work_off(tasks: Sequence[Task], place: Place, processes: int, end: float = math.inf) -> tuple[list[Task], int]:
    """Do jobs, so many at a time. What runs is ended with this.

    Args:
        tasks: the jobs, in order.
        place: where they work.
        processes: at a time.
        end: of `time.monotonic`, at which what still runs is stopped; its finished runs are kept.

    Returns:
        Jobs that failed, and how many there was no time for.
    """
    waiting, running, failed = list(tasks), {}, []
    begin = time.perf_counter()
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < processes:
                task = waiting.pop(0)
                running[start(task, place)] = task
            time.sleep(0.2)
            for process in [p for p in running if p.poll() is not None]:
                task = running.pop(process)
                ended = "failed"
                if process.returncode:
                    failed.append(task)
                else:
                    rows = json.loads(place.result(task).read_text(encoding="utf-8"))
                    append(place.results, rows)
                    ended = f"done{_costs(rows)}"
                left = len(waiting) + len(running)
                print(f"{time.perf_counter() - begin:6.0f} s: {task} {ended}, {left} left", flush=True)
    finally:
        for process in running:
            process.terminate()
    return failed, len(waiting) + len(running)


def start(task: Task, place: Place) -> subprocess.Popen:
    """Start the process of a job; its output goes to a log beside its result."""
    result = place.result(task)
    result.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE), "--job", task.experiment.key, "--seeds", str(task.seed)]
    command += ["--images", task.images.word, "--train", str(task.images.train), "--val", str(task.images.val)]
    command += ["--work", str(place.work), "--result", str(result), "--since", str(place.since)]
    command += [*(["--quick"] if place.quick else []), *(["--gpu", "--device", place.device] if place.gpu else [])]
    # the runs keep bases and scans in a home of their own
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VTK_HOME": str(place.work / "home"), "PYTHONWARNINGS": "ignore"}
    with result.with_suffix(".log").open("w", encoding="utf-8") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=place.work
        )


def do(task: Task, place: Place, result: Path | None = None) -> None:
    """Do a job in this process, and leave its rows for `work_off`.

    Args:
        task: the job.
        place: where it works.
        result: file for the rows, as the parent named it should settings have been edited since; None for `Place`'s.
    """
    import torch

    torch.set_num_threads(1)
    if place.device != "cpu":
        from papers import measures

        measures.DEVICE = torch.device(place.device)
    cpu = time.process_time()
    experiment, images, result = task.experiment, task.images, result or place.result(task)
    runs = place.work / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    result.parent.mkdir(parents=True, exist_ok=True)
    job = Job(
        experiment.settings, images.folder(place.work), images.describe(), images.hflip, task.seed, runs, place.since,
        str(task), place.device,
    )  # fmt: skip
    experiment.run(job)
    job.add(WHOLE_JOB, cpu_seconds=time.process_time() - cpu + sum(job.resumed.values()))
    head = {"paper": experiment.paper, "experiment": experiment.name}
    tail = {
        "data": images.name, "train_images": images.train, "digest": task.key[2],
        "settings": experiment.settings_text(), **_rows.context(place.device),
    }  # fmt: skip
    rows = [
        {**head, "variant": variant, "seed": task.seed, "metric": metric, "value": f"{value:.6g}", **tail}
        for variant, metric, value in job.rows
    ]
    result.with_suffix(".tmp").write_text(json.dumps(rows), encoding="utf-8")
    result.with_suffix(".tmp").replace(result)


def append(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Add the rows of one job to the results, all or, if the process is killed, none."""
    with _alone(path):
        before = _store.read(path)
        if before and list(before[0]) != list(rows[0]):
            sys.exit(f"{path} has other columns than this writes; move it away")
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*before, *rows])
        _rows.replace(path, text.getvalue())


def end_with_parent() -> None:
    """End this process soon after the one that started it: a killed runner leaves no jobs behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other runners from a results file, for the moment that adding rows takes."""
    from vtk.errors import HeldError
    from vtk.locks import hold_name

    with contextlib.ExitStack() as stack:
        for _ in range(600):
            with contextlib.suppress(HeldError):
                stack.enter_context(hold_name(path, "papers", "`--results`"))
                break
            time.sleep(0.1)
        else:
            stack.enter_context(hold_name(path, "papers", "`--results`"))  # and its message, if it is held still
        yield


def _costs(rows: Sequence[dict[str, object]]) -> str:
    """Return how long the longest run and the job took, of the processor's time."""
    costs = {str(row["variant"]): float(str(row["value"])) for row in rows if row["metric"] == "cpu_seconds"}
    whole = costs.pop(WHOLE_JOB, 0.0)
    longest = max(costs, key=costs.__getitem__, default=None)
    words = f", {whole:.0f} s of CPU"
    return words + (f", longest run {costs[longest]:.0f} s ({longest})" if longest else "")

"""Probes many files in worker processes.

Processes, since for small files Pillow spends most of its time holding Python's lock (10,000 JPEGs of 64 px on two
cores: threads 3,600 files/s, processes 8,000). They are separate programs rather than ``multiprocessing`` children:
nothing of the caller is copied or imported again (no torch, no unguarded script), and a decoder that crashes on a
damaged file ends only its worker, after which that file is identified and reported.
"""

import json
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from vtk._path import child, environment, search_path
from vtk.data.cpus import usable_cpus
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.decoding.rules import Rules
from vtk.data.probing.probe import Probe, probe_all

_CHUNK = 32
_FEW_BYTES = 4_000_000
"""Total size below which starting processes takes longer than decoding in this process."""

_CODE = "import sys; sys.path[:0] = {path!r}; from vtk.data.probing.probe import serve; serve()"


def probe_many(
    paths: Sequence[str],
    n_bytes: int,
    *,
    in_chans: int = 3,
    max_pixels: int = MAX_PIXELS,
    rules: Rules = "srgb",
    workers: int | None = None,
    on_done: Callable[[int], None] = lambda n: None,
) -> list[Probe]:
    """Return the probe of every file, in the order of ``paths``.

    Args:
        paths: files.
        n_bytes: their total size, which decides whether worker processes are started.
        in_chans: channels that a file must provide.
        max_pixels: largest image.
        rules: of decoding (`vtk.data.decoding.decode`).
        workers: processes; None for one per usable CPU, 0 for this process only.
        on_done: called in this thread with the number of newly finished files.
    """
    chunks = [list(paths[i : i + _CHUNK]) for i in range(0, len(paths), _CHUNK)]
    count = min(usable_cpus() if workers is None else workers, len(chunks))
    if count == 0 or not sys.executable or (workers is None and (n_bytes < _FEW_BYTES or count == 1)):
        results = []
        for chunk in chunks:
            results += probe_all(chunk, in_chans, max_pixels, rules)
            on_done(len(chunk))
        return results
    pool: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    crew = [_Worker(in_chans, max_pixels, rules) for _ in range(count)]
    for worker in crew:
        pool.put(worker)

    def run(chunk: list[str]) -> list[Probe]:
        worker = pool.get()
        try:
            return worker.probe(chunk)
        finally:
            pool.put(worker)

    threads = ThreadPoolExecutor(count)
    try:
        futures = [threads.submit(run, chunk) for chunk in chunks]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            on_done(sum(len(future.result()) for future in done))
        return [probe for future in futures for probe in future.result()]
    finally:
        for worker in crew:
            worker.interrupt()
        threads.shutdown(cancel_futures=True)
        for worker in crew:
            worker.close()


class _Worker:
    """A worker process that probes lists of paths; started on first use, and again after a crash."""

    def __init__(self, in_chans: int = 3, max_pixels: int = MAX_PIXELS, rules: Rules = "srgb") -> None:
        self.options = in_chans, max_pixels, rules
        self.process: subprocess.Popen[str] | None = None
        self.stopped = False

    def probe(self, paths: list[str]) -> list[Probe]:
        if not self._start():
            return probe_all(paths, *self.options)  # no child process possible (embedded Python, or no memory)
        answers = self._ask(paths)
        if answers is None:  # it crashed: probe each file alone to find the cause
            answers = []
            for path in paths:
                alone = self._ask([path]) if self._start() else None
                answers += alone or [Probe(0, 0, "", 1, "its decoder crashed or ran out of memory")]
        return answers

    def interrupt(self) -> None:
        """End a pending request; no new process is started afterwards."""
        self.stopped = True
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _start(self) -> bool:
        if self.process is not None or self.stopped:
            return self.process is not None
        try:
            self.process = subprocess.Popen(
                child("-c", _CODE.format(path=search_path())), env=environment(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="ascii",
            )  # fmt: skip
        except OSError:
            return False
        return self._ask([]) is not None

    def _ask(self, paths: list[str]) -> list[Probe] | None:
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(json.dumps([paths, *self.options]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if line.endswith("\n"):
            return [Probe(*values) for values in json.loads(line)]
        self.close()
        return None

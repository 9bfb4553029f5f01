"""One instance of a model in a process of its own: loads back-ends and times calls when it is told to.

Requests and replies are pickled on the pipes between this process and the one that started it, each after its length.
Whatever else it prints goes to stderr.
"""

import os
import pickle
import signal
import sys
import time
from collections import OrderedDict
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vtk.profiling.calls import first_line
from vtk.profiling.compare import batch_of, centred, compare, gives_probabilities
from vtk.profiling.search.variants import Variant
from vtk.runtime.backends.base import Backend, load_backend

LEAST_CALLS = 4
"""Calls of a window, at least."""

_TURNS = 2
"""Batches of different images that calls take turns with."""


class Instance:
    """The back-ends of this process.

    Args:
        inputs: rows of each input of the model.
        reference: their logits (n, classes), fp32, or logarithms of probabilities.
        probabilities: `reference` holds the latter.
        kinds: of a precision, the bounds that outputs are held against (`vtk.profiling.compare.compare`).
    """

    def __init__(self, inputs: dict[str, Tensor], reference: Tensor, probabilities: bool) -> None:
        self.inputs, self.reference, self.probabilities = inputs, reference, probabilities
        self.loaded: OrderedDict[tuple[object, ...], Backend] = OrderedDict()
        self.backend: Backend | None = None
        self._batches: list[dict[str, Tensor]] = []
        self._kind = "fp32"
        self._last: Tensor | None = None
        self._turn = 0

    def load(self, variant: Variant, threads: int, held: int) -> float:
        """Load a back-end unless it is here already, dropping those used longest ago; return the seconds it took."""
        key = (*variant.key, threads)
        start = time.perf_counter()
        if key not in self.loaded:
            while len(self.loaded) >= held:
                self.loaded.popitem(last=False)[1].close()
            assert variant.source is not None
            backend = load_backend(
                variant.backend, variant.source, device="cpu", dtype=variant.dtype, threads=threads, **variant.options
            )
            self.loaded[key] = backend
        self.loaded.move_to_end(key)
        return time.perf_counter() - start

    def choose(self, variant: Variant, threads: int, batch: int, kind: str) -> str:
        """Make a loaded back-end ready for a batch size, and compare its answers; return why they are wrong."""
        torch.set_num_threads(threads)
        self.backend, self._kind, self._turn = self.loaded[(*variant.key, threads)], kind, 0
        self._batches = [
            {name: self._typed(batch_of(rows.roll(-turn, 0), batch)) for name, rows in self.inputs.items()}
            for turn in range(_TURNS)
        ]
        for _ in range(_TURNS):
            self.call()
            if wrong := self.wrong():
                return wrong
        return ""

    def calls(self, start: float, end: float, least: int) -> list[float]:
        """Return the milliseconds of the calls from one time of the system's clock to another.

        A call that is not over at the end counts only if there are fewer than ``least``: others may be done by then.
        """
        clock = time.perf_counter
        found: list[float] = []
        time.sleep(max(0.0, start - clock()))
        while True:
            begin = clock()
            self.call()
            now = clock()
            if now <= end or len(found) < least:
                found.append(1000 * (now - begin))
            if now >= end and len(found) >= least:
                return found

    def call(self) -> None:
        """Run once, with other images than the call before."""
        assert self.backend is not None
        self._turn += 1
        self._last = self.backend.run(self._batches[self._turn % _TURNS])["logits"]

    def wrong(self) -> str:
        """Say in which way the last call's answers are wrong; empty if they are right."""
        assert self._last is not None and self.backend is not None
        got, want = self._last, self.reference.roll(-(self._turn % _TURNS), 0)
        if self.probabilities or gives_probabilities(self.backend):
            got, want = centred(got, half=False), centred(want, half=False)
        return compare(got, want, self._kind).reason

    def _typed(self, rows: Tensor) -> Tensor:
        assert self.backend is not None
        return rows.to(self.backend.dtype) if rows.is_floating_point() else rows


def send(pipe: BinaryIO, data: bytes) -> None:
    """Write a message."""
    pipe.write(len(data).to_bytes(8, "little"))
    pipe.write(data)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes:
    """Read a message.

    Raises:
        EOFError: the other process has ended.
    """
    length = int.from_bytes(_exactly(pipe, 8), "little")
    return _exactly(pipe, length)


def _exactly(pipe: BinaryIO, count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until their end: (method, arguments) each; an error is an answer, too."""
    instance: Instance | None = None
    while True:
        try:
            data = receive(requests)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            name, arguments = pickle.loads(data)
            if instance is None:
                instance, answer = Instance(*arguments), (True, None)
            else:
                answer = True, getattr(instance, name)(*arguments)
        except Exception as error:  # one setup that fails must not end the search
            answer = False, f"{type(error).__name__}: {first_line(error)}"
        send(replies, pickle.dumps(answer))


def main() -> None:
    """Serve on the pipes of this process; whatever else prints goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which ends the pipe
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()

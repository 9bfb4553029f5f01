"""Sends requests to one model under load, and compares the answers when idle, under load and after."""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk.errors import UsageError
from vtk.profiling.compare import remarks, torch_reference
from vtk.profiling.server.answers import Expected, Sample, Verdict, sample_size
from vtk.profiling.server.client import NUMPY, Client, ModelInfo, RequestFailed
from vtk.profiling.server.config import ServerConfig
from vtk.profiling.server.images import check_size, image_spec, other_inputs, spread_bytes, to_pixels
from vtk.profiling.server.load import Run, closed_loop, open_loop
from vtk.profiling.server.pool import LEAST, Pool, pool_size
from vtk.profiling.server.result import ServerLevel
from vtk.profiling.stats import percentile
from vtk.runtime.source import Source
from vtk_export.gate.images import gate_images

IDLE = 4
"""Answers that are compared before and after each load, one at a time."""

WARMUP_S = 1.0

LEARN_S = 5.0
"""Without a reference the server's own answers when idle are the right ones; so long they are asked for, at most."""


class Traffic:
    """Requests to one model, and what their answers should be.

    Attributes:
        described: what answers are compared with.
        inputs: what is sent.
    """

    def __init__(self, client: Client, info: ModelInfo, config: ServerConfig, source: Source | None) -> None:
        self.client, self.info, self.config = client, info, config
        image = info.image()
        spec = image_spec(image.shape, config, source)
        kind = np.dtype(NUMPY[image.datatype])
        count = pool_size(spec.in_chans * spec.height * spec.width * kind.itemsize)
        images, what = gate_images(spec, count, chosen=None, seed=config.seed)
        self._expected: Expected | None = None
        self._weak = ""
        raw = image.datatype not in ("FP32", "FP16")
        if source is not None:
            if raw:
                raise UsageError(f"`{info.name}` takes raw images; --reference is for models that take normalised ones")
            check_size(image.shape, info.name, source)
            self._expect(torch_reference(source.model(), images), "fp16" if image.datatype == "FP16" else "fp32")
        self.described = "not compared (give --reference)"
        if source is not None:
            self.described = f"torch fp32 on the CPU of {source.name}{self._weak}"
        if raw:
            images = to_pixels(images, channels_last=image.shape[3] in (1, 3))
        self._compared = source is not None
        self._pool = Pool(spread_bytes(images.numpy(), kind))
        self._texts = other_inputs(info, image.name, config.task)
        # a server that kept the answers of an earlier run would look quick
        self._first = int.from_bytes(os.urandom(4), "little")
        self._numbers = itertools.count(self._first)
        self.inputs = f"{what}, {image.datatype}, no two requests equal, encoded before they are timed"

    def measure(self, level: ServerLevel) -> ServerLevel:
        """Compare when idle, warm up, load, compare again; the answers under load are compared after each window."""
        batch = level.batch
        try:
            if self._expected is None and (reason := self._learn(batch)):
                return self._mismatch(level, Verdict(1, 1), f"wrong answer, not timed: {reason}")
            idle = self._idle(batch)
        except RequestFailed as error:
            return replace(level, status="failed", reason=str(error), failed=1)
        if idle.wrong:
            return self._mismatch(level, idle, f"wrong answer, not timed: {idle}")
        warm, warm_up = self._run(replace(level, loop="closed", concurrency=level.concurrency or 4, rate=None),
                                  min(WARMUP_S, self.config.duration))  # fmt: skip
        if warm.wrong:
            return self._mismatch(level, idle.joined(warm), f"wrong answer, not timed: under load {warm}")
        before = self.client.counters(self.info)
        found, run = self._run(level, self.config.duration)
        after = self.client.counters(self.info)
        so_far = idle.joined(warm).joined(found)
        if found.wrong:
            return self._mismatch(level, so_far, f"wrong answer, not timed: under load {found}")
        level = replace(_summarise(level, run, self.config.stability), checked=so_far.checked)
        if warm_up.failed:
            told = level.reason or f"in the warm-up: {warm_up.failed[0]}"
            level = replace(level, failed=level.failed + len(warm_up.failed), reason=told)
        if before is not None and after is not None and (done := after.since(before)).requests > 0:
            level = replace(
                level, queue_ms=done.queue_ns / done.requests / 1e6, compute_ms=done.compute_ns / done.requests / 1e6,
                server_batch=done.images / done.executions if done.executions else None,
            )  # fmt: skip
        try:
            again = self._idle(batch)
        except RequestFailed as error:
            return replace(level, failed=level.failed + 1, reason=str(error))
        total = so_far.joined(again)
        if again.wrong:
            return self._mismatch(level, total, f"wrong answer, not timed: after the load {again}")
        return replace(level, checked=total.checked, max_diff=total.max_diff if self._compared else None)

    def _run(self, level: ServerLevel, duration_s: float) -> tuple[Verdict, Run]:
        """Load the server and judge a sample of its answers when the window is over."""
        expected = self._expected
        assert expected is not None
        sample = Sample(sample_size(4 * level.batch * expected.rows.shape[1]), self.config.seed)
        options: dict[str, Any] = {"make": self._maker(level.batch), "numbers": self._numbers, "sample": sample}
        if level.rate is not None:
            run = open_loop(self.client.infer, level.rate, duration_s, seed=self.config.seed, **options)
        else:
            run = closed_loop(self.client.infer, level.concurrency or 1, duration_s, **options)
        return self._judge(sample.kept, level.batch), run

    def _idle(self, batch: int) -> Verdict:
        """Judge a few answers of a server that does nothing else."""
        make = self._maker(batch)
        numbers = list(itertools.islice(self._numbers, IDLE))
        return self._judge([(number, self.client.infer(make(number))) for number in numbers], batch)

    def _judge(self, kept: list[tuple[int, Any]], batch: int) -> Verdict:
        assert self._expected is not None
        return self._expected.judge(kept, self._decode, lambda numbers: self._pool.rows(numbers, batch))

    def _learn(self, batch: int) -> str:
        """Take the answers to all images, asked for one request at a time, for the right ones; or say why one is not.

        Raises:
            RequestFailed: there is no answer.
        """
        make, rows = self._maker(batch), dict[int, Any]()
        end = time.perf_counter() + LEARN_S
        for number in self._numbers:
            index = self._pool.rows(number, batch).tolist()
            logits = self._decode(self.client.infer(make(number))).astype(np.float32)
            wide = next((len(row) for row in rows.values()), logits.shape[-1] if logits.ndim else 0)
            if logits.ndim != 2 or logits.shape != (batch, wide) or not logits.size:
                return f"the answer to {batch} images has shape {logits.shape}, not a row for each"
            if not np.isfinite(logits).all():
                return f"{int((~np.isfinite(logits)).sum())} outputs are NaN or infinite"
            rows.update(zip(index, logits, strict=True))
            full = len(rows) == len(self._pool)
            if full or (time.perf_counter() > end and all(i in rows for i in range(LEAST))):
                break
        known = next(n for n in (len(self._pool), 16, 8, LEAST) if all(i in rows for i in range(n)))
        self._pool.keep(known)
        # rounding depends on who else is in a batch, so half precision's bound
        self._expect(torch.from_numpy(np.stack([rows[i] for i in range(known)])), "fp16")
        self.described = (
            f"not compared with a reference (give --reference), but with the server's own answers when idle{self._weak}"
        )
        return ""

    def _expect(self, rows: Tensor, kind: str) -> None:
        self._expected = Expected(rows, kind)
        self._weak = "".join(f"; caution: {text}" for text in remarks(rows, kind))

    def _mismatch(self, level: ServerLevel, found: Verdict, reason: str) -> ServerLevel:
        bare = ServerLevel(level.batch, level.loop, level.concurrency, level.rate)
        worst = found.max_diff if self._compared else None
        return replace(
            bare, status="mismatch", reason=reason, max_diff=worst, checked=found.checked, wrong=found.wrong
        )  # fmt: skip

    def _maker(self, batch: int) -> Callable[[int], Any]:
        return lambda number: self.client.request(self.info, self._pool, number, batch, self._texts)

    def _decode(self, answer: Any) -> "np.ndarray[Any, Any]":
        found = self.client.decode(answer, self.info.logits())
        # boxes or maps, which no reference of ours gives, are compared as rows of numbers
        return found if self._compared or found.ndim == 2 or not found.size else found.reshape(len(found), -1)


def _summarise(level: ServerLevel, run: Run, stability_pct: float) -> ServerLevel:
    """Turn a run into numbers."""
    if not run.latencies:
        return replace(level, status="failed", reason=(run.failed or ["no answer"])[0], failed=len(run.failed))
    ms = [1000 * s for s in run.latencies]
    rate, differ = len(ms) / run.seconds, run.spread()
    return replace(
        level, requests=len(ms), failed=len(run.failed), reason=run.failed[0] if run.failed else "",
        p50_ms=percentile(ms, 50), p90_ms=percentile(ms, 90), p99_ms=percentile(ms, 99), mean_ms=sum(ms) / len(ms),
        service_p50_ms=percentile([1000 * s for s in run.service], 50), requests_per_second=rate,
        images_per_second=rate * level.batch, late=run.late / len(ms), spread=differ,
        stable=None if differ is None else 100 * differ <= stability_pct,
    )  # fmt: skip

"""``profile_server``: every batch size at every load, answers compared before and after."""

import datetime
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk import console
from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.filesets import open_folder
from vtk.options import expect
from vtk.packages import require
from vtk.profiling.compare import compare, remarks, torch_reference
from vtk.profiling.server.client import NUMPY, Client, ModelInfo, RequestFailed, choose_model, connect
from vtk.profiling.server.config import ServerConfig
from vtk.profiling.server.load import Run, closed_loop, open_loop
from vtk.profiling.server.result import ServerLevel, ServerResult
from vtk.profiling.server.search import search
from vtk.profiling.stats import percentile
from vtk.runtime.source import Source, open_source
from vtk_export.images import gate_images

PAYLOADS = 4
"""Different requests of each batch size, sent in turn: a server that keeps answers would look quick otherwise."""

WARMUP_S = 1.0


def profile_server(config: ServerConfig, *, command: str = "", show_progress: bool = True) -> ServerResult:
    """Drive a live server and measure it from outside.

    Args:
        config: options.
        command: kept in the report.
        show_progress: a bar on a terminal, lines elsewhere.

    Raises:
        UsageError: the model takes no images, or their size is not known.
        UnavailableError: nobody answers, there is no such model, or the package for the protocol is missing.
        DataError: the reference cannot be read, or ``out`` is not empty.
    """
    expect(config, ServerConfig, "profile_server")
    if config.out is None:
        return _drive(config, command, show_progress)
    from vtk.profiling.server.report import MARKS, write_report

    require("matplotlib")
    with open_folder(config.out, MARKS, command or "vtk profile", overwrite=config.overwrite):
        result = _drive(config, command, show_progress)
        write_report(result, config.out)
    return result


def _drive(config: ServerConfig, command: str, show_progress: bool) -> ServerResult:
    source = None if config.reference is None else open_source(config.reference, base=config.base)
    client = connect(config.server, config.protocol, config.timeout)
    try:
        info = choose_model(client, config.model)
        traffic = Traffic(client, info, config, source)
        levels: list[ServerLevel] = []
        stopped = False
        try:
            _measure_all(traffic, config, levels, show_progress)
        except KeyboardInterrupt:
            if not levels:
                raise
            stopped = True
    finally:
        client.close()
    result = ServerResult(
        server=config.server, protocol=config.protocol, model=info.name, version=info.version, platform=info.platform,
        reference=traffic.described, inputs=traffic.inputs, stability_pct=config.stability, levels=tuple(levels),
        budget_ms=config.budget_ms, stopped=stopped, command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return result


def _measure_all(traffic: "Traffic", config: ServerConfig, levels: list[ServerLevel], show: bool) -> None:
    """Add every load to ``levels`` as soon as it is measured."""
    sizes = sorted(config.batch_sizes)
    if config.searches:
        with console.progress("profile", len(sizes), unit="batch sizes", enabled=show) as bar:
            for batch in sizes:
                search(traffic.measure, batch, config.budget_ms or 0.0, levels)
                bar.advance(1, f"batch {batch}")
        return
    loads = [("closed", c, None) for c in config.clients] + [("open", None, r) for r in config.rate]
    plan = list(itertools.product(sizes, loads))
    with console.progress("profile", len(plan), unit="loads", enabled=show) as bar:
        for batch, (loop, concurrency, rate) in plan:
            level = ServerLevel(batch, loop, concurrency, rate)  # type: ignore[arg-type]
            levels.append(traffic.measure(level))
            bar.advance(1, f"batch {batch}, {level.load}")


class Traffic:
    """Requests to one model, and what their answers should be.

    Attributes:
        described: what answers are compared with.
        inputs: what is sent.
    """

    def __init__(self, client: Client, info: ModelInfo, config: ServerConfig, source: Source | None) -> None:
        self.client, self.info, self.config = client, info, config
        image = info.image()
        spec = _spec(image.shape, config, source)
        count = PAYLOADS * max(config.batch_sizes)
        self._images, what = gate_images(spec, min(count, 64), chosen=None, seed=config.seed)
        raw = image.datatype not in ("FP32", "FP16")
        if raw:
            self._images = _to_pixels(self._images, channels_last=image.shape[3] in (1, 3))
        self._image, self._kind = image.name, NUMPY[image.datatype]
        self._want: Tensor | None = None
        self.described = "not compared (give --reference)"
        if source is not None:
            if raw:
                raise UsageError(f"`{info.name}` takes raw images; --reference is for models that take normalised ones")
            self._want = torch_reference(source.model(), self._images)
            weak = "".join(f"; caution: {text}" for text in remarks(self._want))
            self.described = f"torch fp32 on the CPU of {source.name}{weak}"
        self._precision = "fp16" if image.datatype == "FP16" else "fp32"
        self.inputs = f"{what}, {image.datatype}, {PAYLOADS} different requests in turn, encoded before they are timed"

    def measure(self, level: ServerLevel) -> ServerLevel:
        """Compare, warm up, load, compare again."""
        rows = [self._rows(number, level.batch) for number in range(PAYLOADS)]
        payloads = [self.client.payload(self.info, self._tensors(index)) for index in rows]

        def send(number: int) -> Any:
            return self.client.infer(payloads[number % PAYLOADS])

        try:
            worst, reason = self._check(send, rows)
        except RequestFailed as error:
            return replace(level, status="failed", reason=str(error), failed=1)
        if reason:
            return replace(level, status="mismatch", reason=f"wrong answer, not timed: {reason}", max_diff=worst)
        closed_loop(send, level.concurrency or 4, min(WARMUP_S, self.config.duration))
        before = self.client.counters(self.info)
        run = self._load(send, level)
        after = self.client.counters(self.info)
        level = _summarise(level, run, self.config.stability)
        if before is not None and after is not None and (done := after.since(before)).requests > 0:
            level = replace(
                level, queue_ms=done.queue_ns / done.requests / 1e6, compute_ms=done.compute_ns / done.requests / 1e6,
                server_batch=done.images / done.executions if done.executions else None,
            )  # fmt: skip
        try:
            again, reason = self._check(send, rows)
        except RequestFailed as error:
            return replace(level, failed=level.failed + 1, reason=str(error))
        if reason:
            bare = ServerLevel(level.batch, level.loop, level.concurrency, level.rate)
            text = f"wrong answer, not timed: right at first, afterwards {reason}"
            return replace(bare, status="mismatch", reason=text, max_diff=again)
        return replace(level, max_diff=None if worst is None else max(worst, again or 0.0))

    def _load(self, send: Callable[[int], Any], level: ServerLevel) -> Run:
        if level.rate is not None:
            return open_loop(send, level.rate, self.config.duration, seed=self.config.seed)
        return closed_loop(send, level.concurrency or 1, self.config.duration)

    def _check(self, send: Callable[[int], Any], rows: list[Tensor]) -> tuple[float | None, str]:
        """Return the largest difference of the answers to all payloads, and why they are wrong, if they are."""
        worst: float | None = None
        for number, index in enumerate(rows):
            found = self.client.decode(send(number), self.info.logits())
            if self._want is None:
                if len(found) != len(index):
                    return None, f"{len(found)} rows for {len(index)} images"
                continue
            difference = compare(torch.from_numpy(found.astype(np.float32)), self._want[index], self._precision)
            worst = max(worst or 0.0, difference.max_diff or 0.0)
            if not difference.ok:
                return difference.max_diff, difference.reason
        return worst, ""

    def _rows(self, number: int, batch: int) -> Tensor:
        return (torch.arange(batch) + number * batch) % len(self._images)

    def _tensors(self, index: Tensor) -> dict[str, "np.ndarray[Any, Any]"]:
        found: dict[str, np.ndarray[Any, Any]] = {self._image: self._images[index].numpy().astype(self._kind)}
        if self._images.dtype == torch.uint8 and np.dtype(self._kind).kind in "iu":  # spread over the whole type
            found[self._image] *= np.iinfo(self._kind).max // 255 or 1
        for other in self.info.inputs:
            if other.name == self._image:
                continue
            if other.datatype != "BYTES" or self.config.task is None:
                raise UsageError(f"`{self.info.name}` has an input `{other.name}` ({other.datatype}) too; give --task")
            shape = (len(index), *(1 for _ in other.shape[1:]))
            found[other.name] = np.full(shape, self.config.task, dtype=np.object_)
        return found


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


def _spec(shape: tuple[int, ...], config: ServerConfig, source: Source | None) -> InputSpec:
    """Return size and normalisation of the images: of the reference, the server's description, or ``--img-size``.

    Raises:
        UsageError: none of them tells.
    """
    if source is not None:
        return source.card.input
    last = shape[3] in (1, 3) and shape[1] not in (1, 3)
    chans, height, width = (shape[3], *shape[1:3]) if last else shape[1:]
    given = config.img_size
    if given is not None:
        height, width = (given, given) if isinstance(given, int) else given
    if min(chans, height, width) < 1:
        raise UsageError(f"the server takes images of any size {list(shape)}; give --img-size, or --reference PACK")
    return InputSpec(height, width, chans, mean=(0.5,) * chans, std=(0.25,) * chans)


def _to_pixels(images: Tensor, *, channels_last: bool) -> Tensor:
    """Map normalised images to bytes, (n, H, W, C) where the server has channels last."""
    low, high = images.amin(), images.amax()
    pixels = (255 * (images - low) / (high - low).clamp_min(1e-6)).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous() if channels_last else pixels

"""One back-end at one batch size, and all batch sizes of one back-end: plain values that survive JSON."""

from dataclasses import dataclass
from typing import Literal

CellStatus = Literal["ok", "mismatch", "oom", "skipped", "failed"]
BackendStatus = Literal["measured", "unavailable", "mismatch", "oom", "failed"]


@dataclass(frozen=True)
class Cell:
    """One back-end at one batch size. Only ``status`` "ok" has latencies.

    Attributes:
        batch: images per call.
        status: what happened.
        reason: one line for every status but "ok".
        runs: timed calls.
        p50_ms: median, None below 20 runs.
        p90_ms: None below 100 runs.
        p99_ms: None below 1,000 runs.
        mean_ms: of all timed calls.
        min_ms: fastest call.
        images_per_second: images of all timed calls over their time.
        peak_memory_bytes: of torch's CUDA allocator during the timed calls; None on a CPU, and where it is not known.
            In files of version 2 and older, on a CPU, of the process.
        weight_bytes: counted, on a CPU: parameters and buffers, None where they cannot be.
        activation_bytes: counted, on a CPU: most that one call's images and activations take at once.
        process_bytes: peak resident memory of the whole process during the timed calls.
        load_s: seconds until the back-end was ready; repeated in each row of a back-end that is loaded once.
        first_s: seconds of the very first call at this batch size; for ``compile`` that is the compilation.
        max_diff: largest absolute difference of an output from the reference.
        tolerance: what ``max_diff`` (fp32) or the cosine (lower precisions) was held against, in words.
        windows: timed stretches that the runs were made in.
        stable: whether the medians of the last three windows agree within ``ProfileResult.stability_pct``.
        spread: by which fraction they differ.
        recompiles: programs that were compiled while the runs were timed.
        clock_before_mhz: of the GPU, before the first timed call.
        clock_after_mhz: after the last.
        energy_per_image_j: joules of the whole GPU during the timed runs.
        roofline: least time that the device's ceilings allow, over the typical time.
    """

    batch: int
    status: CellStatus = "ok"
    reason: str = ""
    runs: int = 0
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    mean_ms: float | None = None
    min_ms: float | None = None
    images_per_second: float | None = None
    peak_memory_bytes: int | None = None
    load_s: float | None = None
    first_s: float | None = None
    max_diff: float | None = None
    tolerance: str = ""
    windows: int = 0
    stable: bool | None = None
    spread: float | None = None
    recompiles: int = 0
    clock_before_mhz: int | None = None
    clock_after_mhz: int | None = None
    energy_per_image_j: float | None = None
    roofline: float | None = None
    weight_bytes: int | None = None
    activation_bytes: int | None = None
    process_bytes: int | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Weights and activations: the allocator's peak, or what was counted."""
        if self.peak_memory_bytes is not None:
            return self.peak_memory_bytes
        known = self.weight_bytes is not None and self.activation_bytes is not None
        return self.weight_bytes + self.activation_bytes if known else None  # type: ignore[operator]

    @property
    def typical_ms(self) -> float | None:
        """The median, or the mean where there were too few runs for a median."""
        return self.mean_ms if self.p50_ms is None else self.p50_ms


@dataclass(frozen=True)
class BackendResult:
    """One back-end and its cells, in the order they were measured.

    Attributes:
        name: as on the command line.
        status: "measured" when it was loaded, whatever became of its cells.
        reason: one line for every other status.
        provider: what really ran.
        device: where it ran.
        compiles: its first call at a batch size compiles a program for that size alone.
        arithmetic: of its products where it is not the profile's precision: ``tf32``, ``bf16``.
        prepare_s: seconds for making the file it loads (ONNX export and verification), None when it needs none.
        cells: one per batch size.
    """

    name: str
    status: BackendStatus = "measured"
    reason: str = ""
    provider: str = ""
    device: str = ""
    compiles: bool = False
    arithmetic: str = ""
    prepare_s: float | None = None
    cells: tuple[Cell, ...] = ()

    @property
    def load_s(self) -> float | None:
        """Seconds of the first load, None if it never loaded."""
        return next((c.load_s for c in self.cells if c.load_s is not None), None)

    @property
    def max_diff(self) -> float | None:
        """Largest output difference of all batch sizes."""
        return max((c.max_diff for c in self.cells if c.max_diff is not None), default=None)


@dataclass(frozen=True)
class Curve:
    """The timed cells of one back-end, by batch size.

    Attributes:
        index: of the back-end in the profile, which gives its colour.
        name: of the back-end.
        cells: those with a latency, ascending.
    """

    index: int
    name: str
    cells: list[Cell]

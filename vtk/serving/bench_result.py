"""What ``vtk tasks bench`` measured."""

from dataclasses import asdict, dataclass, field
from typing import Any

FUSED = ("bank, fused", "separate, fused")
GRAPHED = ("bank, fused+graph", "separate, fused+graph")
"""Sides of a comparison that are not always there."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison at one batch: medians over rounds."""

    latency_ms: float
    images_per_s: float


@dataclass(frozen=True)
class BenchCell:
    """Both sides at one number of images.

    Attributes:
        images: in one call, of all tasks.
        bank: all tasks in one call.
        separate: a model for each task, one after the other.
        single: one model of each image size for all images of that size, as if they were one task's.
        speedup: median over rounds of the separate models' time by the bank's.
        of_single: likewise of the single model's time by the bank's: its throughput as a part of that one's.
        max_difference: of logits, relative to the largest, of all sides that compute the tasks' own.
        fused: further sides, by name: `FUSED`, and on CUDA in fp16 and bf16 `GRAPHED`.
        fused_speedup: of each of them, as ``speedup``.
    """

    images: int
    bank: Side
    separate: Side
    single: Side
    speedup: float
    of_single: float
    max_difference: float
    fused: dict[str, Side] = field(default_factory=dict)
    fused_speedup: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchResult:
    """What was measured, with the bytes of weights that each side holds.

    ``not_fused`` says why there are no fused sides.
    """

    tasks: int
    device: str
    dtype: str
    rounds: int
    bank_bytes: int
    bank_host_bytes: int
    separate_bytes: int
    not_fused: str | None = None
    cells: list[BenchCell] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

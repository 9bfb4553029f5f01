"""Results of ``vtk tasks bench``: their table and JSON."""

from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN = ("bank", "separate models", "as one task")
"""Sides of a comparison with timm's own blocks; the bank is created with ``fused=False``."""

FUSED = ("bank, fused", "separate, fused", "as one task, fused")
GRAPHED = ("bank, fused+graph", "separate, fused+graph", "one, fused+graph")
"""Sides of models that can be fused; the second on CUDA in fp16 and bf16."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison at one batch: medians over rounds.

    Attributes:
        latency_ms: of one call with all images.
        images_per_s: throughput of such calls.
        speedup: time of the separate models divided by the time of this side: the median of the rounds' quotients,
            which a change of the machine's speed between rounds does not move, so not that of two medians.
        of_single: of a bank: time of "as one task" in the same form divided by its own, likewise; the fraction of the
            throughput that sharing could reach at most.
    """

    latency_ms: float
    images_per_s: float
    speedup: float
    of_single: float | None = None


@dataclass(frozen=True)
class BenchCell:
    """All sides at one number of images.

    Attributes:
        images: in one call, of all tasks.
        sides: `PLAIN`, and where the model can be folded `FUSED`; on CUDA in fp16 and bf16 also `GRAPHED`. Of each
            three the first is all tasks in one call, the second a model for each task, one after the other, and the
            third one model of each image size for all images of that size, as if they were one task's.
        max_difference: of logits, relative to the largest, of all sides that compute the tasks' own.
    """

    images: int
    sides: dict[str, Side]
    max_difference: float


@dataclass(frozen=True)
class BenchResult:
    """All measurements, and the bytes of weights of each side.

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


@dataclass(frozen=True)
class Bytes:
    """Bytes of weights.

    Attributes:
        one_model: a task's own model in the bank's precision.
        bank: all that the bank holds, on the device and on the host.
        bank_base: of it what its tasks share.
        bank_factors: of it the tasks' own, factors, tables and classifiers.
        bank_merged: of it merged copies of much used tasks.
        bank_host: of it what is on the host beside: the base's stem and ends, and on a GPU what is paged.
        separate: one model for each task, by the bytes of one.
        packs: files of all packs.
    """

    one_model: int
    bank: int
    bank_base: int
    bank_factors: int
    bank_merged: int
    bank_host: int
    separate: int
    packs: int


@dataclass(frozen=True)
class Adding:
    """Milliseconds that adding a pack to a bank took.

    Attributes:
        first_ms: of the first pack, with the base.
        median_ms: of all others.
        early_ms: of the ten after the first, the median.
        late_ms: of the last ten, the median.
    """

    first_ms: float
    median_ms: float
    early_ms: float
    late_ms: float


@dataclass(frozen=True)
class SyntheticSide:
    """One side at one number of images: medians over rounds, and medians of the rounds' quotients.

    Attributes:
        latency_ms: of one call with all images.
        images_per_s: throughput of such calls.
        of_one: its time divided by that of one model for all images.
        speedup: time of the separate models divided by its own.
    """

    latency_ms: float
    images_per_s: float
    of_one: float
    speedup: float


@dataclass(frozen=True)
class SyntheticCell:
    """All sides at one number of images.

    Attributes:
        images: in one call.
        tasks: whose they are, drawn anew in every round from all tasks.
        sides: "bank", "separate models", "one model", and where not every task is in a call "bank, same tasks", whose
            calls are of the first tasks in every round, and "bank of these only", which holds no others.
        idle: time of "bank, same tasks" divided by that of "bank of these only": what idle tasks cost.
        max_difference: of the bank's logits from each task's own model, relative to the largest.
    """

    images: int
    tasks: int
    sides: dict[str, SyntheticSide]
    idle: float | None
    max_difference: float


@dataclass(frozen=True)
class SyntheticResult:
    """All measurements of a bank of synthetic tasks.

    ``models_held`` separate models were timed, in turn, in place of one for each task.
    """

    tasks: int
    ranks: tuple[int, ...]
    pack_dtype: str
    model: str
    size: tuple[int, int]
    classes: int
    device: str
    dtype: str
    rounds: int
    models_held: int
    bytes: Bytes
    adding: Adding
    cells: list[SyntheticCell] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

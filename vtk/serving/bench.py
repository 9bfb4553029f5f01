"""A bank against as many separate models: latency, images a second and bytes, side by side in one process.

A third side bounds what any sharing could reach: the same images as if they were all of one task.
"""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import VerificationError
from vtk.serving.bank import TaskBank
from vtk.serving.config import BenchConfig
from vtk.serving.entry import n_bytes
from vtk.tasks.load import load_task

DTYPES = {
    "auto": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference between both sides' logits, relative to the largest logit: speed of wrong results is no speed."""


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
        max_difference: of logits, relative to the largest.
    """

    images: int
    bank: Side
    separate: Side
    single: Side
    speedup: float
    of_single: float
    max_difference: float


@dataclass(frozen=True)
class BenchResult:
    """What was measured, with the bytes of weights that each side holds."""

    tasks: int
    device: str
    dtype: str
    rounds: int
    bank_bytes: int
    bank_host_bytes: int
    separate_bytes: int
    cells: list[BenchCell] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def bench(config: BenchConfig) -> BenchResult:
    """Measure a bank against separate models; outputs are compared first.

    Raises:
        UsageError, DataError: packs that a bank does not take.
        VerificationError: both sides do not agree.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    bank = TaskBank(config.base, device=device, dtype=DTYPES[config.dtype], max_gpu_bytes=config.max_gpu_bytes)
    models: dict[str, nn.Module] = {}
    for pack in config.pack:
        task = load_task(pack, base=config.base)
        for _ in range(config.copies):
            name = f"{len(models)}:{pack.name}"
            models[name] = copy.deepcopy(task.model).to(bank.device, bank.dtype)
            bank.add(name, dataclasses.replace(task, model=copy.deepcopy(task.model)))
    memory = bank.memory()
    result = BenchResult(
        len(models), str(bank.device), str(bank.dtype).removeprefix("torch."), config.rounds, memory.device_bytes,
        memory.host_bytes, sum(n_bytes(list(m.state_dict().values())) for m in models.values()),
    )  # fmt: skip
    for total in config.batch or (config.images_per_task * len(models),):
        result.cells.append(_cell(bank, models, _images(bank, total), config.rounds))
    return result


def in_turns(
    sides: Mapping[str, Callable[[], object]], wait: Callable[[], None], rounds: int
) -> dict[str, list[float]]:
    """Return milliseconds per side and round; two rounds before warm up.

    The sides take turns, so that a change of the machine's speed meets both.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 2):
        for name, call in sides.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if i >= 2:
                found[name].append(1e3 * (time.perf_counter() - start))
    return found


def compare(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference of logits, relative to each task's largest.

    Raises:
        VerificationError: it is more than rounding explains.
    """
    largest = 0.0
    for name, logits in found.items():
        scale = float(wanted[name].abs().max().clamp(min=1e-6))
        difference = float((logits.double() - wanted[name].double()).abs().max()) / scale
        if not difference <= TOLERANCE[logits.dtype]:
            raise VerificationError(
                f"task `{name}`: the bank's logits differ from its own model's by {difference:.2g} of the largest, "
                f"{TOLERANCE[logits.dtype]:g} is allowed; nothing was timed: please report this"
            )
        largest = max(largest, difference)
    return largest


def _cell(bank: TaskBank, models: Mapping[str, nn.Module], images: Mapping[str, Tensor], rounds: int) -> BenchCell:
    by_size: dict[torch.Size, list[str]] = {}
    for name, batch in images.items():
        by_size.setdefault(batch.shape[1:], []).append(name)
    joined = [(models[names[0]], torch.cat([images[n] for n in names])) for names in by_size.values()]

    def separate() -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: models[name](batch) for name, batch in images.items()}

    def single() -> list[Tensor]:
        with torch.no_grad():
            return [model(batch) for model, batch in joined]

    def wait() -> None:
        if bank.device.type == "cuda":
            torch.cuda.synchronize(bank.device)

    difference = compare(bank(images), separate())
    times = in_turns({"bank": lambda: bank(images), "separate": separate, "single": single}, wait, rounds)
    total = sum(map(len, images.values()))
    sides = {name: _side(found, total) for name, found in times.items()}
    return BenchCell(
        total, **sides, speedup=_ratio(times["separate"], times["bank"]),
        of_single=_ratio(times["single"], times["bank"]), max_difference=difference,
    )  # fmt: skip


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _side(times: Sequence[float], images: int) -> Side:
    latency = statistics.median(times)
    return Side(latency, 1e3 * images / latency)


def _images(bank: TaskBank, total: int) -> dict[str, Tensor]:
    """Make random images, as evenly spread over the tasks as goes."""
    generator, tasks = torch.Generator().manual_seed(0), bank.tasks
    share, rest = divmod(total, len(tasks))
    found = {}
    for i, (name, info) in enumerate(tasks.items()):
        shape = (share + (i < rest), info.in_chans, info.height, info.width)
        found[name] = torch.randn(shape, generator=generator).to(bank.device, bank.dtype)
    return found

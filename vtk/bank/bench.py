"""Compares a bank with as many separate models: latency, images per second and bytes, in one process.

A third side is the upper bound of sharing: the same images as if all were of one task. All three are measured with
timm's own blocks, fused, and on CUDA as graphs.
"""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.bank.bank import TaskBank
from vtk.bank.bench_result import FUSED, GRAPHED, PLAIN, BenchCell, BenchResult, Side
from vtk.bank.config import BenchConfig
from vtk.bank.folded import n_bytes
from vtk.errors import UsageError, VerificationError
from vtk.fused import fuse
from vtk.models.devices import DTYPES
from vtk.packs.load import Task, load_task

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference between both sides' logits, relative to the largest logit."""


@dataclass(frozen=True)
class Pair:
    """A bank and as many separate models, in one form.

    Attributes:
        names: of three sides: the bank, the models, and one of the models for all images of its size.
        bank: of all tasks.
        models: by task.
    """

    names: tuple[str, str, str]
    bank: TaskBank
    models: Mapping[str, nn.Module]

    def each(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the logits of each task's own model."""
        with torch.no_grad():
            return {name: self.models[name](batch) for name, batch in images.items()}

    def sides(self, images: Mapping[str, Tensor]) -> dict[str, Callable[[], object]]:
        """Return the calls to time, by name."""
        by_size: dict[torch.Size, list[str]] = {}
        for name, batch in images.items():
            by_size.setdefault(batch.shape[1:], []).append(name)
        joined = [(self.models[same[0]], torch.cat([images[n] for n in same])) for same in by_size.values()]

        def single() -> list[Tensor]:
            with torch.no_grad():
                return [model(batch) for model, batch in joined]

        return dict(zip(self.names, (partial(self.bank, images), partial(self.each, images), single), strict=True))


def bench(config: BenchConfig) -> BenchResult:
    """Measure a bank and separate models; their logits are compared first.

    Raises:
        UsageError, DataError: a bank does not take the packs.
        VerificationError: the logits of the two sides differ.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    tasks = {pack: load_task(pack, base=config.base) for pack in config.pack}
    bank = _bank(config, tasks, device, fused=False)
    models: dict[str, nn.Module] = {
        name: copy.deepcopy(tasks[pack].model).to(bank.device, bank.dtype) for name, pack in _names(config)
    }
    memory = bank.memory()
    fused, reason = _fused(config, tasks, bank)
    result = BenchResult(
        len(models), str(bank.device), str(bank.dtype).removeprefix("torch."), config.rounds, memory.device_bytes,
        memory.host_bytes, sum(n_bytes(list(m.state_dict().values())) for m in models.values()), reason,
    )  # fmt: skip
    for total in config.batch or ((config.images_per_task or 1) * len(models),):
        result.cells.append(_cell([Pair(PLAIN, bank, models), *fused], _images(bank, total), config.rounds))
    return result


def _names(config: BenchConfig) -> list[tuple[str, Path]]:
    packs = [pack for pack in config.pack for _ in range(config.copies)]
    return [(f"{i}:{pack.name}", pack) for i, pack in enumerate(packs)]


def _bank(config: BenchConfig, tasks: Mapping[Path, Task], device: str, **options: Any) -> TaskBank:
    dtype = {**DTYPES, "fp64": torch.float64}.get(config.dtype)  # `auto`: None
    bank = TaskBank(config.base, device=device, dtype=dtype, max_bytes=config.budget, **options)
    for name, pack in _names(config):
        bank.add(name, dataclasses.replace(tasks[pack], model=copy.deepcopy(tasks[pack].model)))
    return bank


def _fused(config: BenchConfig, tasks: Mapping[Path, Task], bank: TaskBank) -> tuple[list[Pair], str | None]:
    """Return the fused forms, or none and the reason."""
    device, found = str(bank.device), list[Pair]()
    try:
        for names, graphs in ((FUSED, False), (GRAPHED, True)):
            if graphs and not (bank.device.type == "cuda" and bank.dtype.itemsize == 2):
                break
            models = {}
            for name, pack in _names(config):
                models[name] = fuse(tasks[pack].model, bank.dtype, keep_source=False).to(bank.device)
                models[name].graphs = graphs
            found.append(Pair(names, _bank(config, tasks, device, fused=True, graphs=graphs), models))
    except UsageError as error:
        return [], str(error)
    return found, None


def in_turns(
    sides: Mapping[str, Callable[[], object]], wait: Callable[[], None], rounds: int
) -> dict[str, list[float]]:
    """Return milliseconds per side and round, after two warm-up rounds.

    The sides alternate, so that a change of the machine's speed affects all of them.
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
        VerificationError: it is larger than rounding explains.
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


def _cell(pairs: Sequence[Pair], images: Mapping[str, Tensor], rounds: int) -> BenchCell:
    plain, *fused = pairs
    device = plain.bank.device

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wanted = plain.each(images)
    compared = [pair.bank(images) for pair in pairs] + [pair.each(images) for pair in fused]
    difference = max(compare(logits, wanted) for logits in compared)
    times = in_turns({name: call for pair in pairs for name, call in pair.sides(images).items()}, wait, rounds)
    total = sum(map(len, images.values()))
    single = {pair.names[0]: pair.names[2] for pair in pairs}
    sides = {}
    for name, found in times.items():
        latency = statistics.median(found)
        of_single = median_quotient(times[single[name]], found) if name in single else None
        sides[name] = Side(latency, 1e3 * total / latency, median_quotient(times[PLAIN[1]], found), of_single)
    return BenchCell(total, sides, difference)


def median_quotient(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _images(bank: TaskBank, total: int) -> dict[str, Tensor]:
    """Return random images, spread evenly over the tasks."""
    generator, tasks = torch.Generator().manual_seed(0), bank.tasks
    share, rest = divmod(total, len(tasks))
    found = {}
    for i, (name, info) in enumerate(tasks.items()):
        shape = (share + (i < rest), info.in_chans, info.height, info.width)
        found[name] = torch.randn(shape, generator=generator).to(bank.device, bank.dtype)
    return found

"""A bank against as many separate models: latency, images a second and bytes, side by side in one process.

A third side bounds what any sharing could reach: the same images as if they were all of one task. Further sides are the
bank and the separate models fused, and on CUDA replayed as graphs.
"""

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import UsageError, VerificationError
from vtk.fused import fuse
from vtk.serving.bank import TaskBank
from vtk.serving.bench_result import FUSED, GRAPHED, BenchCell, BenchResult, Side
from vtk.serving.config import BenchConfig
from vtk.serving.folded import n_bytes
from vtk.tasks.load import Task, load_task

DTYPES = {
    "auto": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference between both sides' logits, relative to the largest logit: speed of wrong results is no speed."""


Call = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Images of each task in, logits out."""


def bench(config: BenchConfig) -> BenchResult:
    """Measure a bank against separate models; outputs are compared first.

    Raises:
        UsageError, DataError: packs that a bank does not take.
        VerificationError: both sides do not agree.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    tasks = {pack: load_task(pack, base=config.base) for pack in config.pack}
    bank = _bank(config, tasks, device, fused=False)
    models: dict[str, nn.Module] = {
        name: copy.deepcopy(tasks[pack].model).to(bank.device, bank.dtype) for name, pack in _names(config)
    }
    memory = bank.memory()
    further, reason = _fused_calls(config, tasks, bank)
    result = BenchResult(
        len(models), str(bank.device), str(bank.dtype).removeprefix("torch."), config.rounds, memory.device_bytes,
        memory.host_bytes, sum(n_bytes(list(m.state_dict().values())) for m in models.values()), reason,
    )  # fmt: skip
    for total in config.batch or (config.images_per_task * len(models),):
        result.cells.append(_cell(bank, models, further, _images(bank, total), config.rounds))
    return result


def _names(config: BenchConfig) -> list[tuple[str, Path]]:
    packs = [pack for pack in config.pack for _ in range(config.copies)]
    return [(f"{i}:{pack.name}", pack) for i, pack in enumerate(packs)]


def _bank(config: BenchConfig, tasks: Mapping[Path, Task], device: str, **options: Any) -> TaskBank:
    bank = TaskBank(
        config.base, device=device, dtype=DTYPES[config.dtype], max_gpu_bytes=config.max_gpu_bytes, **options
    )
    for name, pack in _names(config):
        bank.add(name, dataclasses.replace(tasks[pack], model=copy.deepcopy(tasks[pack].model)))
    return bank


def _fused_calls(config: BenchConfig, tasks: Mapping[Path, Task], bank: TaskBank) -> tuple[dict[str, Call], str | None]:
    """Return the fused sides, or none and why."""
    device, calls = str(bank.device), dict[str, Call]()
    try:
        for names, graphs in ((FUSED, False), (GRAPHED, True)):
            if graphs and not (bank.device.type == "cuda" and bank.dtype.itemsize == 2):
                break
            models = {}
            for name, pack in _names(config):
                models[name] = fuse(tasks[pack].model, bank.dtype, keep_source=False).to(bank.device)
                models[name].graphs = graphs
            calls[names[0]] = _bank(config, tasks, device, fused=True, graphs=graphs)
            calls[names[1]] = partial(_each, models)
    except UsageError as error:
        return {}, str(error)
    return calls, None


def _each(models: Mapping[str, nn.Module], images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: models[name](batch) for name, batch in images.items()}


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


def _cell(
    bank: TaskBank,
    models: Mapping[str, nn.Module],
    further: Mapping[str, Call],
    images: Mapping[str, Tensor],
    rounds: int,
) -> BenchCell:
    by_size: dict[torch.Size, list[str]] = {}
    for name, batch in images.items():
        by_size.setdefault(batch.shape[1:], []).append(name)
    joined = [(models[names[0]], torch.cat([images[n] for n in names])) for names in by_size.values()]

    def single() -> list[Tensor]:
        with torch.no_grad():
            return [model(batch) for model, batch in joined]

    def wait() -> None:
        if bank.device.type == "cuda":
            torch.cuda.synchronize(bank.device)

    wanted, every = _each(models, images), list[Call]([bank, *further.values()])
    difference = max(compare(call(images), wanted) for call in every)
    times = in_turns(
        {
            "bank": partial(bank, images), "separate": partial(_each, models, images), "single": single,
            **{name: partial(call, images) for name, call in further.items()},
        }, wait, rounds,
    )  # fmt: skip
    total = sum(map(len, images.values()))
    sides = {name: _side(found, total) for name, found in times.items()}
    return BenchCell(
        total, sides["bank"], sides["separate"], sides["single"], speedup=_ratio(times["separate"], times["bank"]),
        of_single=_ratio(times["single"], times["bank"]), max_difference=difference,
        fused={name: sides[name] for name in further},
        fused_speedup={name: _ratio(times["separate"], times[name]) for name in further},
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

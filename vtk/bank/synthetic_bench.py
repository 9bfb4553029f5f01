"""Measures a bank of many synthetic tasks of low rank: bytes, latency, images per second, and the time of an add.

Compared are as many models of their own and one model that takes all images. The tasks of a call are drawn anew in
every round, from all of them, so that none is favoured by caches; all sides get the same images of the same tasks.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vtk import console
from vtk.bank.architectures import check_architecture
from vtk.bank.bank import TaskBank
from vtk.bank.bench import compare, median_quotient
from vtk.bank.bench_result import Adding, Bytes, SyntheticCell, SyntheticResult, SyntheticSide
from vtk.bank.config import BATCH, MODEL, RANK, BenchConfig
from vtk.bank.folded import n_bytes
from vtk.errors import UsageError
from vtk.formats import save_tensors
from vtk.fused import fuse
from vtk.models.create import Created, build_model
from vtk.models.devices import DTYPES
from vtk.models.inputs import blank_model
from vtk.packs.cards import pack_bytes
from vtk.packs.load import load_task
from vtk.packs.synthetic import synthetic_start, write_synthetic

MOST_MODELS = 4
"""Separate models that are held at once; where there are more tasks, these take turns in their place."""

_WARM_UP = 2
_EDGE = 10
"""Adds at the beginning and at the end that are compared."""


@dataclass(frozen=True)
class _Subject:
    """What is measured.

    Attributes:
        bank: of all tasks.
        packs: by task.
        models: of some tasks.
        base: of the packs, for loading one by itself.
    """

    bank: TaskBank
    packs: Mapping[str, Path]
    models: Mapping[str, nn.Module]
    base: Path | None


def bench_synthetic(config: BenchConfig) -> SyntheticResult:
    """Make packs in a folder that is deleted at the end, and measure a bank of them; logits are compared first.

    Raises:
        UsageError, DataError, BaseError: the model, its base or the pack cannot be used, or a bank does not take it.
        VerificationError: the bank's logits differ from a task's own model.
    """
    assert config.tasks is not None
    with tempfile.TemporaryDirectory(prefix="vtk-bench-") as folder:
        start, base = _start(config, Path(folder))
        packs = _write(config, start, Path(folder))
        device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
        bank, adding = _bank(config, packs, base, device)
        held = dict(itertools.islice(packs.items(), MOST_MODELS))
        models = {name: _alone(pack, base, bank) for name, pack in held.items()}
        one = next(iter(models.values()))
        subject = _Subject(bank, packs, models, base)
        each = n_bytes(list(start.model.to(bank.dtype).state_dict().values()))
        sizes = config.batch or ((config.images_per_task or 0) * config.tasks or BATCH,)
        cells = [_cell(config, subject, one, images, base) for images in sizes]
        memory = bank.memory()  # with the merged copies that these calls made
        return SyntheticResult(
            tasks=config.tasks, ranks=config.rank or (RANK,), pack_dtype=config.pack_dtype,
            model=start.spec.name, size=start.input.size, classes=config.task_classes, device=str(bank.device),
            dtype=str(bank.dtype).removeprefix("torch."), rounds=config.rounds, models_held=len(models), adding=adding,
            cells=cells, bytes=Bytes(
                one_model=each, bank=memory.total_bytes - memory.graph_bytes, bank_base=memory.base_bytes,
                bank_factors=memory.factor_bytes, bank_merged=memory.merged_bytes, bank_host=memory.host_bytes,
                separate=each * config.tasks, packs=sum(map(pack_bytes, packs.values())),
            ),
        )  # fmt: skip


def _start(config: BenchConfig, folder: Path) -> tuple[Created, Path | None]:
    """Return the model that all packs start from, and the file of its base, None where packs find it themselves."""
    classes = config.task_classes
    if config.pack:
        task = load_task(config.pack[0], base=config.base)
        return synthetic_start(task, classes=classes, size=config.img_size), config.base
    name, base = config.model or MODEL, config.base
    check_architecture(blank_model(name), name)
    if base is None:
        base = folder / "base.safetensors"
        blank = build_model(name, num_classes=classes, pretrained=False, seed=config.seed)
        save_tensors(base, {k: v.contiguous() for k, v in blank.model.state_dict().items()})
    return build_model(name, num_classes=classes, weights=base, img_size=config.img_size), base


def _write(config: BenchConfig, start: Created, folder: Path) -> dict[str, Path]:
    assert config.tasks is not None
    packs, ranks = {}, itertools.cycle(config.rank or (RANK,))
    with console.progress("packs", config.tasks, unit="packs") as tracker:
        for i in range(config.tasks):
            path = folder / f"task{i:04d}"
            write_synthetic(path, start, rank=next(ranks), dtype=config.pack_dtype, seed=config.seed + i)
            packs[path.name] = path
            tracker.advance()
    return packs


def _bank(config: BenchConfig, packs: Mapping[str, Path], base: Path | None, device: str) -> tuple[TaskBank, Adding]:
    """Return a bank of all packs, and how long adding them took."""
    dtype = {**DTYPES, "fp64": torch.float64}.get(config.dtype)  # `auto`: None
    bank, took = TaskBank(base, device=device, dtype=dtype, max_bytes=config.budget), []
    with console.progress("adding", len(packs), unit="packs") as tracker:
        for name, pack in packs.items():
            start = time.perf_counter()
            bank.add(name, pack)
            took.append(1e3 * (time.perf_counter() - start))
            tracker.advance()
    later = took[1:] or took
    return bank, Adding(
        took[0], statistics.median(later), statistics.median(later[:_EDGE]), statistics.median(later[-_EDGE:])
    )


def _alone(pack: Path, base: Path | None, bank: TaskBank) -> nn.Module:
    """Return a task's own model in the form that a bank has: fused, where it can be."""
    model = load_task(pack, base=base).model
    try:
        return fuse(model, bank.dtype, keep_source=False).to(bank.device)
    except UsageError:
        return model.to(bank.device, bank.dtype)


def _cell(config: BenchConfig, subject: _Subject, one: nn.Module, images: int, base: Path | None) -> SyntheticCell:
    bank, names = subject.bank, list(subject.packs)
    per_call = min(images, len(names))
    info = next(iter(bank.tasks.values()))
    generator = torch.Generator().manual_seed(config.seed)
    shape = (images, info.in_chans, info.height, info.width)
    pixels = torch.randn(shape, generator=generator).to(bank.device, bank.dtype)
    few = None
    if per_call < len(names):
        few = _bank(config, {name: subject.packs[name] for name in names[:per_call]}, base, str(bank.device))[0]
    difference = _compare(subject, _split(names[:per_call], pixels))
    sides = _sides(subject, one, few, pixels)
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
    drawn = itertools.cycle(order)
    for i in range(config.rounds + _WARM_UP):
        tasks = list(itertools.islice(drawn, per_call))
        turns = list(sides.items())
        for name, call in turns[i % len(turns) :] + turns[: i % len(turns)]:
            took = _timed(call, tasks, bank.device)
            if i >= _WARM_UP:
                times[name].append(took)
    found = {}
    for name, ms in times.items():
        latency = statistics.median(ms)
        found[name] = SyntheticSide(
            latency, 1e3 * images / latency, median_quotient(ms, times["one model"]),
            median_quotient(times["separate models"], ms),
        )  # fmt: skip
    idle = None if few is None else median_quotient(times["bank, same tasks"], times["bank of these only"])
    return SyntheticCell(images, per_call, found, idle, difference)


def _sides(
    subject: _Subject, one: nn.Module, few: TaskBank | None, pixels: Tensor
) -> dict[str, Callable[[Sequence[str]], object]]:
    """Return the calls to time, by name; each takes the names of the tasks."""
    bank, models = subject.bank, list(subject.models.values())
    fixed = list(itertools.islice(subject.packs, 0 if few is None else len(few.tasks)))

    def separate(tasks: Sequence[str]) -> list[Tensor]:
        turns = itertools.cycle(models)
        with torch.no_grad():
            return [next(turns)(batch) for batch in _split(tasks, pixels).values()]

    def single(tasks: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return one(pixels)  # type: ignore[no-any-return]

    sides: dict[str, Callable[[Sequence[str]], object]] = {"bank": lambda tasks: bank(_split(tasks, pixels))}
    if few is not None:
        sides["bank, same tasks"] = lambda tasks: bank(_split(fixed, pixels))
        sides["bank of these only"] = lambda tasks: few(_split(fixed, pixels))
    return {**sides, "separate models": separate, "one model": single}


def _split(tasks: Sequence[str], pixels: Tensor) -> dict[str, Tensor]:
    """Spread images evenly over tasks."""
    return dict(zip(tasks, pixels.tensor_split(len(tasks)), strict=True))


def _timed(call: Callable[[Sequence[str]], object], tasks: Sequence[str], device: torch.device) -> float:
    """Return the milliseconds of a call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call(tasks)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def _compare(subject: _Subject, images: Mapping[str, Tensor]) -> float:
    """Compare the bank's logits with each task's own merged model, one at a time; see `vtk.bank.bench.compare`."""
    found, largest = subject.bank(images), 0.0
    for name, batch in images.items():
        with torch.no_grad():
            model = load_task(subject.packs[name], base=subject.base).model.to(batch.device, batch.dtype)
            largest = max(largest, compare({name: found[name]}, {name: model(batch)}))
    return largest

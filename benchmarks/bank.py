"""Stage ``bank``: many tasks of one base in one call, against a fused model in a CUDA graph for each task.

All tasks are ViT-B/16 at 224 px with classifiers of different sizes, their weights random. Logits are compared first;
then all sides run in turns, round by round: the bank as it is, fused, fused in a CUDA graph, and paged; timm's models;
and fused models, which start their graphs one after the other. Then tasks kept as factors, see `_bank_factors`.

    python benchmarks/bank.py --out DIR --seconds 220
"""

import copy
import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _bank_factors
import _rows
import _stage
import torch
from _attempts import Attempts
from _store import Deadline, Store, finish
from torch import Tensor, nn

from vtk.bank import TaskBank
from vtk.bank.bench import in_turns
from vtk.bank.stacks import StackStore
from vtk.fused import fuse

KEY = ("model", "px", "tasks", "images", "provider")
BANK, BANK_FUSED, BANK_GRAPHED = "bank", "bank fused", "bank fused+graph"
PAGED, PLAIN, GRAPHED = "bank fused, half of it paged in", "timm", "fused+graph"
CASES = ((16, 1, 3.0), (64, 1, 4.0), (8, 8, None))
"""Tasks, images of each, and how many times quicker than `GRAPHED` `BANK_GRAPHED` must be."""

TOLERANCE = 6e-2
"""Largest difference of logits in bf16, relative to the largest."""


def make_tasks(folder: Path, smoke: bool) -> list[object]:
    """Write two packs of one random base and return them loaded."""
    from vtk.card import Card
    from vtk.models.create import build_model
    from vtk.packs import load_task, save_task, store_base

    name = "vit_tiny_patch16_224" if smoke else "vit_base_patch16_224"
    kwargs = {"depth": 2, "embed_dim": 64, "num_heads": 2} if smoke else {}
    tasks, base = [], None
    for i, classes in enumerate((37, 196)):
        created = build_model(
            name, num_classes=classes, img_size=32 if smoke else 224, pretrained=False, kwargs=kwargs, base=base
        )
        base = created.base
        state = {k: v.clone() for k, v in created.model.state_dict().items()}
        trained = [k for k in state if ".attn." in k or k.startswith("head.")]
        torch.manual_seed(i)
        for key in trained:
            state[key] += 0.02 * torch.randn_like(state[key])
        card = Card(created.spec, created.input, tuple(map(str, range(classes))))
        save_task(folder / str(i), state=state, created=created, card=card, trained=trained)
        file = store_base(base)
        tasks.append(load_task(folder / str(i), base=file))
    return tasks


def make_bank(tasks: list, count: int, device: torch.device, **options: object) -> TaskBank:
    """Return a bank of so many tasks."""
    bank = TaskBank(device=device, **options)
    for i in range(count):
        task = tasks[i % len(tasks)]
        bank.add(str(i), dataclasses.replace(task, model=copy.deepcopy(task.model)))
    return bank


def sides(tasks: list, count: int, each: int, device: torch.device) -> tuple[dict[str, Callable[[], object]], dict]:
    """Return the calls to time and the bytes of weights that each side holds; the outputs agree."""
    cuda = device.type == "cuda"
    banks = {
        BANK: make_bank(tasks, count, device, fused=False),
        BANK_FUSED: make_bank(tasks, count, device, fused=True, graphs=False),
    }
    if cuda:
        banks[BANK_GRAPHED] = make_bank(tasks, count, device, fused=True, graphs=True)
    whole = banks[BANK_FUSED].memory().device_bytes
    # all fit; half is let go before each call
    paged = banks[PAGED] = make_bank(tasks, count, device, fused=True, graphs=False, max_gpu_bytes=whole)
    dtype, size = paged.dtype, tasks[0].card.input.size
    models: dict[str, nn.Module] = {
        str(i): copy.deepcopy(tasks[i % len(tasks)].model).to(device, dtype) for i in range(count)
    }
    images = {n: torch.randn(each, 3, *size, device=device).to(dtype) for n in models}
    fused = {n: fuse(m, keep_source=False) for n, m in models.items()}
    if cuda:
        for model in fused.values():
            model.capture([each])

    def apart(which: dict[str, nn.Module]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {n: which[n](x) for n, x in images.items()}

    def half_paged() -> dict[str, Tensor]:
        with paged._store.turn():
            store = paged._store
            for number in store.residency.shrink(store.residency.size // 2):
                if isinstance(store, StackStore):
                    store.pools.drop(number, shrink=False)
        return paged(images)

    calls: dict[str, Callable[[], object]] = {name: partial(bank, images) for name, bank in banks.items()}
    calls |= {PAGED: half_paged, PLAIN: partial(apart, models), GRAPHED: partial(apart, fused)}
    wanted = apart({n: copy.deepcopy(m).float() for n, m in models.items()}) if not cuda else apart(models)
    for name, call in calls.items():
        for task, logits in call().items():  # type: ignore[attr-defined]
            error = float((logits.float() - wanted[task].float()).abs().max() / wanted[task].float().abs().max())
            if not error <= TOLERANCE:
                raise ValueError(f"{name} differs from timm by {error:.2g} for task {task}; nothing was timed")
    separate = sum(t.numel() * t.element_size() for m in models.values() for t in m.state_dict().values())
    held = {name: bank.memory().device_bytes for name, bank in banks.items()}
    return calls, held | {PAGED: whole, PLAIN: separate, GRAPHED: separate}


def measure(store: Store, tasks: list, case: tuple, device: torch.device, smoke: bool, rounds: int) -> str | None:
    """Time all sides of a case, append their rows, and return what failed."""
    count, each, bound = case
    calls, held = sides(tasks, count, each, device)
    times = in_turns(calls, torch.cuda.synchronize if device.type == "cuda" else lambda: None, rounds)
    times = {name: sorted(found) for name, found in times.items()}
    fastest = BANK_GRAPHED if BANK_GRAPHED in times else BANK_FUSED
    ratio = statistics.median(times[GRAPHED]) / statistics.median(times[fastest])
    for name, found in times.items():
        ms = statistics.median(found)
        store.add({
            "model": "tiny" if smoke else "B/16", "px": 32 if smoke else 224, "tasks": count, "images": each,
            "provider": name, "ms": round(ms, 4), "p90_ms": round(found[int(0.9 * len(found))], 4),
            "images_per_s": round(1e3 * count * each / ms, 1), "weights_bytes": held[name], "rounds": len(found),
        })  # fmt: skip
        print(f"{count} tasks × {each}: {name:<32} {ms:9.3f} ms  {held[name] / 1e6:8.1f} MB", flush=True)
    print(f"{count} tasks × {each}: {fastest} {ratio:.2f}× as fast as {GRAPHED}, bound {bound or 'none'}", flush=True)
    missed = bound is not None and not smoke and "H100" in _rows.context(device.type)["device"] and ratio < bound
    return f"{count} tasks × {each}: {ratio:.2f}×, wanted {bound}×" if missed else None


def measure_factors(store: Store, model: str, count: int, device: torch.device, smoke: bool, rounds: int) -> str | None:
    """Time tasks kept as factors and one model in turns, append their rows, and return what failed."""
    calls, held = _bank_factors.sides(model, count, device, smoke, TOLERANCE)
    found = in_turns(calls, torch.cuda.synchronize if device.type == "cuda" else lambda: None, rounds)
    times = {name: sorted(each) for name, each in found.items()}
    floor, failed = statistics.median(times[_bank_factors.ALONE]), []
    for name, each in times.items():
        ms = statistics.median(each)
        store.add({
            "model": "tiny" if smoke else model, "px": 32 if smoke else 224, "tasks": count, "images": 1,
            "provider": name, "ms": round(ms, 4), "p90_ms": round(each[int(0.9 * len(each))], 4),
            "images_per_s": round(1e3 * count / ms, 1), "weights_bytes": held[name], "rounds": len(each),
        })  # fmt: skip
        print(f"{model}, {count} tasks of factors: {name:<32} {ms:9.3f} ms  {held[name] / 1e6:8.1f} MB", flush=True)
        if name != _bank_factors.ALONE and not smoke and ms / floor > _bank_factors.BOUND:
            failed.append(f"{model}, {count} tasks, {name}: {ms / floor:.2f}×, at most {_bank_factors.BOUND}×")
    return "; ".join(failed) or None


def main(argv: list[str] | None = None) -> int:
    """Run the stage."""
    args = _stage.parser(__doc__, "tiny models, also on a CPU").parse_args(argv)
    device = _stage.device(args.smoke)
    deadline, failed = Deadline(args.seconds), []
    args.out.mkdir(parents=True, exist_ok=True)
    name = "smoke_bank.csv" if args.smoke else "gpu_bank.csv"
    store = Store(args.out / name, KEY, partial(_rows.kernel_context, device.type))
    attempts = Attempts(args.out, "bank", store.git)
    tasks: list[object] = []
    for case in ((3, 1, None),) if args.smoke else CASES:
        key = {"model": "tiny" if args.smoke else "B/16", "px": 32 if args.smoke else 224, "tasks": case[0],
               "images": case[1]}  # fmt: skip
        providers = (BANK, BANK_FUSED, PAGED, PLAIN, GRAPHED, *(() if args.smoke else (BANK_GRAPHED,)))
        what, cost = f"{case[0]} tasks × {case[1]}", 15 + 1.6 * case[0]
        failed.append(attempts.given_up.get(what))
        if all(store.has(**key, provider=p) for p in providers) or what in attempts.given_up:
            continue
        if not deadline.allows(1 if args.smoke else cost, what):
            continue
        try:
            with attempts.row(what, 30 + 2 * cost):
                if not tasks:
                    with tempfile.TemporaryDirectory() as folder:
                        tasks = make_tasks(Path(folder), args.smoke)
                failed.append(measure(store, tasks, case, device, args.smoke, 7 if args.smoke else 50))
        except Exception as error:  # the other cases are still worth their time
            failed.append(f"{what}: {type(error).__name__}: {error}; nothing of it was timed")
    for model, count in (("tiny", 3),) if args.smoke else _bank_factors.CASES:
        key = {"model": model, "px": 32 if args.smoke else 224, "tasks": count, "images": 1}
        what = f"{model}, {count} tasks of factors"
        failed.append(attempts.given_up.get(what))
        done = all(store.has(**key, provider=p) for p in (*_bank_factors.FACTORS.values(), _bank_factors.ALONE))
        if done or what in attempts.given_up or not deadline.allows(1 if args.smoke else 15 + 0.5 * count, what):
            continue
        try:
            with attempts.row(what, 60 + count):
                failed.append(measure_factors(store, model, count, device, args.smoke, 7 if args.smoke else 50))
        except Exception as error:  # the other cases are still worth their time
            failed.append(f"{what}: {type(error).__name__}: {error}; nothing of it was timed")
    return finish("bank", deadline, [f for f in failed if f])


if __name__ == "__main__":
    raise SystemExit(main())

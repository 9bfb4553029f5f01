"""Stage ``train``: time and peak memory of a training step on a GPU, full fine-tuning against attention only.

Each configuration trains ViT-B/16 from the same weights on the same images: forward, loss, backward and AdamW, timed by
the host's clock until the device is done. The peer is full fine-tuning by torch.compile with torch's fused AdamW, also
with its CUDA graphs; "graph" is the step of ``vtk finetune``, captured. Peak memory is the allocator's, weights and
optimiser included (of a graph from before its capture, since a replay allocates nothing), beside what
``vtk finetune --dry-run`` would say. Gradients of the first step are compared with torch's own autograd before anything
is timed.

    benchmarks/gpu.sh train --out DIR
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import _rows
import _stage
import torch
import torch.nn.functional as F
from _attempts import Attempts
from _store import Deadline, Store, finish
from _train_steps import (
    AMP,
    COMPILED,
    COMPILED_GRAPH,
    CONFIGS,
    GRAPH,
    TORCH,
    Case,
    flat_gradient,
    make_step,
    mode_of,
)  # fmt: skip
from torch import Tensor

from vtk import console
from vtk.training.frozen_ffn.estimate import footprints
from vtk.training.policies import policy

KEY = ("model", "px", "batch", "config")
STEPS = 15
COSINE = 0.99
"""Least cosine of a mode's gradients and torch's; bf16 rounds in other places."""
COST, COMPILING = 8.0, 75.0
"""Seconds that a configuration may take, kernels compiled; and one that torch.compile compiles."""


def estimate_mb(case: Case, config: str) -> float | None:
    """Return the bytes that ``--dry-run`` estimates for a mode, in millions; None for what is no mode."""
    mode = mode_of(config)
    if mode is None:
        return None
    bare, _ = Case(case.model, case.name, case.px, case.batch, torch.device("cpu"), case.smoke).build(AMP)
    policy.apply(bare, policy.select(bare, "attn"))
    found = footprints(bare, (3, case.px, case.px), "bf16", modes=(mode,))  # type: ignore[arg-type]
    return round(found[0].total(case.batch) / 1e6, 1)


def measure(case: Case, config: str, steps: int, reference: dict[str, Tensor]) -> dict[str, object]:
    """Measure one configuration; torch's gradients go into ``reference``, where the modes look for them."""
    cuda = case.device.type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    step = make_step(case, config)
    loss, cosine = float(step.gradients()), None
    passed = loss == loss
    if config == TORCH:
        reference[TORCH] = flat_gradient(step.model)
    elif config.startswith("attn") and TORCH in reference:
        cosine = float(F.cosine_similarity(flat_gradient(step.model), reference[TORCH], dim=0))
        passed = passed and cosine >= COSINE
    captured = config.endswith(GRAPH)
    if cuda and captured:  # a replay allocates nothing
        torch.cuda.reset_peak_memory_stats()
    for _ in range(step.warm_up):
        step.gradients()
        step.update()
    synchronize()
    if cuda and not captured:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step.gradients()
        step.update()
        synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() / 1e6 if cuda else None
    median = statistics.median(times)
    return {
        "steps": steps, "step_ms": round(median, 3), "min_ms": round(min(times), 3),
        "images_s": round(1e3 * case.batch / median, 1), "peak_mb": None if peak is None else round(peak, 1),
        "loss": round(loss, 5), "cosine": None if cosine is None else f"{cosine:.6f}", "passed": passed,
    }  # fmt: skip


def show(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table: times and memory, and what they are of compiled full fine-tuning."""
    by_config = {row["config"]: row for row in rows}
    base = by_config.get(COMPILED)

    def part(row: Mapping[str, str], column: str) -> str:
        if base is None or not row[column] or not base[column]:
            return "–"
        return f"{100 * float(row[column]) / float(base[column]):.0f} %"

    shown = [
        (row["config"], row["step_ms"], part(row, "step_ms"), row["peak_mb"] or "–", part(row, "peak_mb"),
         row["estimate_mb"] or "–", row["images_s"], row["cosine"] or "–")
        for row in (by_config[c] for c in CONFIGS if c in by_config)
    ]  # fmt: skip
    columns = ("config", "step, ms", "of peer", "peak, MB", "of peer", "dry run", "images/s", "cosine")
    console.table("Training steps", columns, shown)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _stage.parser(__doc__, "a tiny model, also on a CPU")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    args = parser.parse_args(argv)
    deadline = Deadline(args.seconds)
    device = _stage.device(args.smoke)
    name = "smoke_train.csv" if args.smoke else "gpu_train.csv"
    store = Store(args.out / name, KEY, lambda: _rows.kernel_context(device.type))
    px, batch = (32, 4) if args.smoke else (384, args.batch_size)
    case = Case("B/16", "vit_base_patch16_224", px, batch, device, args.smoke)
    attempts = Attempts(args.out, "train", store.git)
    failed = list(attempts.given_up.values())
    reference: dict[str, Tensor] = {}
    for config in args.configs:
        if store.has(**case.key(config)) or config in attempts.given_up:
            continue
        cost = COMPILING if config in (COMPILED, COMPILED_GRAPH) else COST
        if not deadline.allows(0.1 if args.smoke else cost, config):
            continue
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            with attempts.row(config, 2 * cost + 60):
                row = measure(case, config, 2 if args.smoke else args.steps, reference)
        except Exception as error:  # out of memory, a compiler's: the other configurations are still worth their time
            failed.append(f"{config}: {type(error).__name__}: {error}")
            print(f"{config:<22} FAILED {failed[-1]}", flush=True)
            continue
        estimate = None
        try:
            estimate = estimate_mb(case, config)
        except Exception as error:  # what was measured stays measured
            failed.append(f"estimate of {config}: {type(error).__name__}: {error}")
        store.add({**case.key(config), **row, "estimate_mb": estimate})
        print(f"{config:<22} {row['step_ms']} ms, peak {row['peak_mb']} MB, cosine {row['cosine']}", flush=True)
    show(store.current())
    failed += [row["config"] for row in store.current() if row["passed"] != "True"]
    return finish("train", deadline, failed)


if __name__ == "__main__":
    sys.exit(main())

"""Stage ``train``: time and peak memory of a training step on a GPU, full fine-tuning against attention only.

Each configuration trains ViT-B/16 from the same weights on the same images: forward, loss, backward and AdamW, timed by
the host's clock until the device is done. Peak memory is the allocator's, weights and optimiser included, beside what
``vtk finetune --dry-run`` would say. Gradients of the first step are compared with torch's own autograd in the same
number format before anything is timed.

    benchmarks/gpu.sh train --out DIR
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import _rows
import _stage
import timm
import torch
import torch.nn.functional as F
from _attempts import Attempts
from _store import Deadline, Store, finish
from torch import Tensor, nn

from vtk import console
from vtk.training import policy
from vtk.training.config import MODES, FinetuneConfig
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.frozen_ffn.estimate import footprints
from vtk.training.optim import make_optimizer
from vtk.training.precision import Bf16

KEY = ("model", "px", "batch", "config")
AMP, FULL, TORCH = "full, AMP", "full, bf16", "attn, by torch"
CONFIGS = (AMP, FULL, TORCH, *(f"attn, {mode}" for mode in MODES))
WARM_UP, STEPS = 3, 15
COSINE = 0.99
"""Least cosine of a mode's gradients and torch's; bf16 rounds in other places."""
COST = 8.0
"""Seconds that a configuration may take, kernels compiled."""


@dataclass(frozen=True)
class Case:
    """Model and batch."""

    model: str
    name: str
    px: int
    batch: int
    device: torch.device
    smoke: bool

    def key(self, config: str) -> dict[str, object]:
        """Return the key of a row."""
        return {"model": self.model, "px": self.px, "batch": self.batch, "config": config}

    def images(self) -> Tensor:
        """Return the images of every step."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, 3, self.px, self.px, generator=generator).to(self.device)

    def build(self, config: str) -> nn.Module:
        """Return the model, ready to train as ``config`` says."""
        kwargs = {"embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 10} if self.smoke else {}
        torch.manual_seed(0)
        model = timm.create_model(self.name, img_size=self.px, **kwargs)
        policy.apply(model, policy.select(model, "full" if config in (AMP, FULL) else "attn"))
        policy.train_mode(model)
        mode = config.removeprefix("attn, ")
        if mode in MODES:
            plan = apply_memory_mode(model, mode)  # type: ignore[arg-type]
            assert not plan.reasons, plan
        model.to(self.device)
        if config != AMP:
            Bf16().prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
        return model


def make_step(case: Case, config: str) -> tuple[nn.Module, Callable[[], Tensor], Callable[[], None]]:
    """Return the model, what computes gradients and returns the loss, and what updates."""
    model = case.build(config)
    optimizer = make_optimizer(model, FinetuneConfig(lr=1e-5))
    images = case.images()
    labels = (torch.arange(case.batch) % 10).to(case.device)

    def gradients() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(case.device.type, torch.bfloat16, enabled=config == AMP):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        return loss.detach()

    return model, gradients, optimizer.step  # type: ignore[return-value]


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of the blocks' weights, end to end, on the CPU."""
    return torch.cat([p.grad.flatten().float().cpu() for p in model.blocks.parameters() if p.grad is not None])


def estimate_mb(case: Case, config: str) -> float | None:
    """Return the bytes that ``--dry-run`` estimates for a mode, in millions; None for what is no mode."""
    mode = config.removeprefix("attn, ")
    if mode not in MODES:
        return None
    bare = Case(case.model, case.name, case.px, case.batch, torch.device("cpu"), case.smoke).build(AMP)
    policy.apply(bare, policy.select(bare, "attn"))
    found = footprints(bare, (3, case.px, case.px), "bf16", modes=(mode,))  # type: ignore[arg-type]
    return round(found[0].total(case.batch) / 1e6, 1)


def measure(case: Case, config: str, steps: int, reference: dict[str, Tensor]) -> dict[str, object]:
    """Measure one configuration; torch's gradients go into ``reference``, where the modes look for them."""
    cuda = case.device.type == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    model, gradients, update = make_step(case, config)
    loss, cosine = float(gradients()), None
    passed = loss == loss
    if config == TORCH:
        reference[TORCH] = flat_gradient(model)
    elif config.startswith("attn") and TORCH in reference:
        cosine = float(F.cosine_similarity(flat_gradient(model), reference[TORCH], dim=0))
        passed = passed and cosine >= COSINE
    for _ in range(WARM_UP):
        gradients()
        update()
    synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        gradients()
        update()
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
    """Print a table: times and memory, and what they are of full fine-tuning with eager AMP."""
    by_config = {row["config"]: row for row in rows}
    base = by_config.get(AMP)

    def part(row: Mapping[str, str], column: str) -> str:
        if base is None or not row[column] or not base[column]:
            return "–"
        return f"{100 * float(row[column]) / float(base[column]):.0f} %"

    shown = [
        (row["config"], row["step_ms"], part(row, "step_ms"), row["peak_mb"] or "–", part(row, "peak_mb"),
         row["estimate_mb"] or "–", row["images_s"], row["cosine"] or "–")
        for row in (by_config[c] for c in CONFIGS if c in by_config)
    ]  # fmt: skip
    columns = ("config", "step, ms", "of AMP", "peak, MB", "of AMP", "dry run", "images/s", "cosine")
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
        if not deadline.allows(0.1 if args.smoke else COST, config):
            continue
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            with attempts.row(config, 120):
                row = measure(case, config, 2 if args.smoke else args.steps, reference)
        except Exception as error:  # out of memory, a compiler's: the other configurations are still worth their time
            failed.append(f"{config}: {type(error).__name__}: {error}")
            print(f"{config:<18} FAILED {failed[-1]}", flush=True)
            continue
        estimate = None
        try:
            estimate = estimate_mb(case, config)
        except Exception as error:  # what was measured stays measured
            failed.append(f"estimate of {config}: {type(error).__name__}: {error}")
        store.add({**case.key(config), **row, "estimate_mb": estimate})
        print(f"{config:<18} {row['step_ms']} ms, peak {row['peak_mb']} MB, cosine {row['cosine']}", flush=True)
    show(store.current())
    failed += [row["config"] for row in store.current() if row["passed"] != "True"]
    return finish("train", deadline, failed)


if __name__ == "__main__":
    sys.exit(main())

"""Tunes factors, so that the compressed model gives the full pack's logits on training images; labels are not used."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vtk import console
from vtk.errors import VerificationError
from vtk.packs.factors import Factors

RATE, WARMUP = 3e-4, 0.1
BATCH = 64


@dataclass(frozen=True, eq=False)
class Tuned:
    """The result of `tune`.

    Attributes:
        factors: fp32, on the CPU.
        steps: optimizer steps.
        images: that were seen, with repetitions.
        before: mean KL in the first tenth of the steps.
        after: that in the last tenth.
    """

    factors: dict[str, Factors]
    steps: int
    images: int
    before: float
    after: float


def tune(
    model: nn.Module, start: Mapping[str, Tensor], factors: Mapping[str, Factors], batches: Iterator[Tensor], *,
    steps: int, multi_label: bool,
) -> Tuned:  # fmt: skip
    """Minimise KL(full pack ‖ compressed) over the factors, by AdamW at a falling rate.

    Args:
        model: holds the full pack; in eval mode, fp32. It is not changed.
        start: values of the factored matrices as created from the base, on the model's device.
        factors: to begin with.
        batches: model inputs (B, C, H, W), on the model's device; endless.
        steps: optimizer steps.
        multi_label: whether the outputs are independent labels.

    Raises:
        VerificationError: the loss is not finite.
    """
    device = next(model.parameters()).device
    values = {name: [t.to(device).requires_grad_() for t in f.values()] for name, f in factors.items() if f.rank}
    fixed = {name: start[name] for name in factors}
    flags = {p: p.requires_grad for p in model.parameters()}
    optimizer = torch.optim.AdamW([t for pair in values.values() for t in pair], lr=RATE, weight_decay=0.0)
    losses: list[float] = []
    images = 0
    try:
        for p in flags:
            p.requires_grad_(False)
        with torch.enable_grad(), console.progress("tuning", steps, unit="steps") as bar:
            for step, batch in zip(range(steps), batches, strict=False):
                with torch.no_grad():
                    target = model(batch)
                moved = {name: fixed[name] + (b @ a).reshape(fixed[name].shape) for name, (a, b) in values.items()}
                loss = _divergence(target, functional_call(model, {**fixed, **moved}, (batch,)), multi_label)
                losses.append(float(loss.detach()))
                if not math.isfinite(losses[-1]):
                    raise VerificationError(f"`--tune`: the loss is {losses[-1]} after {step} steps; leave --tune out")
                for group in optimizer.param_groups:
                    group["lr"] = RATE * _rate(step, steps)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                images += len(batch)
                bar.advance(1, f"KL {losses[-1]:.4f}")
    finally:
        for p, flag in flags.items():
            p.requires_grad_(flag)
    found = {name: factors[name] for name in factors if name not in values}
    found |= {name: Factors(a.detach().cpu(), b.detach().cpu()) for name, (a, b) in values.items()}
    some = max(1, len(losses) // 10)
    return Tuned(found, len(losses), images, sum(losses[:some]) / some, sum(losses[-some:]) / some)


def _rate(step: int, steps: int) -> float:
    """Return the share of the peak rate: a linear warm-up, then half a cosine."""
    warm = max(1, round(WARMUP * steps))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _divergence(target: Tensor, logits: Tensor, multi_label: bool) -> Tensor:
    """Return the mean KL divergence over images, in nats; of several labels the sum of those of the labels.

    The squared distance of the logits came as close to them, but kept fewer of the decisions.
    """
    target, logits = target.float(), logits.float()
    if not multi_label:
        return F.kl_div(logits.log_softmax(1), target.log_softmax(1), reduction="batchmean", log_target=True)
    share = target.sigmoid()
    gap = F.binary_cross_entropy_with_logits(logits, share, reduction="sum")
    return (gap - F.binary_cross_entropy_with_logits(target, share, reduction="sum")) / len(logits)

"""Compares outputs with the reference before any latency is shown."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vtk_export.gate.limits import LEAST_COSINE, RELATIVE_BOUND

DISTINCT = 32
"""Different images; larger batches repeat them in turn: the reference stays cheap and every row is compared."""

LEAST_DISTINCT = 4
"""Also of a batch of one: its calls take turns with different images, so that an answer to the last one is seen."""

MIN_COSINE = {"fp16": 0.9999, "bf16": 0.999, "fp8": 0.95, "int8": 0.7, "tf32": 0.9999, "raw": LEAST_COSINE}
"""Least cosine of a row of logits with its reference; bf16 has 3 bits fewer than fp16. fp32: `RELATIVE_BOUND`.

An int8 file's only finds a wrong one: what it costs in accuracy is measured by its export and by ``vtk eval``. TF32 has
the mantissa of fp16. fp8, whose features of photographs are off by 6 % and more of noise, is judged by its most likely
classes when it is loaded. ``raw`` is a file with preprocessing against Pillow's: some pixels differ by a level."""

_LEAST_FP32, _LEAST_HALF = math.log(1e-20), math.log(1e-4)

_CHUNK = 8  # images per reference call: little memory, and another batch size than most that are measured


@dataclass(frozen=True)
class Difference:
    """How far outputs are from the reference.

    Attributes:
        ok: within tolerance.
        max_diff: largest absolute difference, None when shapes differ or a value is not finite.
        reason: one line when not ``ok``.
        tolerance: the bound, in words.
    """

    ok: bool
    max_diff: float | None
    reason: str
    tolerance: str


def compare(output: Tensor, reference: Tensor, precision: str) -> Difference:
    """Compare logits (B, classes) with those of the ``len(reference)`` images that the batch repeats in turn.

    Args:
        output: any floating type and device.
        reference: fp32, CPU.
        precision: ``fp32`` or a key of `MIN_COSINE`; chooses the tolerance.

    A file of many tasks fills logits up to the most classes with its type's lowest number, as the reference does with
    fp32's; these are held against one another and left out of the rest.
    """
    got = output.detach().to("cpu", torch.float32)
    want = batch_of(reference, len(got)) if got.ndim else reference
    got, want, reference = _own_classes(got, want, reference)
    scale = float(reference.abs().max())
    tolerance = tolerance_of(precision, scale)
    if got.shape != want.shape:
        return Difference(False, None, f"output has shape {tuple(got.shape)}, expected {tuple(want.shape)}", tolerance)
    if not torch.isfinite(got).all():
        return Difference(False, None, f"{int((~torch.isfinite(got)).sum())} outputs are NaN or infinite", tolerance)
    right, differ = judge_rows(got, want, precision, scale)
    worst = float(differ.max())
    if right.all():
        return Difference(True, worst, "", tolerance)
    measured = f"differs by {worst:.3g}"
    if precision in MIN_COSINE:
        row = int((~right).nonzero()[0, 0])
        cosine = float(F.cosine_similarity(got[row].double(), want[row].double(), dim=-1))
        length = float(got[row].norm() / want[row].norm().clamp_min(1e-30))
        measured = f"cosine {cosine:.5f}, {length:.3g} times as large"
    return Difference(False, worst, f"{measured}, allowed {tolerance}", tolerance)


def judge_rows(got: Tensor, want: Tensor, precision: str, scale: float) -> tuple[Tensor, Tensor]:
    """Return for each row of logits (B, classes) whether it is right, and its largest absolute difference.

    Args:
        got: fp32; a row with a value that is not finite is wrong.
        want: fp32, finite.
        precision: ``fp32`` or a key of `MIN_COSINE`.
        scale: the largest |logit| of the reference.
    """
    differ = (got - want).abs().amax(-1)
    least = MIN_COSINE.get(precision)
    if least is None:
        return differ <= RELATIVE_BOUND * scale, differ  # not so for NaN
    a, b = got.double(), want.double()
    along = F.cosine_similarity(a, b, dim=-1) >= least
    # a cosine sees no factor: a difference may be twice as long as that of two rows of one length at `least`
    near = (a - b).norm(dim=-1) <= 2 * math.sqrt(2 * (1 - least)) * b.norm(dim=-1)
    # the cosine of two zero rows is 0
    return (along & near) | (differ == 0), differ


def loosest(precision: str, arithmetic: str = "") -> str:
    """Return which of two precisions' bounds hold for a back-end.

    Args:
        precision: of the profile or the file.
        arithmetic: of the back-end's products, where it is another; "" where it is not.
    """
    return min(precision, arithmetic or precision, key=lambda kind: MIN_COSINE.get(kind, 1.0))


def tolerance_of(precision: str, scale: float) -> str:
    """Return the bound of a precision in words."""
    least = MIN_COSINE.get(precision)
    return f"cosine ≥ {least}" if least else f"≤ {RELATIVE_BOUND:g} of the largest |logit| ({scale:.3g})"


def _own_classes(got: Tensor, want: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put 0 where both logits and reference say that an image's task has no such class."""
    lowest = torch.finfo(torch.float32).min
    if got.shape != want.shape or not (padding := want == lowest).any():
        return got, want, reference
    agreed = padding & (got <= torch.finfo(torch.float16).min)
    return got.masked_fill(agreed, 0), want.masked_fill(padding, 0), reference.masked_fill(reference == lowest, 0)


def gives_probabilities(backend: object) -> bool:
    """Return whether a back-end gives no logits but the logarithms of its file's probabilities in their place."""
    outputs = getattr(backend, "outputs", ())
    return "probabilities" in outputs and "logits" not in outputs


def centred(logits: Tensor, *, half: bool) -> Tensor:
    """Return what logits (B, classes) and the logarithms of their softmax have in common, fp32, CPU.

    A softmax keeps only the differences of logits, so the mean of each row is taken away; and what a small probability
    was is lost in its number format, so all below a floor count as the floor.

    Args:
        logits: or logarithms of probabilities.
        half: the probabilities were fp16 or bf16 numbers.
    """
    known = logits.detach().to("cpu", torch.float32).log_softmax(-1).clamp_min(_LEAST_HALF if half else _LEAST_FP32)
    return known - known.mean(-1, keepdim=True)


def batch_of(rows: Tensor, size: int) -> Tensor:
    """Return ``size`` rows, repeating ``rows`` in turn; a contiguous tensor of its own."""
    return rows[torch.arange(size) % len(rows)]


def remarks(reference: Tensor, precision: str = "fp32") -> tuple[str, ...]:
    """Say when equal outputs would prove little: logits (n, classes) that are zero or hardly depend on the image."""
    reference = reference.masked_fill(reference == torch.finfo(torch.float32).min, 0)  # of classes a task does not have
    scale = float(reference.abs().max())
    if scale == 0:
        return ("the reference's logits are all zero (an untrained head?): the comparison proves little",)
    alike, _ = judge_rows(reference.roll(1, 0), reference, precision, scale)
    if len(reference) > 1 and alike.all():
        return ("the logits hardly depend on the image (random weights?): swapped rows could not be seen",)
    return ()


@torch.inference_mode()
def torch_reference(model: torch.nn.Module, images: Tensor) -> Tensor:
    """Return the logits (len(images), classes) of ``model`` in fp32 on the CPU, a few images at a time."""
    model = model.eval().to("cpu", torch.float32)
    return torch.cat([model(chunk) for chunk in images.split(_CHUNK)]).clone()

"""Outputs against the reference, before any latency is shown."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vtk_export.limits import LEAST_COSINE, RELATIVE_BOUND

DISTINCT = 32
"""Different images; larger batches repeat them in turn: the reference stays cheap and every row is compared."""

MIN_COSINE = {"fp16": 0.9999, "bf16": 0.999, "int8": 0.7, "tf32": 0.9999, "raw": LEAST_COSINE}
"""Least cosine of a row of logits with its reference; bf16 has 3 bits fewer than fp16. fp32: `RELATIVE_BOUND`.

An int8 file's only finds a wrong one: what it costs in accuracy is measured by its export and by ``vtk eval``. TF32 has
the mantissa of fp16. ``raw`` is a file with preprocessing against Pillow's: some pixels differ by a level."""

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
    least = MIN_COSINE.get(precision)
    tolerance = f"cosine ≥ {least}" if least else f"≤ {RELATIVE_BOUND:g} of the largest |logit| ({scale:.3g})"
    if got.shape != want.shape:
        return Difference(False, None, f"output has shape {tuple(got.shape)}, expected {tuple(want.shape)}", tolerance)
    if not torch.isfinite(got).all():
        return Difference(False, None, f"{int((~torch.isfinite(got)).sum())} outputs are NaN or infinite", tolerance)
    worst = float((got - want).abs().max())
    if least is None:
        ok = worst <= RELATIVE_BOUND * scale
        measured = f"differs by {worst:.3g}"
    else:
        cosine = float(F.cosine_similarity(got.double(), want.double(), dim=-1).min())
        ok = cosine >= least or worst == 0  # the cosine of two zero rows is 0
        measured = f"cosine {cosine:.5f}"
    return Difference(ok, worst, "" if ok else f"{measured}, allowed {tolerance}", tolerance)


def _own_classes(got: Tensor, want: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put 0 where both logits and reference say that an image's task has no such class."""
    lowest = torch.finfo(torch.float32).min
    if got.shape != want.shape or not (padding := want == lowest).any():
        return got, want, reference
    agreed = padding & (got <= torch.finfo(torch.float16).min)
    return got.masked_fill(agreed, 0), want.masked_fill(padding, 0), reference.masked_fill(reference == lowest, 0)


def batch_of(rows: Tensor, size: int) -> Tensor:
    """Return ``size`` rows, repeating ``rows`` in turn; a contiguous tensor of its own."""
    return rows[torch.arange(size) % len(rows)]


def remarks(reference: Tensor) -> tuple[str, ...]:
    """Say when equal outputs would prove little: logits (n, classes) that are zero or hardly depend on the image."""
    reference = reference.masked_fill(reference == torch.finfo(torch.float32).min, 0)  # of classes a task does not have
    scale = float(reference.abs().max())
    if scale == 0:
        return ("the reference's logits are all zero (an untrained head?): the comparison proves little",)
    if len(reference) > 1 and float((reference - reference[0]).abs().max()) <= RELATIVE_BOUND * scale:
        return ("the logits hardly depend on the image (random weights?): swapped rows could not be seen",)
    return ()


@torch.inference_mode()
def torch_reference(model: torch.nn.Module, images: Tensor) -> Tensor:
    """Return the logits (len(images), classes) of ``model`` in fp32 on the CPU, a few images at a time."""
    model = model.eval().to("cpu", torch.float32)
    return torch.cat([model(chunk) for chunk in images.split(_CHUNK)]).clone()

"""Compares an ONNX file in ONNX Runtime with the model in PyTorch, fp32, at several batch sizes.

The images of a batch differ, so that rows that are mixed up or repeated are noticed.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vtk.errors import DataError, UnavailableError, VerificationError
from vtk.runtime.backends.base import Backend, load_backend
from vtk.runtime.onnx_file import open_onnx
from vtk_export.gate.limits import BATCHES, LIMITS, RELATIVE_BOUND, Limits
from vtk_export.gate.rows import GateRow, check_rows, print_rows
from vtk_export.gate.structure import verify_structure

__all__ = ["BATCHES", "RELATIVE_BOUND", "GateRow", "Sessions", "check_rows", "compare", "open_sessions", "print_rows",
           "verify_structure", "verify_values"]  # fmt: skip

Sessions = Callable[[], contextlib.AbstractContextManager[Sequence[Backend]]]
"""Opens a file for as long as a ``with`` block lasts."""


def verify_values(
    path: Path,
    model: nn.Module,
    images: Tensor,
    *,
    batches: Sequence[int],
    threads: int | None = None,
    names: Sequence[str] = ("logits",),
    limits: Limits = LIMITS["fp32"],
    temperature: float = 1.0,
    sessions: Sessions | None = None,
) -> tuple[list[GateRow], list[str]]:
    """Run the file with graph optimisations on and off, and compare with torch in fp32 on the CPU.

    Args:
        path: the file.
        model: what it was exported from; set to eval mode. It gives what ``names`` says, a tensor or a tuple.
        images: (N, C, H, W) fp32, at least ``sum(batches)``, all different.
        batches: sizes to run, each on the next images.
        threads: CPU threads.
        names: of the outputs; ``probabilities`` are the softmax of the model's first output by the temperature.
        limits: bounds of the file's precision.
        temperature: of the card.
        sessions: opens the file, by default in ONNX Runtime, with optimisations on and off.

    Returns:
        One row per batch size and output, passed or not, and lines to say about how much the comparison means.

    Raises:
        VerificationError: the file cannot be loaded or run, or there is nothing to compare.
        UnavailableError: nothing here runs the file's precision.
    """
    rows: list[GateRow] = []
    first, start = [], 0
    with sessions() if sessions else open_sessions(path, threads) as opened:
        for batch in batches:
            part = images[start : start + batch]
            start += batch
            expected = reference_outputs(model, part, names, temperature)
            results = [run_session(session, part, names) for session in opened]
            first.append(expected[names[0]])
            rows += [compare(expected[name], [r[name] for r in results], limits, name) for name in names]
    return rows, _remarks(torch.cat(first), rows)


@contextlib.contextmanager
def open_sessions(
    path: Path, threads: int | None, *, optimize: tuple[bool, ...] = (True, False)
) -> Iterator[list[Backend]]:
    """Open ``path`` once for each of ``optimize``: with the graph optimisations on or off.

    Raises:
        VerificationError: onnxruntime refuses the file.
        UnavailableError: it has no operators here for the file's precision.
    """
    source = open_onnx(path)
    sessions: list[Backend] = []
    try:
        # onnxruntime has no bf16 arithmetic on the CPU
        cuda = source.facts.precision == "bf16" and torch.cuda.is_available()
        backend, device = ("ort-cuda", "auto") if cuda else ("ort-cpu", "cpu")
        for switch in optimize:
            way = {"optimize": switch, "raw": True}
            sessions.append(
                load_backend(backend, source, device=device, dtype=source.facts.precision, threads=threads, **way)
            )
        yield sessions
    except DataError as error:
        if source.facts.precision != "fp32" and "NOT_IMPLEMENTED" in str(error):
            raise UnavailableError(
                f"onnxruntime cannot run {source.facts.precision} here ({str(error).rpartition(' : ')[2]}), so the "
                "file cannot be verified; export where a CUDA device is, or add --unverified"
            ) from error
        raise VerificationError(str(error)) from error
    finally:
        for session in sessions:
            session.close()


def reference_outputs(
    model: nn.Module, images: Tensor, names: Sequence[str], temperature: float = 1.0
) -> dict[str, Tensor]:
    """Return torch's outputs in fp32 on the CPU, under the file's names."""
    with torch.inference_mode():
        result = model.eval()(images)
    values = result if isinstance(result, tuple) else (result,)
    return {n: (v / temperature).softmax(-1) if n == "probabilities" else v for n, v in zip(names, values, strict=True)}


def run_session(session: Backend, images: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Run a file on ``images`` and return its outputs in fp32 on the CPU.

    Raises:
        VerificationError: it does not run at this batch size.
    """
    try:
        results: Mapping[str, Tensor] = session.run({"pixel_values": images})
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise VerificationError(f"batch {len(images)} does not run: {reason}") from error
    return {name: results[name].float().cpu() for name in names}


def compare(
    expected: Tensor, results: Sequence[Tensor], limits: Limits = LIMITS["fp32"], output: str = "logits"
) -> GateRow:
    """Compare (B, n) outputs of all sessions with torch's."""
    for result in results:
        if result.shape != expected.shape:
            raise VerificationError(f"the file gives {tuple(result.shape)}, torch {tuple(expected.shape)}")
    if not expected.isfinite().all() or not expected.any():
        raise VerificationError(f"PyTorch's {output} are all zero or not finite; nothing can be compared")
    errors = [(result - expected).abs().max().item() for result in results]
    same = torch.ones(len(expected), dtype=torch.bool)
    clear = torch.full_like(same, output != "features")
    if output != "features":
        same = torch.stack([result.argmax(1) == expected.argmax(1) for result in results]).all(0)
        if expected.shape[1] > 1:
            top = expected.topk(2).values
            clear = (top[:, 0] - top[:, 1]) > 2 * max(errors)
    cosine = min(F.cosine_similarity(result.double(), expected.double(), dim=1).min().item() for result in results)
    return GateRow(
        batch=len(expected),
        error=errors[0],
        error_plain=errors[-1],
        bound=math.inf if limits.error is None else limits.error * expected.abs().max().item(),
        agreed=int((same & clear).sum()),
        compared=int(clear.sum()),
        excluded=int((~clear).sum()),
        cosine=cosine,
        least_cosine=-math.inf if limits.cosine is None else limits.cosine,
        output=output,
    )


def _remarks(logits: Tensor, rows: Sequence[GateRow]) -> list[str]:
    remarks = []
    judged = [row for row in rows if row.output != "features"]
    if excluded := sum(row.excluded for row in judged):
        remarks.append(f"{excluded} of {len(logits)} rows excluded: their two best classes are within twice the error")
    spread = (logits - logits.mean(0)).abs().max().item()
    noise = max(row.error if math.isinf(row.bound) else row.bound for row in rows)
    if len(logits) > 1 and spread <= noise:
        remarks.append("the logits of different images differ by less than the bound (are the weights random?), so "
                       "rows that changed places could not be seen")  # fmt: skip
    return remarks

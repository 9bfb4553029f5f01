"""Sections of the performance page that are measured on a CPU, or counted."""

from collections.abc import Iterator

import _bounds
from _tables import NOT_YET, Row, latest, table, where


def launches(rows: list[Row]) -> Iterator[str]:
    """Kernels per forward pass."""
    found = latest(rows, "model")
    lines = [(r["model"], r["kernels"], r["bound"] or "–") for r in found]
    bounds = {_bounds.folded(model): bound for model, bound in _bounds.FOLDED_LAUNCHES.items()}
    lines += [(name, NOT_YET, bound) for name, bound in bounds.items() if all(r["model"] != name for r in found)]
    yield (
        "Counted from the CUDA plan, not timed. Norms are separate kernels or *folded*: the products that write the "
        "residual stream also store its statistics, and the products that read it apply them."
    )
    yield table(("model", "kernels", "bound"), lines)
    yield where(found)


def cpu(rows: list[Row]) -> Iterator[str]:
    """Fused against timm, and ONNX."""
    found = latest(rows, "comparison", "case")
    head = ("comparison", "case", "sequential", "parallel", "fused", "unit", "ratio", "bound", "rounds")
    yield (
        "The variants run in turn; values are medians over rounds. The ratio is that of the first column, against the "
        "faster of timm's two models."
    )
    yield table(head, [[r[k] or "–" for k in head] for r in found], left=2)
    yield where(found)


def engine(rows: list[Row]) -> Iterator[str]:
    """Training engine."""
    found = latest(rows, "comparison", "case")
    head = ("comparison", "case", "first", "second", "unit", "ratio", "bound", "rounds")
    yield table(head, [[r[k] or "–" for k in head] for r in found], left=2)
    yield where(found)


def joint(rows: list[Row]) -> Iterator[str]:
    """Several tasks in one run against runs of their own."""
    found = latest(rows, "model", "task", "tasks", "epochs", "batch_size")
    sizes = ("peak_alone_bytes", "peak_together_bytes", "allowed_bytes")
    lines = [
        (r["model"], r["task"], r["top1_alone"], r["top1_together"], *(f"{int(r[k]) / 1e6:.0f}" for k in sizes))
        for r in found
    ]
    yield (
        "Held-out top-1 accuracy, and the peak memory of the process in MB. *Allowed* is the first task's peak plus, "
        "for each other task, its trained weights, gradients, optimiser state and activations."
    )
    yield table(("model", "task", "alone", "together", "peak alone", "together", "allowed"), lines, left=2)
    yield where(found)

"""The plot of one batch size: a bar for each back-end, a panel for each quantity."""

from typing import Any

from vtk.profiling.cells import Curve
from vtk.profiling.figures import DIM, caption, style
from vtk.profiling.result import ProfileResult


def height(backends: int) -> float:
    """Return the inches of a panel."""
    return 1.0 + 0.3 * backends


def panels(result: ProfileResult) -> list[Any]:
    """Return the functions that draw a panel each."""
    timed = [cell for curve in result.curves() for cell in curve.cells]
    found = [_latency, _throughput]
    found += [_memory] if any(c.memory_bytes for c in timed) else []
    found += [_roofline] if result.has_roofline else []
    return found


def latency_key(curves: list[Curve], p90: str) -> str:
    """Return how to read the latencies of these curves: what is drawn, and only that."""
    cells = [cell for curve in curves for cell in curve.cells]
    parts = ["median"] if any(c.p50_ms is not None for c in cells) else []
    parts += [f"{p90} to p90"] if any(c.p90_ms is not None for c in cells) else []
    parts += ["dash p99"] if any(c.p99_ms is not None for c in cells) else []
    parts += ["open: mean"] if any(c.p50_ms is None for c in cells) else []
    return ", ".join(parts)


def memory_title(curves: list[Curve]) -> tuple[str, str]:
    """Return the title of the panel of memory, and what was counted."""
    counted = any(cell.activation_bytes is not None for curve in curves for cell in curve.cells)
    return ("memory", "weights and activations, counted") if counted else ("peak memory", "")


def _latency(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    for y, curve in enumerate(curves):
        cell, (colour, _) = curve.cells[0], style(curve.index)
        if cell.p90_ms is not None:
            axes.plot([cell.p50_ms, cell.p90_ms], [y, y], color=DIM, linewidth=2.5, solid_capstyle="butt")
        if cell.p99_ms is not None:
            axes.plot(cell.p99_ms, y, "|", color=DIM, markersize=10)
        face = "white" if cell.p50_ms is None else colour
        axes.barh(y, cell.typical_ms, 0.66, facecolor=face, edgecolor=colour, linewidth=1.5)
        right = max(v for v in (cell.typical_ms, cell.p90_ms, cell.p99_ms) if v is not None)
        _number(axes, right, y, f"{cell.typical_ms:.3g}")
    if result.budget_ms is not None:
        axes.axvline(result.budget_ms, color=DIM, linestyle="--", linewidth=1)
    budget = "" if result.budget_ms is None else f"; dashes: budget {result.budget_ms:g} ms"
    caption(axes, "latency", latency_key(curves, "line") + budget)
    _names(axes, curves, f"ms per batch of {curves[0].cells[0].batch}")


def _throughput(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    _bars(axes, curves, [curve.cells[0].images_per_second for curve in curves])
    caption(axes, "throughput")
    _names(axes, curves, "images per second")


def _memory(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    sizes = [curve.cells[0].memory_bytes for curve in curves]
    _bars(axes, curves, [None if size is None else size / 1e6 for size in sizes])
    caption(axes, *memory_title(curves))
    _names(axes, curves, "MB")


def _roofline(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    shares = [curve.cells[0].roofline for curve in curves]
    _bars(axes, curves, [None if share is None else 100 * share for share in shares])
    caption(axes, "roofline", "least possible time over the measured")
    _names(axes, curves, "% of the roof")


def _bars(axes: Any, curves: list[Curve], lengths: list[float | None]) -> None:
    for y, (curve, length) in enumerate(zip(curves, lengths, strict=True)):
        if length is None:
            _number(axes, 0.0, y, "unknown")
        else:
            axes.barh(y, length, 0.66, color=style(curve.index)[0])
            _number(axes, length, y, f"{length:,.0f}" if length >= 100 else f"{length:.3g}")


def _number(axes: Any, right: float, y: int, text: str) -> None:
    axes.annotate(text, (right, y), textcoords="offset points", xytext=(4, 0), va="center", fontsize=8.5)


def _names(axes: Any, curves: list[Curve], label: str) -> None:
    """Name the bars, the first on top, and leave room for the numbers at their ends."""
    axes.set_yticks(range(len(curves)), [curve.name for curve in curves])
    axes.set_ylim(len(curves) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.16 * max(axes.get_xlim()[1], 1e-9))
    axes.set_xlabel(label)

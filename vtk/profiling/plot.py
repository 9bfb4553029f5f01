"""Latency, throughput, memory and roofline against batch size, as PNG."""

import io
from typing import Any

from vtk.marks import SOFTWARE
from vtk.profiling.result import BackendResult, Cell, ProfileResult
from vtk.text import in_plot

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito: safe for colour blindness."""

MARKERS = "osD^vPX*"
_PANEL = {"wide": (4.5, 4.2), "narrow": (4.6, 3.6)}


def latency_png(result: ProfileResult, *, stacked: bool = False) -> bytes:
    """Draw the curves of every back-end, a panel for each quantity that is known.

    Latency: the band reaches from the median to p90, a dash is p99, where there were runs enough; an open marker is a
    mean: that batch size had too few runs for a median. ``stacked`` puts one plot below the other, for narrow screens.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [_latency, _throughput]
    panels += [_memory] if any(c.memory_bytes for _, c in result.cells() if c.status == "ok") else []
    panels += [_roofline] if any(c.roofline is not None for _, c in result.cells()) else []
    columns = 1 if stacked else 2
    rows = -(-len(panels) // columns)
    width, height = _PANEL["narrow" if stacked else "wide"]
    figure = Figure(figsize=(columns * width, rows * height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, draw in zip(grid, panels, strict=False):
        draw(axes, result)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    chans, high, wide = result.input_shape
    where = f"{result.device_name}, threads {result.threads}"
    between = "\n" if stacked else ", "
    title = f"{in_plot(result.model)}, {chans}×{high}×{wide}, {result.precision}{between}{in_plot(where)}"
    figure.suptitle(title, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata=SOFTWARE)
    return buffer.getvalue()


def _latency(axes: Any, result: ProfileResult) -> None:
    from matplotlib.ticker import FuncFormatter

    means = False
    for colour, marker, backend, cells in _curves(result):
        _draw(axes, cells, [c.typical_ms for c in cells], colour, marker, backend.name, hollow=True)
        means = means or any(c.p50_ms is None for c in cells)
        band = [c for c in cells if c.p90_ms is not None]
        if band:
            low, high = [c.p50_ms for c in band], [c.p90_ms for c in band]
            axes.fill_between([c.batch for c in band], low, high, color=colour, alpha=0.18, linewidth=0)
        far = [c for c in cells if c.p99_ms is not None]
        axes.plot([c.batch for c in far], [c.p99_ms for c in far], "_", color=colour, markersize=9)
    tails = any(c.p99_ms is not None for _, c in result.cells())
    title = "latency: median, band to p90" + ", dash p99" * tails + " (open: mean)" * means
    axes.set(title=title, ylabel="ms per batch")
    if _batch_axis(axes, result):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(between(axes.get_ylim())))
        axes.legend(frameon=False, loc="best")
    if result.budget_ms is not None:
        axes.axhline(result.budget_ms, color="#444444", linestyle="--", linewidth=1)
        axes.annotate(
            f"budget {result.budget_ms:g} ms", (0.01, result.budget_ms), xycoords=("axes fraction", "data"),
            textcoords="offset points", xytext=(2, 3), fontsize=9, color="#444444",
        )  # fmt: skip


def _throughput(axes: Any, result: ProfileResult) -> None:
    from matplotlib.ticker import FuncFormatter

    for colour, marker, backend, cells in _curves(result):
        _draw(axes, cells, [c.images_per_second for c in cells], colour, marker, backend.name)
    axes.set(title="throughput", ylabel="images per second")
    if _batch_axis(axes, result):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _memory(axes: Any, result: ProfileResult) -> None:
    for colour, marker, backend, cells in _curves(result):
        known = [c for c in cells if c.memory_bytes is not None]
        _draw(axes, known, [(c.memory_bytes or 0) / 1e6 for c in known], colour, marker, backend.name)
    counted = any(c.activation_bytes is not None for _, c in result.cells())
    axes.set(title="memory: weights and activations, counted" if counted else "peak memory", ylabel="MB")
    if _batch_axis(axes, result):
        most = max(c.memory_bytes or 0 for _, _, _, cells in _curves(result) for c in cells)
        axes.set_ylim(0, 1.08 * max(most / 1e6, 0.01))  # equal numbers would lie on the frame


def _roofline(axes: Any, result: ProfileResult) -> None:
    """Rate against arithmetic per byte that has to be moved; nothing can be above the roof."""
    from matplotlib.ticker import FuncFormatter

    work, limits = result.work, result.ceilings
    if work is None or limits is None:
        return
    rate = limits.flop_per_s[result.precision] / 1e12
    slope = limits.bytes_per_s / 1e12
    shown: list[float] = []
    tops: dict[int, tuple[float, float]] = {}
    for colour, marker, _, cells in _curves(result):
        known = [c for c in cells if c.roofline is not None and c.typical_ms]
        flops = [c.batch * work.flops for c in known]
        x = [f / work.moved_bytes(c.batch, result.precision) for f, c in zip(flops, known, strict=True)]
        y = [f / (1e9 * (c.typical_ms or 1)) for f, c in zip(flops, known, strict=True)]
        axes.plot(x, y, color=colour, marker=marker, linewidth=1.2)
        for cell, a, b in zip(known, x, y, strict=True):
            tops[cell.batch] = max(tops.get(cell.batch, (a, b)), (a, b), key=lambda point: point[1])
        shown += x
    for batch, point in tops.items():  # one number for all curves, whose points are above one another
        axes.annotate(str(batch), point, textcoords="offset points", xytext=(0, 5), fontsize=7, ha="center")
    left, right = min(shown) / 2, max(*shown, rate / slope) * 2
    xs = sorted([left, rate / slope, right])
    axes.plot(xs, [min(rate, slope * x) for x in xs], color="#444444", linewidth=1)
    axes.set(xscale="log", yscale="log", title="roofline (numbers: batch)", xlabel="FLOP per byte", ylabel="TFLOP/s")
    for axis, limits_of in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(between(limits_of)))


def _curves(result: ProfileResult) -> list[tuple[str, str, BackendResult, list[Cell]]]:
    """Return colour, marker, back-end and its timed cells by batch, for those that have any."""
    found = []
    for i, backend in enumerate(result.backends):
        cells = sorted((c for c in backend.cells if c.status == "ok" and c.typical_ms is not None), key=_batch)
        if cells:
            found.append((COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], backend, cells))
    return found


def _draw(
    axes: Any, cells: list[Cell], heights: list[Any], colour: str, marker: str, name: str, *, hollow: bool = False
) -> None:
    axes.plot([c.batch for c in cells], heights, color=colour, linewidth=1.8)
    axes.plot([], [], color=colour, linewidth=1.8, marker=marker, label=name)  # for the legend
    for cell, height in zip(cells, heights, strict=True):
        face = "white" if hollow and cell.p50_ms is None else colour
        axes.plot(cell.batch, height, marker, color=colour, markerfacecolor=face, markersize=6)


def _batch_axis(axes: Any, result: ProfileResult) -> bool:
    """Lay batch sizes along the axis; False, and a word, where nothing was measured."""
    from matplotlib.ticker import NullLocator

    sizes = sorted({c.batch for *_, cells in _curves(result) for c in cells})
    axes.set_xlabel("batch size (images)")
    if not sizes:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
        return False
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(b) for b in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    return True


def _batch(cell: Cell) -> int:
    return cell.batch


def between(limits: tuple[float, float]):  # type: ignore[no-untyped-def]
    """Label 2 and 5 of each decade, all of them when the axis spans less than one."""
    wide = limits[1] > 10 * limits[0]

    def label(value: float, _: int) -> str:
        return f"{value:g}" if not wide or f"{value:e}"[0] in "25" else ""

    return label

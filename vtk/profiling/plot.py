"""Latency, throughput, memory and roofline against batch size, as PNG."""

import math
from dataclasses import replace
from typing import Any

from vtk.profiling import bars
from vtk.profiling.cells import Curve
from vtk.profiling.figures import (
    DIM,
    caption,
    frame,
    heading,
    labelled,
    legend,
    log_ticks,
    new_figure,
    room,
    style,
    to_png,
)
from vtk.profiling.result import ProfileResult

_WIDE, _NARROW = (4.5, 4.0), (4.6, 3.4)
"""Inches of a panel."""


def latency_png(result: ProfileResult, *, stacked: bool = False) -> bytes:
    """Return `latency_figure` as PNG."""
    return to_png(latency_figure(result, stacked=stacked))


def latency_figure(result: ProfileResult, *, stacked: bool = False) -> Any:
    """Draw the curves of every back-end, a panel for each quantity that is known; of one batch size, bars.

    Latency: the band reaches from the median to p90, a dash is p99, where there were runs enough; an open marker is a
    mean: that batch size had too few runs for a median. ``stacked`` puts one plot below the other, for narrow screens.
    """
    curves = result.curves()
    batches = {cell.batch for curve in curves for cell in curve.cells}
    panels: list[Any] = bars.panels(result) if len(batches) == 1 else _panels(result, curves)
    columns = 1 if stacked else min(2, len(panels))
    # an odd panel is the first one, over the whole width: no part of the frame stays empty
    wide_first = columns == 2 and len(panels) % 2
    rows = -(-len(panels) // columns)
    width, height = _NARROW if stacked else _WIDE
    if len(batches) == 1:
        height = bars.height(len(curves))
    elif not curves:
        height = 1.6
    figure = new_figure(max(columns * width, _NARROW[0]), rows * height + 0.2)
    grid = figure.add_gridspec(rows, columns)
    for i, draw in enumerate(panels):
        place = i + 1 if wide_first and i else i
        row, column = divmod(place, columns)
        axes = figure.add_subplot(grid[row, :] if wide_first and not i else grid[row, column])
        draw(axes, result, curves)
        frame(axes, along="x" if len(batches) == 1 else "both")
    if len(batches) > 1:
        legend(figure, figure.axes[0])
    chans, high, wide = result.input_shape
    lines = [f"{result.model}, {chans}×{high}×{wide}, {result.precision}"]
    lines.append(f"{result.device_name}, threads {result.threads}")
    heading(figure, lines if stacked else [", ".join(lines)])
    return figure


def _panels(result: ProfileResult, curves: list[Curve]) -> list[Any]:
    """Return the functions that draw a panel each."""
    if not curves:
        return [_nothing]
    timed = [cell for curve in curves for cell in curve.cells]
    panels = [_latency, _throughput]
    panels += [_memory] if any(c.memory_bytes for c in timed) else []
    panels += [_roofline] if result.has_roofline else []
    return panels


def _nothing(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def _latency(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    for curve in curves:
        colour, _ = _draw(axes, curve, [c.typical_ms for c in curve.cells], hollow=True)
        band = [c for c in curve.cells if c.p90_ms is not None]
        if band:
            low, high = [c.p50_ms for c in band], [c.p90_ms for c in band]
            axes.fill_between([c.batch for c in band], low, high, color=colour, alpha=0.18, linewidth=0)
        far = [c for c in curve.cells if c.p99_ms is not None]
        axes.plot([c.batch for c in far], [c.p99_ms for c in far], "_", color=colour, markersize=9)
    caption(axes, "latency", bars.latency_key(curves, "band"))
    axes.set(ylabel="ms per batch")
    _batch_axis(axes, curves)
    if result.budget_ms is not None:
        axes.axhline(result.budget_ms, color=DIM, linestyle="--", linewidth=1)
        axes.annotate(
            f"budget {result.budget_ms:g} ms", (0.01, result.budget_ms), xycoords=("axes fraction", "data"),
            textcoords="offset points", xytext=(2, 3), fontsize=9, color=DIM,
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
        )  # fmt: skip
    axes.set_yscale("log")
    log_ticks(axes.yaxis, axes.get_ylim())


def _throughput(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    from matplotlib.ticker import FuncFormatter

    for curve in curves:
        _draw(axes, curve, [c.images_per_second for c in curve.cells])
    caption(axes, "throughput")
    axes.set(ylabel="images per second")
    _batch_axis(axes, curves)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _memory(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    """Draw weights and activations; curves that others cover are thicker, so that their rims are seen."""
    known = [
        (replace(curve, cells=cells), [(c.memory_bytes or 0) / 1e6 for c in cells])
        for curve in curves if (cells := [c for c in curve.cells if c.memory_bytes is not None])
    ]  # fmt: skip
    for i, (curve, heights) in enumerate(known):
        covered = sum(_alike(heights, later) for _, later in known[i + 1 :])
        _draw(axes, curve, heights, thicker=min(covered, 3))
    caption(axes, *bars.memory_title(curves))
    axes.set(ylabel="MB")
    _batch_axis(axes, curves)
    most = max(height for _, heights in known for height in heights)
    axes.set_ylim(0, 1.08 * max(most, 0.01))  # equal numbers would lie on the frame


def _alike(heights: list[float], others: list[float]) -> bool:
    return len(heights) == len(others) and all(abs(a - b) < 0.02 * b for a, b in zip(heights, others, strict=True))


def _roofline(axes: Any, result: ProfileResult, curves: list[Curve]) -> None:
    """Rate against arithmetic per byte that has to be moved; nothing can be above the roof."""
    work, limits = result.work, result.ceilings
    if work is None or limits is None:
        return
    rate = limits.flop_per_s[result.precision] / 1e12
    slope = limits.bytes_per_s / 1e12
    tops: dict[int, tuple[float, float]] = {}
    for curve in curves:
        colour, marker = style(curve.index)
        known = [c for c in curve.cells if c.roofline is not None and c.typical_ms]
        flops = [c.batch * work.flops for c in known]
        x = [f / work.moved_bytes(c.batch, result.precision) for f, c in zip(flops, known, strict=True)]
        y = [f / (1e9 * (c.typical_ms or 1)) for f, c in zip(flops, known, strict=True)]
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.2)
        for cell, a, b in zip(known, x, y, strict=True):
            tops[cell.batch] = max(tops.get(cell.batch, (a, b)), (a, b), key=lambda point: point[1])
    batches = sorted(tops)
    reached = [tops[batch][0] for batch in batches]  # more images a call share the weights: ascending
    left, right = reached[0] / 2, max(reached[-1], rate / slope) * 2
    xs = sorted([left, rate / slope, right])
    axes.plot(xs, [min(rate, slope * x) for x in xs], color=DIM, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    caption(axes, "roofline", "numbers: batch size")
    share = math.log(reached[-1] / reached[0]) / math.log(right / left)
    for i in labelled(reached, batches, share * room(axes), fontsize=8):  # one for all curves: same x, other heights
        place = tops[batches[i]]
        axes.annotate(str(batches[i]), place, textcoords="offset points", xytext=(0, 5), fontsize=8, ha="center")
    axes.margins(y=0.12)
    for axis, limits_of in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        log_ticks(axis, limits_of)


def _draw(axes: Any, curve: Curve, heights: list[Any], *, hollow: bool = False, thicker: int = 0) -> tuple[str, str]:
    colour, marker = style(curve.index)
    width, size = 1.8 + 2 * thicker, 6 + 2.5 * thicker
    axes.plot([c.batch for c in curve.cells], heights, color=colour, linewidth=width)
    axes.plot([], [], color=colour, linewidth=1.8, marker=marker, label=curve.name)  # for the legend
    for cell, height in zip(curve.cells, heights, strict=True):
        face = "white" if hollow and cell.p50_ms is None else colour
        axes.plot(cell.batch, height, marker, color=colour, markerfacecolor=face, markersize=size)
    return colour, marker


def _batch_axis(axes: Any, curves: list[Curve]) -> None:
    """Lay batch sizes along the axis: a tick for each, a number where there is room for it."""
    from matplotlib.ticker import NullFormatter

    sizes = sorted({cell.batch for curve in curves for cell in curve.cells})
    axes.set_xlabel("batch size (images)")
    axes.set_xscale("log", base=2)
    shown = [sizes[i] for i in labelled(sizes, sizes, room(axes))]
    axes.set_xticks(shown, [str(b) for b in shown])
    axes.set_xticks(sizes, minor=True)
    axes.xaxis.set_minor_formatter(NullFormatter())

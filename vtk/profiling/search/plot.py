"""The frontier: latency against throughput, a point for each setup that was measured."""

from typing import Any

from vtk.profiling.figures import DIM, caption, frame, heading, legend, log_ticks, new_figure, style, to_png
from vtk.profiling.search.result import SearchResult, SetupResult

_SIZE = (8.6, 5.4)


def frontier_png(result: SearchResult) -> bytes:
    """Return `frontier_figure` as PNG."""
    return to_png(frontier_figure(result))


def frontier_figure(result: SearchResult) -> Any:
    """Draw every measured setup, a colour for each back-end and precision.

    A filled point was measured for the whole ``--duration``, a hollow one until it could not be the best. The line is
    the frontier; its points have batch, threads and instances beside them.
    """
    figure = new_figure(*_SIZE)
    axes = figure.subplots()
    points = [row for row in result.setups if row.judged_ms is not None]
    _points(axes, points)
    edge = sorted((row for row in points if row.frontier), key=lambda row: row.judged_ms or 0.0)
    axes.plot(
        [row.judged_ms for row in edge], [row.images_per_second for row in edge], color=DIM, linewidth=1.2, zorder=1,
        drawstyle="steps-post", label="frontier",
    )  # fmt: skip
    if points:
        axes.set(xscale="log", yscale="log")
        low, high = min(r.judged_ms or 0.0 for r in points), max(r.judged_ms or 0.0 for r in points)
        axes.set_xlim(0.65 * min(low, result.budget_ms), 1.3 * max(high, result.budget_ms))
        axes.margins(y=0.12)
        _budget(axes, result)
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            log_ticks(axis, limits)
    else:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
    axes.set(xlabel=f"latency of a call, p{result.percentile} (ms)", ylabel="images per second, all instances")
    caption(axes, "frontier", "numbers: batch·threads·instances; hollow: measured briefly")
    frame(axes)
    legend(figure, axes)
    chans, height, width = result.input_shape
    heading(figure, [f"{result.model}, {chans}×{height}×{width}, {result.device_name}, {result.cpus} CPUs"])
    _labels(axes, edge, result.best)
    return figure


def _points(axes: Any, points: list[SetupResult]) -> None:
    variants = list(dict.fromkeys((row.backend, row.precision) for row in points))
    for i, variant in enumerate(variants):
        colour, marker = style(i)
        axes.plot([], [], linestyle="", marker=marker, color=colour, label=" ".join(variant))
        for complete in (False, True):
            rows = [r for r in points if (r.backend, r.precision) == variant and (r.status == "complete") is complete]
            axes.plot(
                [row.judged_ms for row in rows], [row.images_per_second for row in rows], linestyle="", marker=marker,
                color=colour, markerfacecolor=colour if complete else "white", markersize=5.5, zorder=2 + complete,
            )  # fmt: skip


def _budget(axes: Any, result: SearchResult) -> None:
    axes.axvline(result.budget_ms, color=DIM, linestyle="--", linewidth=1, zorder=0)
    axes.annotate(
        f"budget {result.budget_ms:g} ms", (result.budget_ms, 0.02), xycoords=("data", "axes fraction"), rotation=90,
        textcoords="offset points", xytext=(3, 0), fontsize=9, color=DIM, va="bottom", zorder=5,
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5},
    )  # fmt: skip
    if (best := result.best) is not None:
        axes.plot(
            best.judged_ms, best.images_per_second, "o", markersize=15, markerfacecolor="none", markeredgewidth=1.6,
            color="black", zorder=4,
        )  # fmt: skip
        name = "recommended" if (best.judged_ms or 0.0) <= result.budget_ms else "nearest to the budget"
        axes.plot([], [], "o", markersize=11, markerfacecolor="none", color="black", linestyle="", label=name)


def _labels(axes: Any, edge: list[SetupResult], best: SetupResult | None) -> None:
    """Write the setups beside the frontier, the recommended one first, where they do not overlap."""
    axes.figure.draw_without_rendering()  # where a text is follows from the layout
    taken: list[Any] = []
    for row in sorted(edge, key=lambda row: (row != best, row.judged_ms or 0.0)):
        text = axes.annotate(
            row.setup.short, (row.judged_ms, row.images_per_second), textcoords="offset points", xytext=(-6, 6),
            fontsize=8, ha="right", fontweight="bold" if row == best else "normal",
        )  # fmt: skip
        box = text.get_window_extent().expanded(1.1, 1.2)
        if box.x0 < axes.bbox.x0 or any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)

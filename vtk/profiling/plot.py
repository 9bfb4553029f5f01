"""Latency and throughput against batch size, as PNG."""

import io

from vtk.profiling.result import Cell, ProfileResult

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for colour blindness
MARKERS = "osD^vP"


def latency_png(result: ProfileResult, *, stacked: bool = False) -> bytes:
    """Draw both curves of every back-end; the band reaches from the median to p90 where there were runs enough.

    An open marker is a mean: that batch size had too few runs for a median. ``stacked`` puts one plot above the other,
    for narrow screens.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(4.6, 7.4) if stacked else (9.0, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    latency, throughput = figure.subplots(2, 1) if stacked else figure.subplots(1, 2)
    batches: set[int] = set()
    means = False
    for i, backend in enumerate(result.backends):
        cells = sorted((c for c in backend.cells if c.status == "ok" and c.typical_ms is not None), key=_batch)
        if not cells:
            continue
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        sizes = [c.batch for c in cells]
        batches.update(sizes)
        curves = ((latency, [c.typical_ms for c in cells]), (throughput, [c.images_per_second for c in cells]))
        for axes, heights in curves:
            axes.plot(sizes, heights, color=colour, linewidth=1.8)
            axes.plot([], [], color=colour, linewidth=1.8, marker=marker, label=backend.name)  # for the legend
            for cell, height in zip(cells, heights, strict=True):
                face = "white" if cell.p50_ms is None and axes is latency else colour
                axes.plot(cell.batch, height, marker, color=colour, markerfacecolor=face, markersize=6)
        means = means or any(c.p50_ms is None for c in cells)
        band = [c for c in cells if c.p90_ms is not None]
        if band:
            low, high = [c.p50_ms for c in band], [c.p90_ms for c in band]
            latency.fill_between([c.batch for c in band], low, high, color=colour, alpha=0.18, linewidth=0)
    latency.set(title="latency: median, band to p90" + (" (open: mean)" if means else ""), ylabel="ms per batch")
    throughput.set(title="throughput", ylabel="images per second")
    if batches:
        latency.set_yscale("log")
        plain = FuncFormatter(lambda value, _: f"{value:g}")
        latency.yaxis.set_major_formatter(plain)
        latency.yaxis.set_minor_formatter(FuncFormatter(_between(latency.get_ylim())))
        throughput.set_ylim(bottom=0)
        throughput.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    if result.budget_ms is not None:
        latency.axhline(result.budget_ms, color="#444444", linestyle="--", linewidth=1)
        latency.annotate(
            f"budget {result.budget_ms:g} ms", (0.01, result.budget_ms), xycoords=("axes fraction", "data"),
            textcoords="offset points", xytext=(2, 3), fontsize=9, color="#444444",
        )  # fmt: skip
    for axes in (latency, throughput):
        if batches:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(batches), [str(b) for b in sorted(batches)])
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes)
        axes.set_xlabel("batch size (images)")
        axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if batches:
        latency.legend(frameon=False, loc="upper left" if result.budget_ms is None else "lower right")
    chans, height, width = result.input_shape
    where = f"{result.device_name}, threads {result.threads}"
    between = "\n" if stacked else ", "
    figure.suptitle(f"{result.model}, {chans}×{height}×{width}, {result.precision}{between}{where}", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _batch(cell: Cell) -> int:
    return cell.batch


def _between(limits: tuple[float, float]):  # type: ignore[no-untyped-def]
    """Label 2 and 5 of each decade, all of them when the axis spans less than one."""
    wide = limits[1] > 10 * limits[0]

    def label(value: float, _: int) -> str:
        digit = f"{value:e}"[0]
        return f"{value:g}" if digit in ("25" if wide else "23456789") else ""

    return label

"""``landscape``: loss on a plane through the weights (Park and Kim 2022, Figure 1a; Chen et al. 2022, Figure 1)."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Context, Diagnostic, Picture, Result, Run
from vtk.analysis.diagnostics.curvature import log_axis
from vtk.analysis.diagnostics.measurement import on_images, sentence
from vtk.analysis.measures.landscape import loss_landscape

_EVERY = 5.0  # seconds between two saves
_WIDE = 10.0  # ratio of losses from which levels are at equal ratios: equal steps would show the rim only
_LEVELS = 14
_SHARP = 1.0  # rise of the loss half-way to the rim, nats: the right class becomes e times less likely
_SMALL = 0.02  # of the loss, or nats: a smaller decrease is not reported


def _measure(context: Context) -> dict[str, Any]:
    settings = context.settings
    return loss_landscape(
        context.model,
        context.loss_batches(context.config.batch_size),
        grid=settings.grid,
        span=context.config.span,
        directions=settings.directions,
        vectors=settings.perturb_vectors,
        **context.loss_options(context.count),
        **{**context.step_options(), "save": _save_at_intervals(context.save)},
    ).to_dict()


def _save_at_intervals(save: Callable[[dict[str, Any]], None]) -> Callable[[list[list[float]]], None]:
    last = time.monotonic()

    def keep(rows: list[list[float]]) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY:
            save({"rows": rows})
            last = time.monotonic()

    return keep


def _grid(result: Result) -> Any:
    import numpy as np

    return np.array([[math.nan if v is None else v for v in line] for line in result["losses"]])


def _draw(runs: Sequence[Run]) -> list[Picture]:
    return [_contours(runs), _slices(runs)]


def _contours(runs: Sequence[Run]) -> Picture:
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize

    grids = [_grid(run.result) for run in runs]
    known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    logarithmic = low > 0 and high > _WIDE * low
    if high <= low:
        high = low + max(abs(low), 1.0) * 1e-3
    levels = np.geomspace(low, high, _LEVELS) if logarithmic else np.linspace(low, high, _LEVELS)
    levels[-1] *= 1 + 1e-9  # rounding must not leave out the highest point
    norm = LogNorm(low, high) if logarithmic else Normalize(low, high)
    figure, every = figures.new(rows=len(runs), height=4.0)
    for axes, run, grid in zip(every, runs, grids, strict=True):
        steps = run.result["steps"]
        shown = np.ma.masked_invalid(grid.T)  # the first direction goes to the right
        filled = axes.contourf(steps, steps, shown, levels=levels, norm=norm, cmap="viridis")
        axes.contour(steps, steps, shown, levels=levels, norm=norm, colors="white", linewidths=0.5, alpha=0.7)
        axes.plot(0, 0, "+", color="white", markersize=10, markeredgewidth=1.5)
        axes.set_aspect("equal")
        figures.finish(axes, x="along the first direction", y="along the second", title=figures.label(run.label))
        bar = figure.colorbar(filled, ax=axes, label="loss, logarithmic" if logarithmic else "loss", format="%.3g")
        bar.set_ticks(levels[::3])
        bar.minorticks_off()
    how = "each output filter" if runs[0].result["directions"] == "filter" else "each input, as in Park and Kim's code"
    caption = (
        "The loss on a plane through the model's weights (the cross), along two random directions scaled to the norm "
        f"of {how}. Narrow rings mean a sharp minimum"
        + ("; both plots have the same levels." if len(runs) > 1 else ".")
        + (" White: the loss is not finite there." if any(not np.isfinite(grid).all() for grid in grids) else "")
    )
    return Picture("landscape", figure, caption)


def _slices(runs: Sequence[Run]) -> Picture:
    figure, (axes,) = figures.new()
    finite = []
    for colour, run in zip(figures.COLOURS, runs, strict=False):
        grid, steps = _grid(run.result), run.result["steps"]
        middle = len(steps) // 2
        for line, style, name in ((grid[:, middle], "o-", "first"), (grid[middle], "s--", "second")):
            axes.plot(steps, line, style, color=colour, markersize=3.5, label=f"{figures.label(run.label)}, {name}")
            finite += [value for value in line.tolist() if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > _WIDE * min(finite):
        log_axis(axes)
    figures.finish(axes, x="step along a direction, in norms of the weights", y="loss", legend=True)
    caption = "Slices of the plane: the loss along each of the two directions, through the model at 0."
    return Picture("landscape-slices", figure, caption)


def _read(result: Result) -> list[str]:
    import numpy as np

    grid, steps, centre = _grid(result), result["steps"], result["centre"]
    lost = int((~np.isfinite(grid)).sum())
    if centre is None or lost == grid.size:
        return ["The loss is not finite at the model's own weights.", sentence(result)]
    x = np.array(steps)
    radius = np.hypot(x[:, None], x[None])
    step = steps[-1] - steps[-2]
    rings = {}
    for wanted in (0.5 * steps[-1], steps[-1]):
        ring = grid[(np.abs(radius - wanted) <= 0.5 * step) & np.isfinite(grid)]
        if ring.size:
            rings[wanted] = float(ring.mean())
    means = " and ".join(f"{mean:.3g} at a distance of {at:g}" for at, mean in rings.items())
    sentences = [f"The loss is {centre:.3g} at the model" + (f", on average {means}." if means else ".")]
    sentences.append(sentence(result))
    lowest = float(np.nanmin(np.where(np.isfinite(grid), grid, np.nan)))
    if lowest < centre - _SMALL * max(abs(centre), 1.0):
        i, j = np.argwhere(grid == lowest)[0]
        sentences.append(
            f"It is lower elsewhere on the plane ({lowest:.3g} at {steps[i]:g}, {steps[j]:g}): the model is not at a "
            "minimum of this loss on these images."
        )
    else:
        sentences.append("No point of the plane is clearly lower: the model is in a minimum as wide as the rings.")
    if lost:
        sentences.append(f"At {lost} of {grid.size} points the loss is not finite: try a smaller --span.")
    if next(iter(rings.values()), centre) - centre >= _SHARP:
        sentences.append("The minimum is narrow: sharpness-aware training makes it wider, `vtk finetune … --sam 0.1`.")
    return sentences


def _numbers(result: Result) -> dict[str, float]:
    import numpy as np

    grid = _grid(result)
    rim = np.concatenate([grid[0], grid[-1], grid[1:-1, 0], grid[1:-1, -1]])
    rim = rim[np.isfinite(rim)]
    end = on_images(result)
    numbers = {} if result["centre"] is None else {f"loss of the model{end}": result["centre"]}
    if rim.size:
        numbers[f"mean loss on the rim, at ±{result['steps'][-1]:g}{end}"] = float(rim.mean())
    return numbers


DIAGNOSTIC = Diagnostic(
    name="landscape",
    title="Loss landscape",
    source=(
        "Park and Kim 2022 (How Do Vision Transformers Work?), Figures 1a and C.4; Chen et al. 2022, Figures 1 and 5; "
        "Li et al. (2018)"
    ),
    explains=(
        "Change of the loss when the weights move, each filter in proportion to its own norm, so that models with "
        "different weights can be compared. Wide rings mean a flat minimum, which tends to generalise better."
    ),
    measure=_measure,
    draw=_draw,
    read=_read,
    numbers=_numbers,
    options=("grid", "span", "directions", "perturb_vectors", "loss_images", "weight_decay"),
    needs=frozenset({"labels"}),
)

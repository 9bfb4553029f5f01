"""Plots of a value by depth with the kinds of units shaded, and sentences about its change at each kind."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from vtk.analysis import figures
from vtk.analysis.diagnostics.base import Result, Run

DEPTH = "normalised depth"
WORDS = {"msa": ("an MSA", "MSAs"), "mlp": ("an MLP", "MLPs"), "conv": ("a Conv block", "Conv blocks")}
"""Singular and plural of each kind of unit that is described; other kinds are not."""

SHADES = "Shading: kind of the unit before a point (white: another kind)."


def panels(runs: Sequence[Run]) -> tuple[Any, list[tuple[Any, list[Run]]]]:
    """Return a figure and its axes with the models to draw in each: one for all if their kinds of units agree, else one
    each, because a shading has to fit all of its models."""
    together = len({tuple(kinds(run.result)) for run in runs}) == 1
    if together:
        figure, (axes,) = figures.new()
        return figure, [(axes, list(runs))]
    figure, all_axes = figures.new(rows=len(runs), height=2.7)
    return figure, [(axes, [run]) for axes, run in zip(all_axes, runs, strict=True)]


def kinds(result: Result) -> list[figures.Unit]:
    """Return the kinds of a result's units, in order."""
    return [unit["kind"] for unit in result["units"]]


def draw_by_depth(
    runs: Sequence[Run],
    value: Callable[[Result], float | None],
    y: str,
    *,
    error: Callable[[Result], float | None] | None = None,
    log: bool = False,
) -> Any:
    """Return a figure of one value of every unit against normalised depth.

    Args:
        runs: results with ``units``, a list of mappings with ``kind``.
        value: of a unit; None leaves a gap.
        y: label of the axis, with its unit.
        error: of a unit: half the length of its error bar.
        log: logarithmic axis, where no value is 0 or below.
    """
    figure, places = panels(runs)
    colours = dict(zip((run.label for run in runs), figures.COLOURS, strict=False))
    for axes, own in places:
        shown = []
        for run in own:
            values = [value(unit) for unit in run.result["units"]]
            shown += [v for v in values if v is not None]
            at = figures.depth(len(values))
            if error is not None:
                bars = [(x, v, error(u)) for x, v, u in zip(at, values, run.result["units"], strict=True)]
                for x, v, half in bars:
                    if v is not None and half is not None:
                        axes.vlines(x, v - half, v + half, color=colours[run.label], alpha=0.5, linewidth=1.2)
            axes.plot(at, [math.nan if v is None else v for v in values], "o-", color=colours[run.label],
                      markersize=3.5, linewidth=1.2, label=figures.label(run.label))  # fmt: skip
        if log and shown and min(shown) > 0:
            axes.set_yscale("log")
        alone = len(places) > 1
        figures.finish(
            axes, x=DEPTH if axes is places[-1][0] else "", y=y,
            title=figures.label(own[0].label) if alone else "", legend=len(own) > 1,
        )  # fmt: skip
        figures.shade(axes, kinds(own[0].result))
    return figure


def steps(result: Result, value: str) -> dict[str, list[tuple[float, float]]]:
    """Return, by kind, the values before and after every unit where both are known and the maps have the same size."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    units: list[Mapping[str, Any]] = result["units"]
    for before, behind in pairwise(units):
        alike = (before["height"], before["width"]) == (behind["height"], behind["width"])
        if alike and before[value] is not None and behind[value] is not None:
            by_kind.setdefault(behind["kind"], []).append((before[value], behind[value]))
    return by_kind


def share_lowered(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the share of units that lower the value."""
    return sum(behind < before for before, behind in pairs) / len(pairs)


def step_sentences(
    steps_of: Mapping[str, Sequence[tuple[float, float]]],
    change: Callable[[Sequence[tuple[float, float]]], str],
    verb: str,
) -> list[str]:
    """Return a sentence for each kind of unit: what it changes on average, and how many lower the value.

    Args:
        steps_of: `steps` by kind.
        change: from the steps of a kind to what a unit does, such as ``multiplies the variance by 2``.
        verb: what units that lower the value do with it, such as ``reduce``.
    """
    sentences = []
    for kind, (one, several) in WORDS.items():
        pairs = steps_of.get(kind, ())
        if pairs:
            lower = sum(behind < before for before, behind in pairs)
            sentences.append(f"{one[0].upper()}{one[1:]} {change(pairs)}; {lower} of {len(pairs)} {several} {verb} it.")
    return sentences


def step_numbers(
    result: Result,
    steps_of: Mapping[str, Sequence[tuple[float, float]]],
    change: Callable[[Sequence[tuple[float, float]]], float],
    value: str,
    names: tuple[str, str],
) -> dict[str, float]:
    """Return the headline numbers of a value by depth: the mean change by kind of unit, and the last value.

    Args:
        result: with ``units``.
        steps_of: `steps` by kind.
        change: from the steps of a kind to their mean change.
        value: key of the value of a unit.
        names: of the numbers; ``{}`` in the first stands for the kind of unit.
    """
    of_step, of_end = names
    numbers = {of_step.format(one): change(steps_of[kind]) for kind, (one, _) in WORDS.items() if kind in steps_of}
    known = [unit[value] for unit in result["units"] if unit[value] is not None]
    return numbers | ({of_end: known[-1]} if known else {})


def without_map(result: Result) -> list[str]:
    """Return a sentence on the units whose features form no map, if there are any."""
    names = result["without_map"]
    return [f"Left out, because their features form no map: {', '.join(names)}."] if names else []


def number(value: float) -> str:
    """Return a number with three digits and a minus sign."""
    return f"{value:.3g}".replace("-", "−")
